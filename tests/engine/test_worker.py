"""The engine process with a scripted model: a real child over a real socket pair."""

import json
import os
import signal
import socket
import subprocess
import sys
from array import array

import gguf
import msgspec
import pytest

from zjournal.engine.models.scripted import TOKEN_KV_BYTES
from zjournal.link import wire

DEADLINE_S = 60
LETTERS = [chr(byte) for byte in range(0x21, 0x7F)] + ["Ġ"]
END = len(LETTERS)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A GGUF that holds only a tokenizer: a token per character and an end token."""
    path = tmp_path_factory.mktemp("vocabulary") / "letters.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*LETTERS, "<|end|>", "~}"])
    writer.add_token_types([1] * len(LETTERS) + [3, 1])
    writer.add_token_merges(["~ }"])
    writer.add_eos_token_id(END)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encode(text):
    return [LETTERS.index(character) for character in text.replace(" ", "Ġ")]


def decode(ids):
    return "".join(LETTERS[token] for token in ids if token != END).replace("Ġ", " ")


class Engine:
    """The parent's side, blocking; what was read and not asked for yet is kept."""

    def __init__(self, *, stderr=subprocess.PIPE):
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_S)
        command = [sys.executable, "-m", "zjournal.engine.worker", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=stderr, text=True)
        theirs.close()
        self.sock = ours
        self.deframer = wire.Deframer(wire.FromEngine)
        self.heard = []
        self.position = 0

    def send(self, *messages):
        self.sock.sendall(b"".join(map(wire.frame, messages)))

    def next(self):
        """The next message; None at the end of the stream."""
        while self.position == len(self.heard):
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self.heard += self.deframer.feed(data)
        self.position += 1
        return self.heard[self.position - 1]

    def until(self, *conditions):
        """Reads on until each condition was met by some message; returns those messages."""
        met = [None] * len(conditions)
        while None in met:
            message = self.next()
            assert message is not None, f"the engine hung up: {self.heard[-3:]}"
            met = [
                old or (message if condition(message) else None) for old, condition in zip(met, conditions, strict=True)
            ]
        return met

    def ended(self, *requests):
        """Waits until the requests ended, and returns how."""
        ends = (wire.Finished, wire.Failed)
        return self.until(*(lambda m, r=request: isinstance(m, ends) and m.request == r for request in requests))

    def text(self, request):
        ids = array("I")
        for message in self.heard[: self.position]:
            if isinstance(message, wire.Tokens) and message.request == request:
                assert message.position == len(ids)
                ids.extend(wire.unpack_ids(message.ids))
        return decode(ids)

    def cached(self, request):
        (matched,) = [m for m in self.heard if isinstance(m, wire.Matched) and m.request == request]
        return matched.cached

    def stop(self):
        """An orderly end: the engine checks all its invariants, and only then its status is 0."""
        self.send(wire.Stop())
        status = self.process.wait(DEADLINE_S)
        return status, self.process.stderr.read()


@pytest.fixture
def engine_of(vocabulary, tmp_path):
    started = []

    def start(turns, *, blocks=1000, early=(), script=None, **options):
        path = tmp_path / f"script{len(started)}.json"
        path.write_text(script if script is not None else json.dumps({"turns": turns}))
        engine = Engine()
        started.append(engine)
        kv_bytes = blocks * 16 * TOKEN_KV_BYTES
        opening = wire.Start(
            model=str(path), scripted=True, tokenizer=str(vocabulary), kv_bytes=kv_bytes, **{"context": 4000, **options}
        )
        engine.send(opening, *early)
        return engine

    yield start
    for engine in started:
        engine.sock.close()
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait()
        engine.process.stderr.close()


def ask(request, text, *, max_tokens=200, stop=()):
    return wire.Generate(
        request=request,
        tokens=wire.pack_ids(encode(text)),
        namespace="n",
        sampling=wire.Sampling(0.0, 1.0, 0, 0),
        max_tokens=max_tokens,
        end_tokens=(END,),
        stop=stop,
    )


def ready(message):
    return isinstance(message, wire.Ready)


