"""A data directory outlives a model: what an earlier model said is told, and continued, as the client saw it."""

from __future__ import annotations

import struct
from pathlib import Path

from tests.server.test_restart import verify
from tests.serving import Server
from zjournal.checkpoint.locate import locate
from zjournal.journal.reader import Reader
from zjournal.sessions.prompts import Prompts

SWAPPED = (" the", " and")


def other_vocabulary(target: Path, cache: Path) -> Path:
    """The default model with two words of its vocabulary changed for each other."""
    data = bytearray(locate(None, cache).path.read_bytes())
    entries = [struct.pack("<Q", 5) + ("Ġ" + word.strip()).encode() for word in SWAPPED]
    places = [data.index(entry) for entry in entries]
    for place, entry in zip(places, reversed(entries), strict=True):
        data[place : place + len(entry)] = entry
    target.write_bytes(data)
    return target


def test_an_earlier_models_answer_is_told_with_its_own_vocabulary(tmp_path: Path) -> None:
    other = other_vocabulary(tmp_path / "other.gguf", tmp_path)
    with Server(tmp_path / "data") as server:
        ask = {"input": "Tell me about the sea and the land.", "temperature": 0, "max_output_tokens": 48}
        first = server.respond(**ask)
        text = first["output"][0]["content"][0]["text"]
        assert any(word in text for word in SWAPPED), text
        server.kill()
        server.flags += ["--model", str(other)]
        server.start()
        assert server.http.get(f"/v1/responses/{first['id']}").json() == first
        second = server.respond(input="Go on.", max_output_tokens=4, previous_response_id=first["id"])
        assert second["model"] != first["model"]
        with Reader.open(tmp_path / "data") as reader:
            turn = reader.turn(second["id"])
            assert turn is not None
            prompt = Prompts(reader).of(turn)
        assert prompt.vocabulary is not None
        ids = memoryview(prompt.ids).cast("I").tolist()
        assert text in prompt.vocabulary.decode(ids).decode()
    verify(tmp_path / "data")
