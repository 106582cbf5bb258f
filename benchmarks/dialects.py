"""How fast the dialects parse, token by token: calls and prose, beside decoding the same tokens and nothing else.

And how long it takes to find the answers of a long history again, and to put them into the next prompt as they were
sampled: beside encoding the text of that prompt.

The outputs are prose and calls with a file, rendered by each dialect and cut by the tokenizer of the demo model, with
the dialect's own tags as tokens beside it. Each token is fed alone, as it is when it is sampled; the best of the runs
counts, for another process can only make one slower.

    python benchmarks/dialects.py [RUNS]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts.table import Line, head, text

from zjournal import ask
from zjournal.checkpoint.gguf import read_header
from zjournal.checkpoint.locate import locate
from zjournal.checkpoint.template import Template
from zjournal.checkpoint.tokenizer import Tokenizer
from zjournal.dialects import dsml, glm, llama3
from zjournal.dialects.base import Dialect, Parser, Piece, TextParser
from zjournal.dialects.chatml import ChatML
from zjournal.dialects.prompt import assemble, pack, write
from zjournal.dialects.qwen_xml import QwenXml
from zjournal.sessions.items import digests, units

RUNS = 7
TOKENS_PER_S_MUST = 200_000
SPLICE_TOKENS = 100_000  # at least, of a history of ROUNDS answers with calls, and their results
SPLICE_MS_MUST = 20.0
ROUNDS = 100
CALL_CHARACTERS = 3_400  # of the file in each call
TURNS = 8  # of prose and calls in one output
SOURCE = Path(json.__file__).read_text()
PROSE = "Let me look at a < b first.\n\nThe file may hold more than one, so I read it whole, then change it.\n\n"
TAGS = (*glm.TAGS, "<think>", "</think>", dsml.MARKER, llama3.TAG)

Token = tuple[bytes, bool]


class Spoken:
    """The demo model's tokenizer, with the tags of all dialects as tokens beside its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.control: Mapping[str, int] = tokenizer.control | {
            tag: tokenizer.vocab_size + index for index, tag in enumerate(TAGS)
        }

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def tokens(self, pieces: Sequence[Piece], tags: Sequence[str]) -> list[Token]:
        """What a model would have written for the pieces."""
        tokens: list[Token] = []
        for piece in pieces:
            parts = [piece.text]
            for tag in tags if piece.trusted else ():
                parts = [bit for part in parts for bit in _parted(part, tag)]
            for part in parts:
                if part in tags and piece.trusted:
                    tokens.append((part.encode(), True))
                else:
                    tokens += [(self._tokenizer.token_bytes(i), False) for i in self._tokenizer.encode(part)]
        return tokens


def _parted(part: str, tag: str) -> list[str]:
    bits = part.split(tag)
    return [bit for index in range(len(bits)) for bit in ([tag, bits[index]] if index else [bits[0]]) if bit]


def _tool() -> ask.ToolSpec:
    properties = {"path": {"type": "string"}, "text": {"type": "string"}, "edits": {"type": "array"}}
    return ask.ToolSpec("write", None, json.dumps({"type": "object", "properties": properties}).encode())