def tokens_of(request):
    return lambda message: isinstance(message, wire.Tokens) and message.request == request


def test_a_request_before_ready_is_answered_and_the_next_turn_reuses_it(engine_of):
    engine = engine_of([{"text": "one two"}], early=[ask("a", "the prompt is longer than a block")])
    (said_ready,) = engine.until(ready)
    assert said_ready.context == 4000
    assert said_ready.kv_tokens == 16_000
    assert isinstance(engine.heard[0], wire.Loading)
    (finished,) = engine.ended("a")
    assert (finished.reason, finished.output) == ("stop", 8)
    assert engine.text("a") == "one two"
    engine.send(ask("b", "the prompt is longer than a blockone two and more"))
    engine.ended("b")
    assert (engine.cached("a"), engine.cached("b")) == (0, 40)
    status, log = engine.stop()
    assert status == 0, log
    assert "blocks free, 2 states, 2 facts not acknowledged" in log
    assert "prompt" not in log


def test_a_script_says_what_it_says_whatever_fence_and_guard_a_request_has(engine_of):
    engine = engine_of([{"text": "a" * 40}])
    fenced = msgspec.structs.replace(
        ask("a", "prompt"),
        fence=wire.Fence(grammar='start: "b"\n', whole=True),
        guard=wire.Guard(8, 8, 4, 16, 2, 2, 1),
    )
    engine.send(fenced)
    (finished,) = engine.ended("a")
    assert (finished.reason, engine.text("a")) == ("stop", "a" * 40)


def test_facts_are_numbered_and_acknowledged(engine_of):
    engine = engine_of([{"text": "x"}])
    for number in range(3):
        engine.send(ask(str(number), f"{number} prompt"))
        engine.ended(str(number))
    facts = [message.fact for message in engine.heard if isinstance(message, wire.CacheChanged)]
    assert facts == [1, 2, 3]
    engine.send(*(wire.Committed(fact) for fact in facts[:2]))
    status, log = engine.stop()
    assert (status, "1 facts not acknowledged" in log) == (0, True), log


def test_two_requests_run_in_one_batch(engine_of):
    engine = engine_of([{"text": "a" * 60, "delay_ms": 2}, {"text": "b" * 60, "delay_ms": 2}])
    engine.send(ask("a", "first"), ask("b", "second"))
    engine.ended("a", "b")
    order = [message.request for message in engine.heard if isinstance(message, wire.Tokens)]
    assert order[:40] == ["a", "b"] * 20
    assert (engine.text("a"), engine.text("b")) == ("a" * 60, "b" * 60)
    assert engine.stop()[0] == 0


def test_a_stop_string_across_tokens(engine_of):
    engine = engine_of([{"text": "say STOP now"}])
    engine.send(ask("a", "x", stop=(b"never", b"STOP")))
    (finished,) = engine.ended("a")
    assert (finished.reason, engine.text("a")) == ("stop_string", "say STOP")


def test_cancel_in_decode_in_prefill_and_in_the_queue(engine_of):
    slow = {"text": "y" * 3000, "delay_ms": 5}
    # A step of 40 tokens takes 40 ms: the prompt of 3,000 is still being read when the cancel comes.
    reading = {"when": "r" * 16, "text": "z", "prefill_ms_per_1k": 1000}
    engine = engine_of([reading, slow], max_running=2, prefill_tokens=40)
    engine.send(ask("decode", "d" * 20, max_tokens=3500))
    engine.until(tokens_of("decode"))
    engine.send(ask("prefill", "r" * 3000), ask("queue", "q" * 20))
    engine.until(lambda m: isinstance(m, wire.Matched) and m.request == "prefill")
    engine.send(wire.Cancel("queue"), wire.Cancel("prefill"), wire.Cancel("decode"), wire.Cancel("unknown"))
    ends = engine.ended("queue", "prefill", "decode")
    assert [end.reason for end in ends] == ["cancelled"] * 3
    assert [ends[0].output, ends[1].output] == [0, 0]
    assert ends[2].output == len(engine.text("decode")) > 0
    (idle,) = engine.until(lambda m: isinstance(m, wire.Gauges) and m.running == m.waiting == 0)
    assert idle.states == 0
    status, log = engine.stop()
    assert status == 0, log


