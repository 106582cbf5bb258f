"""`zj replay`: recorded requests asked again, of a running server or without one; exact, or told where it is not."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_restart import verify
from tests.serving import WAIT_S_MAX, Server, facts, scripted, until, zj
from zjournal.checkpoint.gguf import read_header
from zjournal.checkpoint.locate import locate
from zjournal.journal import events
from zjournal.journal.projections import Turn
from zjournal.journal.reader import Reader

SAME = {"text": "It is the same again, whatever you ask of me."}


class Told:
    """How a replay ended: exit code, the JSON that it printed, and stderr."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.err = done.stderr
        self.json: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}

    @property
    def statuses(self) -> list[str]:
        return [turn["status"] for turn in self.json["turns"]]

    @property
    def parts(self) -> list[str]:
        return [part["part"] for part in self.json["fingerprint"]]


def replayed(data_dir: Path, name: str, *arguments: str) -> Told:
    return Told(zj("replay", name, "--json", "--data-dir", str(data_dir), *arguments))


def turns(data_dir: Path, session: str) -> list[Turn]:
    with Reader.open(data_dir) as reader:
        return reader.turns(session)


def session_of(data_dir: Path, response: str) -> str:
    with Reader.open(data_dir) as reader:
        turn = reader.turn(response)
    assert turn is not None
    return turn.session


def talk(server: Server, *asks: dict[str, Any]) -> list[str]:
    """A chain of turns; gives their ids."""
    ids: list[str] = []
    for ask in asks:
        more = {"previous_response_id": ids[-1]} if ids else {}
        ids.append(server.respond(**{**ask, **more})["id"])
    return ids


def output_tokens(server: Server) -> int:
    """What /metrics counts."""
    found = re.search(r"^zj_output_tokens_total (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_a_running_servers_engine_replays_and_all_of_it_is_journaled(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SAME)) as server:
        a, b, c = talk(server, {"input": "one"}, {"input": "two"}, {"input": "three", "stream": False})
        branch = server.respond(input="or two", previous_response_id=a)["id"]
        session = session_of(data_dir, a)
        before = turns(data_dir, session), server.http.get(f"/v1/responses/{b}").json()
        counted = output_tokens(server)

        told = replayed(data_dir, session)

        assert (told.code, told.err) == (0, "")
        assert [turn["response"] for turn in told.json["turns"]] == [a, b, c, branch]
        assert told.statuses == ["equal"] * 4
        assert (told.json["verdict"], told.json["first"], told.json["fingerprint"]) == ("equal", None, [])
        assert (turns(data_dir, session), server.http.get(f"/v1/responses/{b}").json()) == before, "it is untouched"
        new = turns(data_dir, told.json["replay"])
        assert [turn.response for turn in new] == [turn["replay"] for turn in told.json["turns"]]
        assert [turn.output for turn in new] == [turn.output for turn in before[0]]
        assert new[0].cached == 0, "the KV of what it is compared with is not met"
        assert new[1].cached > 0, "its own is"
        assert output_tokens(server) - counted == sum(turn.output for turn in new), "the counters agree to the token"
        assert server.terminate() == 0
    kinds = [fact.event for fact in facts(data_dir)]
    (link,) = [event for event in kinds if isinstance(event, events.SessionReplayed)]
    assert (link.session, link.source, link.only) == (told.json["replay"], session, "")
    compared = [event for event in kinds if isinstance(event, events.ReplayCompared)]
    assert [(event.source, event.diverged) for event in compared] == [(name, False) for name in (a, b, c, branch)]
    assert [event.action for event in kinds if isinstance(event, events.AdminActed)] == ["sessions.replay"]
    verify(data_dir)


def test_a_replay_is_no_part_of_a_clients_conversation(tmp_path: Path) -> None:
    """A client that resends its history goes on in its own session, though a replay has the same texts."""
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SAME)) as server:
        said = [{"role": "user", "content": "one"}]
        body = {"model": "default", "messages": said}
        answer = server.post("/v1/chat/completions", body).json()
        session = session_of(data_dir, answer["id"])
        assert replayed(data_dir, answer["id"]).code == 0
        said += [answer["choices"][0]["message"], {"role": "user", "content": "two"}]
        after = server.post("/v1/chat/completions", body).json()
        assert session_of(data_dir, after["id"]) == session


