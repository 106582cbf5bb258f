"""SmolLM2 over SIGTERM and SIGKILL: what follows from restored KV has the logits of a server that never stopped.

Logprobs are told as they were computed, so equal ones to the last digit stand for equal bits. And the KV on disk that
was computed behind what was restored has the bytes of a cold run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving import Server, until
from zjournal.journal import snapshots
from zjournal.journal.reader import Reader
from zjournal.sessions import snapshots as files
from zjournal.snapshots import format
from zjournal.snapshots.chunk import ChunkFile
from zjournal.snapshots.folder import Folder

QUESTION = " ".join(f"Bee number {number} visits flower {number * 7 % 100}." for number in range(45))
NUMBERS = ("prompt_tokens", "completion_tokens")
MORE = ("Which bee was the first?", "And which the last?", "Name one flower.")


def chat(server: Server, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "default", "messages": messages, "max_tokens": 10, "temperature": 0}
    answer = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 4})
    assert answer.status_code == 200, answer.text
    return answer.json()


def talk(server: Server, before_turn: dict[int, Any]) -> list[dict[str, Any]]:
    """Four turns; something may happen before one of them."""
    messages = [{"role": "user", "content": QUESTION}]
    answers = []
    for turn in range(len(MORE) + 1):
        if turn in before_turn:
            before_turn[turn](answers[-1])
        answers.append(chat(server, messages))
        reply = answers[-1]["choices"][0]["message"]["content"]
        if turn < len(MORE):
            messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": MORE[turn]}]
    return answers


def computed(answer: dict[str, Any]) -> int:
    """Tokens whose KV there is behind an answer: the last one was never fed back."""
    return sum(answer["usage"][name] for name in NUMBERS) - 1


def wait_written(server: Server, response: str, tokens: int) -> None:
    """Until so many tokens of a response's state are on disk; a tail is written as soon as nothing runs."""

    def written() -> bool:
        with Reader.open(server.data_dir) as reader:
            kept = snapshots.snapshot(reader, response)
        return kept is not None and kept.tokens >= tokens

    until(written)


def kv(data_dir: Path) -> dict[bytes, list[bytes]]:
    """The KV on disk: the blocks of each chunk, by all tokens up to its end."""
    found: dict[bytes, list[bytes]] = {}
    before: dict[bytes, bytes] = {format.ROOT: b""}
    with Reader.open(data_dir) as reader, Folder(files.folder_of(data_dir)) as folder:
        for row in (row for page in snapshots.chunks(reader) for row in page):
            with ChunkFile(folder, row.space, row.hash) as file:
                chunk = file.header.chunk
                into = [memoryview(bytearray(chunk.block_bytes)) for _ in range(chunk.blocks)]
                file.read(into)
            before[row.hash] = before[row.parent] + chunk.tokens
            found[before[row.hash]] = [bytes(block) for block in into]
    return found


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, uninterrupted: list[dict[str, Any]]) -> dict[bytes, list[bytes]]:
    """The KV of the last turn, computed at once by a server that has seen nothing before."""
    messages = [{"role": "user", "content": QUESTION}]
    for answer, more in zip(uninterrupted, MORE, strict=False):
        reply = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": more}]
    with Server(tmp_path_factory.mktemp("once") / "data") as server:
        last = chat(server, messages)
        assert last["choices"] == uninterrupted[-1]["choices"]
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        wait_written(server, last["id"], computed(last))
        assert server.terminate() == 0
        return kv(server.data_dir)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with Server(tmp_path_factory.mktemp("cold") / "data", "--snapshots", "off") as server:
        return talk(server, {})


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_answers_after_a_restart_are_bitwise_those_without(
    tmp_path: Path, uninterrupted: list[dict[str, Any]], cold: dict[bytes, list[bytes]], codec: str
) -> None:
    """The server reads what is on disk: what a busy machine measures must not decide what is compared here."""
    answers = killed_twice(tmp_path / "data", codec)
    for turn, (answer, wanted) in enumerate(zip(answers, uninterrupted, strict=True)):
        assert answer["choices"] == wanted["choices"], f"turn {turn}"
        assert answer["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    for turn in (1, 3):
        before = answers[turn - 1]["usage"]
        cached = answers[turn]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= before["prompt_tokens"] + before["completion_tokens"] - 2, reasons(tmp_path / "data")
    restored = kv(tmp_path / "data")
    longest = max(cold, key=len)
    assert len(longest) // format.TOKEN_BYTES == computed(answers[-1])
    for tokens, blocks in cold.items():
        assert restored[tokens] == blocks, f"the KV up to token {len(tokens) // format.TOKEN_BYTES}"


def killed_twice(data_dir: Path, codec: str) -> list[dict[str, Any]]:
    """The answers of a server that gets SIGTERM before its second turn and SIGKILL before its fourth."""
    with Server(data_dir, "--snapshot-codec", codec, "--snapshot-restore", "always") as server:

        def terminate(last: dict[str, Any]) -> None:
            wait_written(server, last["id"], computed(last))
            assert server.terminate() == 0
            server.start()

        def kill(last: dict[str, Any]) -> None:
            wait_written(server, last["id"], computed(last))
            server.restart()

        answers = talk(server, {1: terminate, 3: kill})
        wait_written(server, answers[-1]["id"], computed(answers[-1]))
        assert server.terminate() == 0
    return answers


def reasons(data_dir: Path) -> list[str]:
    """Why each turn met no more of the cache."""
    with Reader.open(data_dir) as reader:
        return [turn.cache_reason for session in reader.sessions() for turn in reader.turns(session.session)]