def test_fail_after_fails_one_and_the_other_goes_on(engine_of):
    engine = engine_of([{"text": "bad words", "fail_after": 3}, {"text": "good words"}])
    engine.send(ask("bad", "first"), ask("good", "second"))
    failed, finished = engine.ended("bad", "good")
    assert (failed.code, engine.text("bad")) == ("engine_error", "bad")
    assert (finished.reason, engine.text("good")) == ("stop", "good words")
    assert engine.stop()[0] == 0


def test_die_after_is_seen_as_the_end_of_the_stream(engine_of):
    engine = engine_of([{"text": "last words", "die_after": 4}])
    engine.send(ask("a", "x"))
    while engine.next() is not None:
        pass
    assert engine.text("a") == "last"
    assert engine.process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_request_that_can_never_run_is_refused_with_the_numbers(engine_of):
    engine = engine_of([{"text": "x"}], blocks=4)
    engine.send(ask("context", "x" * 3900), ask("memory", "x" * 60, max_tokens=50), ask("fits", "x", max_tokens=2))
    context, memory, fits = engine.ended("context", "memory", "fits")
    assert (context.code, memory.code) == ("context_length_exceeded",) * 2
    assert "4000" in context.message
    assert "64 tokens" in memory.message
    assert fits.reason == "stop"


def test_eviction_is_told(engine_of):
    engine = engine_of([{"text": "x"}], blocks=4)
    for letter in "abc":
        engine.send(ask(letter, letter * 30, max_tokens=2))
        engine.ended(letter)
    changes = [(m.change, m.request) for m in engine.heard if isinstance(m, wire.CacheChanged)]
    assert changes == [("admit", "a"), ("admit", "b"), ("evict", "a"), ("admit", "c")]
    assert engine.stop()[0] == 0


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ({"script": '{"turns": [{"txt": "x"}]}'}, "model", "txt"),
        ({"script": '{"turns": [{"text": "x"}]}', "max_running": 600}, "config", "600"),
    ],
)
def test_what_cannot_be_loaded_is_told_and_the_process_ends_with_70(engine_of, options, code, word):
    engine = engine_of(None, **options)
    (broken,) = engine.until(lambda m: isinstance(m, wire.Broken))
    assert broken.code == code
    assert word in broken.message
    assert engine.next() is None
    assert engine.process.wait(DEADLINE_S) == 70


def test_a_damaged_tokenizer_is_told(engine_of, vocabulary, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(vocabulary.read_bytes()[:200])
    engine = engine_of([{"text": "x"}])
    engine.until(ready)
    other = Engine()
    try:
        other.send(wire.Start(model=str(tmp_path / "script0.json"), scripted=True, tokenizer=str(cut)))
        (broken,) = other.until(lambda m: isinstance(m, wire.Broken))
        assert "cut.gguf" in broken.message
        assert other.process.wait(DEADLINE_S) == 70
    finally:
        other.sock.close()
        other.process.kill()
        other.process.stderr.close()


@pytest.mark.parametrize("busy", [False, True])
def test_when_the_parent_is_gone_the_engine_goes(engine_of, busy):
    engine = engine_of([{"text": "y" * 3000, "delay_ms": 5}])
    engine.until(ready)
    if busy:
        engine.send(ask("a", "x", max_tokens=3500))
        engine.until(tokens_of("a"))
    engine.sock.close()
    assert engine.process.wait(DEADLINE_S) == 0


def test_an_interrupt_from_the_terminal_is_ignored(engine_of):
    engine = engine_of([{"text": "still here"}])
    engine.until(ready)
    os.kill(engine.process.pid, signal.SIGINT)
    engine.send(ask("a", "x"))
    engine.ended("a")
    assert engine.text("a") == "still here"
    assert engine.stop()[0] == 0


def test_a_scripted_engine_does_not_import_torch():
    code = "import sys, zjournal.engine.worker; print(sorted({'torch', 'litestar', 'sqlite3'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