def test_where_an_answer_parts_is_told_and_the_turns_after_it_are_still_compared(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    said = [{"text": "One it is."}, {"text": "Two was said here."}, {"text": "Three at last."}]
    with Server(data_dir, model=scripted(tmp_path, *said)) as server:
        a, b, _ = talk(server, {"input": "one"}, {"input": "two"}, {"input": "three"})
        session = session_of(data_dir, a)
        assert server.terminate() == 0
    said[1] = {"text": "Two was said there."}
    told = replayed(data_dir, session, "--model", scripted(tmp_path, *said))
    assert told.code == 1
    assert told.statuses == ["equal", "diverged", "equal"], "each turn has its recorded prompt"
    first = told.json["first"]
    assert (first["response"], first["token"]) == (b, 3)
    assert first["before"] == "Two was said"
    assert (first["recorded"]["text"], first["replayed"]["text"]) == (" here", " there")
    assert first["recorded"]["token"] != first["replayed"]["token"]
    assert first["logit_distance"] is None, "a scripted model has no logits"
    assert told.parts == ["weights"]
    assert all(turn["differs"] == ["weights"] for turn in told.json["turns"])
    assert [turn["equal_tokens"] for turn in told.json["turns"]][1] == 3
    people = zj("replay", session, "--data-dir", str(data_dir), "--model", scripted(tmp_path, *said))
    assert people.returncode == 1
    assert "verdict   diverged: 2 turns equal, 1 turn diverged" in people.stdout
    assert '  both:     "Two was said"' in people.stdout
    compared = [fact.event for fact in facts(data_dir) if isinstance(fact.event, events.ReplayCompared)]
    assert [(event.equal, event.diverged) for event in compared[:3]] == [(5, False), (3, True), (5, False)]
    verify(data_dir)


def test_a_longer_and_a_shorter_answer_part_at_the_end(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, {"text": "One it is."})) as server:
        (a,) = talk(server, {"input": "one"})
        assert server.terminate() == 0
    shorter = replayed(data_dir, a, "--model", scripted(tmp_path, {"text": "One it"}))
    assert (shorter.code, shorter.json["first"]["token"]) == (1, 2)
    assert shorter.json["first"]["replayed"]["text"] == "<|im_end|>"
    longer = replayed(data_dir, a, "--model", scripted(tmp_path, {"text": "One it is. And more."}))
    assert (longer.code, longer.json["first"]["token"]) == (1, 4), "it is asked for as many tokens as are recorded"
    assert longer.json["first"]["recorded"]["text"] == "<|im_end|>"


def test_one_turn_is_replayed_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SAME)) as server:
        a, b, _ = talk(server, {"input": "one"}, {"input": "two"}, {"input": "three"})
        told = replayed(data_dir, a, "--turn", b[:20])
        assert told.code == 0
        assert [turn["response"] for turn in told.json["turns"]] == [b]
        (turn,) = turns(data_dir, told.json["replay"])
        assert turn.parent == a, "its prompt holds the recorded answer"
        shown = json.loads(zj("sessions", "show", told.json["replay"], "--json", "--data-dir", str(data_dir)).stdout)
        assert shown["replay_of"] == session_of(data_dir, a)


def test_what_was_moved_to_another_machine_is_replayed_there(tmp_path: Path) -> None:
    """An export carries the parts of the fingerprint, so that the other machine can say in what its engine differs."""
    data_dir, there, file = tmp_path / "data", tmp_path / "there", tmp_path / "session.jsonl"
    model = scripted(tmp_path, SAME)
    with Server(data_dir, model=model) as server:
        a, _ = talk(server, {"input": "one"}, {"input": "two"})
        replay = replayed(data_dir, a).json["replay"]
        assert server.terminate() == 0
    assert zj("sessions", "export", replay, "--data-dir", str(data_dir), "-o", str(file)).returncode == 0
    brought = zj("sessions", "import", str(file), "--data-dir", str(there))
    assert brought.returncode == 0, brought.stderr
    told = replayed(there, replay, "--model", model)
    assert (told.code, told.statuses, told.parts) == (0, ["equal", "equal"], [])
    other = replayed(there, replay, "--model", scripted(tmp_path, {**SAME, "delay_ms": 0}))
    assert (other.code, other.parts) == (0, ["weights"])
    with Reader.open(there) as reader:
        assert all(not turn.asked and not turn.history for turn in reader.turns(replay)), "no client continues it"
    verify(there)


def test_what_did_not_end_well_is_replayed_as_far_as_it_came(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    words = {"text": "one two three four five six seven eight"}
    script = scripted(tmp_path, {**words, "fail_after": 4}, words, {**words, "fail_after": 0})
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "prompt_cache_key": "a thread"}
    with Server(data_dir, model=script) as server:
        statuses = [
            server.post("/v1/chat/completions", body | more).status_code for more in ({}, {"max_tokens": 5}, {})
        ]
        assert statuses == [500, 200, 500]
        assert server.terminate() == 0
    with Reader.open(data_dir) as reader:
        (session,) = [session.session for session in reader.sessions()]
    assert [(turn.status, turn.output) for turn in turns(data_dir, session)] == [
        ("failed", 4),
        ("incomplete", 5),
        ("failed", 0),
    ]
    told = replayed(data_dir, session, "--model", scripted(tmp_path, words))
    assert (told.code, told.statuses) == (0, ["equal", "equal", "skipped"])
    assert [turn["recorded_tokens"] for turn in told.json["turns"]] == [4, 5, 0]
    assert told.json["turns"][2]["reason"] == "nothing was sampled for it"