def _output(spoken: Spoken, dialect: Dialect, prose: bool) -> list[Token]:
    """Some ten thousand tokens of one kind."""
    tags = [tag for tag, ids in dialect.literals.items() if len(ids) == 1]
    if prose:
        return spoken.tokens([Piece(PROSE * 40 * TURNS)], tags)
    arguments = {"path": "json/__init__.py", "text": SOURCE[:3000], "edits": [{"line": 3, "new": SOURCE[:600]}] * 2}
    call = ask.Call("c", "write", json.dumps(arguments))
    calls = 1 if dialect.name == "llama3" else TURNS
    return spoken.tokens(dialect.calls([], [call] * calls), tags) * (TURNS // calls)


def _best(make: Callable[[], Parser], tokens: Sequence[Token], runs: int) -> float:
    """Tokens a second of the fastest run."""
    best = 0.0
    for _ in range(runs):
        feed = (parser := make()).feed
        started = time.perf_counter()
        for data, control in tokens:
            feed(data, control)
        parser.end()
        best = max(best, len(tokens) / (time.perf_counter() - started))
    return best


def lines(runs: int) -> list[Line]:
    """The table."""
    cache = Path(tempfile.gettempdir()) / "zjournal-bench"
    spoken = Spoken(Tokenizer.from_header(read_header(locate(None, cache).path)))
    plain = Tokenizer.from_header(read_header(locate(None, cache).path))
    dialects: list[Dialect] = [
        ChatML(spoken, thinks=True),
        ChatML(plain),
        glm.Glm(spoken, newlines=True),
        glm.Glm(spoken),
        dsml.Dsml(spoken),
        QwenXml(spoken, thinks=True),
        llama3.Llama3(spoken),
    ]
    found = []
    tool = _tool()
    for dialect in dialects:
        told = any(len(ids) == 1 for ids in dialect.literals.values())
        for prose in (False, True):
            tokens = _output(spoken, dialect, prose)
            rate = _best(lambda dialect=dialect: dialect.parser([tool]), tokens, runs)  # type: ignore[misc]
            peer = _best(TextParser, tokens, runs)
            what = f"{dialect.name}{'' if told else ', tags as text'}: {'prose' if prose else 'calls'}"
            target = (f"{TOKENS_PER_S_MUST:,}/s", rate >= TOKENS_PER_S_MUST)
            found.append(Line(what, f"{rate:,.0f} tok/s", f"decoding alone {peer:,.0f}", rate / peer, *target))
    return found


def splice_line(runs: int) -> Line:
    """A tool loop is sent again, its calls spelled in another way: each answer is found, and replayed as sampled.

    Looking turns up in the journal is not in it; tests/server/test_exact_replay.py does that.
    """
    header = read_header(locate(None, Path(tempfile.gettempdir()) / "zjournal-bench").path)
    tokenizer = Tokenizer.from_header(header)
    template, dialect = Template.from_header(header, tokenizer.special_texts), ChatML(tokenizer)
    asked, sent = _history(tokenizer, dialect)
    best = whole = float("inf")
    for _ in range(runs + 1):  # the first one encodes the texts of the client, which are remembered
        started = time.perf_counter()
        digests(units(sent), b"start")
        found = assemble(asked, template, tokenizer, dialect)
        best = min(best, time.perf_counter() - started)
        assert len(found.ids) >= SPLICE_TOKENS, len(found.ids)
        tokenizer.forget()
        text = tokenizer.decode(found.ids)
        started = time.perf_counter()
        tokenizer.encode(text)
        whole = min(whole, time.perf_counter() - started)
        tokenizer.forget()
        assemble(asked, template, tokenizer, dialect)
    what = f"splice: {len(found.ids):,} tokens, {ROUNDS} answers"
    target = (f"{SPLICE_MS_MUST:g} ms", 1000 * best <= SPLICE_MS_MUST)
    return Line(what, f"{1000 * best:.1f} ms", f"encoding its text {1000 * whole:.0f} ms", whole / best, *target)


def _history(tokenizer: Tokenizer, dialect: Dialect) -> tuple[ask.Ask, list[ask.Item]]:
    """A request whose answers are outputs, and the items as a client sends them, each call spelled in another way."""
    items: list[ask.Item] = [ask.Message("user", (ask.Text(PROSE, "messages[0].content"),))]
    sent = list(items)
    for index in range(ROUNDS):
        path = f"messages[{2 * index + 1}]"
        value = {"path": f"file {index}", "text": SOURCE[index * 50 :][:CALL_CHARACTERS], "edits": [index]}
        said = ask.Message("assistant", (ask.Text("I write it.", path),))
        call = ask.Call(f"call_{index}", "write", json.dumps(value))
        spelled = ask.Call(call.call_id, call.name, json.dumps(value, sort_keys=True, indent=1), path)
        result = ask.Result(call.call_id, (ask.Text(f"Written: {index}.", path),))
        sampled = write(dialect.calls([Piece(said.text)], [call]), tokenizer)
        items += [ask.Output(f"r{index}", (said, call), pack(sampled)), result]
        sent += [said, spelled, result]
    return ask.Ask(protocol="chat", model="m", items=tuple(items), tools=(_tool(),)), sent


def main() -> None:
    print(head())
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    for line in [*lines(runs), splice_line(runs)]:
        print(text(line))


if __name__ == "__main__":
    main()