def test_each_way_it_cannot_be_done_is_said_and_exits_2(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    none = replayed(tmp_path / "none", "s_1")
    assert (none.code, none.json) == (2, {})
    assert "there is no journal" in none.err
    with Server(data_dir, "--unstored-retention", "0", model=scripted(tmp_path, SAME)) as server:
        (a,) = talk(server, {"input": "one"})
        unstored = server.respond(input="two", store=False)["id"]
        for response in (unstored, "resp_nothing"):
            gone = replayed(data_dir, response)
            assert gone.code == 2
            assert ("was erased" if response == unstored else "has the id") in gone.err
        folder = tmp_path / "other"
        folder.mkdir()
        other = replayed(data_dir, a, "--model", scripted(folder, SAME))
        assert other.code == 2
        assert "the server that owns this journal serves" in other.err and "--model" in other.err
        settled = replayed(data_dir, a, "--threads", "1", "--speculation", "0")
        assert (settled.code, "leave out --threads, --speculation" in settled.err) == (2, True)
        assert replayed(data_dir, a, "--model", scripted(tmp_path, SAME)).code == 0, "it is what the server serves"
        session = session_of(data_dir, a)
        assert zj("sessions", "delete", session, "--yes", "--data-dir", str(data_dir)).returncode == 0
        deleted = replayed(data_dir, session)
        assert (deleted.code, "was deleted" in deleted.err) == (2, True)
        assert not _running(data_dir)
    verify(data_dir)


def test_an_engine_that_dies_fails_the_turn_and_the_next_ones_are_asked_of_the_next(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SAME)) as server:
        a, _ = talk(server, {"input": "one"}, {"input": "two"})
        assert server.terminate() == 0
    dying = scripted(tmp_path, {"text": "It is the end of it.", "die_after": 2})
    told = replayed(data_dir, a, "--model", dying)
    assert told.code == 2
    assert (told.json["verdict"], told.json["turns"][0]["status"]) == ("failed", "failed")
    assert told.json["turns"][0]["reason"]
    assert not _running(data_dir)
    verify(data_dir)


SLOW = {"text": "slow " * 40}  # four seconds of replay, recorded in none
SLOWLY = {**SLOW, "delay_ms": 100}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_goes_gives_up_its_replay(tmp_path: Path, how: signal.Signals) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SLOW, SLOWLY, SAME)) as server:
        (a,) = talk(server, {"input": "one"})
        with replaying(data_dir, a) as leaving:
            until(lambda: _replays(data_dir))
            leaving.send_signal(how)
            assert leaving.wait(WAIT_S_MAX) != 0
        until(lambda: not _running(data_dir))
        (link,) = _replays(data_dir)
        assert [turn.status for turn in turns(data_dir, link.session)] == ["cancelled"]
        assert server.respond(input="still there?")["status"] == "completed"
        assert server.terminate() == 0
    verify(data_dir)


def test_an_interrupted_command_of_its_own_engine_leaves_nothing_running(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SLOW)) as server:
        (a,) = talk(server, {"input": "one"})
        assert server.terminate() == 0
    with replaying(data_dir, a, "--model", scripted(tmp_path, SLOWLY)) as leaving:
        until(lambda: _replays(data_dir))
        leaving.send_signal(signal.SIGINT)
        assert leaving.wait(WAIT_S_MAX) == 130
    (link,) = _replays(data_dir)
    assert [turn.status for turn in turns(data_dir, link.session)] == ["cancelled"]
    assert any(isinstance(fact.event, events.EngineStopped) for fact in facts(data_dir)[-3:]), "it ended in order"
    verify(data_dir)


def test_a_server_that_stops_gives_up_its_replay(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with Server(data_dir, model=scripted(tmp_path, SLOW, SLOWLY)) as server:
        (a,) = talk(server, {"input": "one"})
        with replaying(data_dir, a) as command:
            until(lambda: _replays(data_dir))
            assert server.terminate() == 0
            _, err = command.communicate(timeout=WAIT_S_MAX)
            assert command.returncode == 2
            assert "shutting down" in err
    (link,) = _replays(data_dir)
    assert [turn.status for turn in turns(data_dir, link.session)] == ["cancelled"], "the drain did not wait for it"
    verify(data_dir)


def replaying(data_dir: Path, name: str, *flags: str) -> subprocess.Popen[str]:
    """A replay that is under way."""
    command = [sys.executable, "-m", "zjournal", "replay", name, "--data-dir", str(data_dir), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _replays(data_dir: Path) -> list[events.SessionReplayed]:
    return [fact.event for fact in facts(data_dir) if isinstance(fact.event, events.SessionReplayed)]


def _running(data_dir: Path) -> list[Turn]:
    with Reader.open(data_dir) as reader:
        return reader.running()


# --- the real model -----------------------------------------------------------------------------------

GREEDY = {"input": "Tell me about the sea and the land.", "temperature": 0, "max_output_tokens": 32}
SEEDED = {"input": "Go on.", "temperature": 0.9, "top_p": 0.9, "seed": 7, "max_output_tokens": 24}
DRAWN = {"input": "And now?", "temperature": 1.2, "top_k": 40, "max_output_tokens": 16}


@contextlib.contextmanager
def traffic(server: Server, streams: int) -> Iterator[list[int]]:
    """Clients that go on asking while the body runs; gives the statuses that they got."""
    statuses: list[int] = []
    enough = threading.Event()

    def client(number: int) -> None:
        while not enough.is_set():
            body = {
                "model": "default",
                "input": f"Tell me the story {number}.",
                "max_output_tokens": 48,
                "seed": number,
            }
            statuses.append(server.post("/v1/responses", body).status_code)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        enough.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The data directory of a server that is gone, with a session of three turns, and that session's id.

    It was asked again while the server had more to do than its KV memory holds.
    """
    data_dir = tmp_path_factory.mktemp("replay") / "data"
    with Server(data_dir, "--kv-memory", "16MiB") as server:  # 352 tokens
        a, _, _ = talk(server, GREEDY, SEEDED, DRAWN)
        session = session_of(data_dir, a)
        with traffic(server, 3) as statuses:
            told = replayed(data_dir, session)
        assert (told.code, told.statuses) == (0, ["equal"] * 3), "in whatever batch, and preempted"
        assert statuses and set(statuses) == {200}
        assert server.terminate() == 0
    yield data_dir, session


def test_greedy_and_seeded_answers_of_the_model_come_out_the_same(recorded: tuple[Path, str]) -> None:
    data_dir, session = recorded
    for flags in ((), ("--weights", "fp32", "--threads", "1")):
        told = replayed(data_dir, session, *flags)
        assert (told.code, told.statuses, told.parts) == (0, ["equal"] * 3, []), flags
    verify(data_dir)


def test_other_weights_are_found_and_named(recorded: tuple[Path, str], tmp_path: Path) -> None:
    data_dir, session = recorded
    told = replayed(data_dir, session, "--model", str(_other_weights(tmp_path)))
    assert told.code == 1
    assert told.parts == ["weights"]
    assert "diverged" in told.statuses
    first = told.json["first"]
    at = first["token"]
    (turn,) = [turn for turn in told.json["turns"] if turn["response"] == first["response"]]
    assert turn["equal_tokens"] == at
    mine, now = first["recorded"], first["replayed"]
    assert mine["token"] != now["token"]
    assert mine["logprob"] < 0 and now["logprob"] < 0
    assert first["logit_distance"] == pytest.approx(mine["logprob"] - now["logprob"])
    if first["response"] == told.json["turns"][0]["response"]:  # greedy: what is taken now is the likeliest now
        assert first["logit_distance"] < 0
    probes = [fact for fact in facts(data_dir) if getattr(fact.event, "response", "").startswith("probe_")]
    assert all(isinstance(fact.event, events.CacheAdmitted | events.CacheEvicted) for fact in probes)
    verify(data_dir)


def test_another_template_alone_changes_no_token(recorded: tuple[Path, str], tmp_path: Path) -> None:
    data_dir, session = recorded
    other = tmp_path / "template.gguf"
    data = bytearray(locate(None, tmp_path).path.read_bytes())
    at = data.index(b"You are a helpful AI assistant")
    data[at : at + 17] = b"You are a hopeful"
    other.write_bytes(data)
    told = replayed(data_dir, session, "--model", str(other))
    assert (told.code, told.statuses, told.parts) == (0, ["equal"] * 3, ["template"]), "the recorded prompts are asked"


def _other_weights(folder: Path) -> Path:
    """The default model with every nibble of one layer's matrix turned over."""
    header = read_header(locate(None, folder).path)
    tensor = header.tensors["blk.12.ffn_down.weight"]
    data = bytearray(header.path.read_bytes())
    assert tensor.type == "Q4_1"
    for block in range(tensor.offset, tensor.offset + tensor.bytes, 20):  # fp16 scale, fp16 minimum, 32 nibbles
        data[block + 4 : block + 20] = bytes(byte ^ 0xFF for byte in data[block + 4 : block + 20])
    target = folder / "weights.gguf"
    target.write_bytes(data)
    return target
