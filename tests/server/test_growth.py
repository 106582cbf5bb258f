"""Growth follows new content: an agent that resends everything each turn, on journals that a real server wrote."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, zj
from zjournal.journal import snapshots
from zjournal.journal.reader import Reader
from zjournal.sessions.makers import Makers
from zjournal.sessions.records import Records

TURNS = 60  # in each half
WORDS = 40  # that a turn adds
KEPT_BYTES_MAX = 240  # of a deleted turn: its ids, digests and numbers, of which some 140 nothing can make smaller
CHUNK_BYTES_MAX = 500  # of a chunk on disk: its hash and marks in a fact, and a row with its indexes
CHUNK_TURNS = 10
ON_DISK_BYTES_MAX = 100  # of a deleted turn whose KV was on disk: the hashes of its chunks, in two facts
ANSWER = "The harbour log says that the tide turns at nine and the pilot is late again."
RULES = "Keep to the log, and say where each entry stands. " * 20


class Agent:
    """Resends its history, as JSON of its own spelling. `honest`: it resends answers as it got them."""

    def __init__(self, server: Server, *, clock: bool = False, honest: bool = True, ascii_only: bool = False) -> None:
        self.server, self.clock, self.honest, self.ascii_only = server, clock, honest, ascii_only
        self.messages: list[dict[str, str]] = [{"role": "system", "content": RULES}]
        self.sent: dict[str, bytes] = {}  # response -> body
        self._chance = random.Random(5)
        letters = "abcdefghijklmnopqrstuvwxyzé"
        self._words = ["".join(self._chance.choices(letters, k=self._chance.randint(2, 9))) for _ in range(2_000)]

    def turn(self) -> None:
        if self.clock:
            self.messages[0]["content"] = f"It is {len(self.messages)} o'clock. {RULES}"
        said = " ".join(self._chance.choices(self._words, k=WORDS)) + '\n\t"…"'
        self.messages.append({"role": "user", "content": said})
        body = {"model": "default", "messages": self.messages, "prompt_cache_key": "agent"}
        raw = json.dumps(body, ensure_ascii=self.ascii_only).encode()
        answer = self.server.http.post("/v1/chat/completions", content=raw)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": text if self.honest else text.upper()})
        self.sent[answer.json()["id"]] = raw

    def bodies_are_kept(self) -> None:
        """Byte for byte, in a fresh look at the journal."""
        with Reader.open(self.server.data_dir) as reader:
            records = Records(reader, Makers(reader))
            for response, raw in reversed(self.sent.items()):
                turn = reader.turn(response)
                assert turn is not None
                assert records.body(turn) == raw
                assert len(records.prompt(turn)[0]) == turn.prompt


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": ANSWER})) as server:
        yield server


def stop(server: Server) -> int:
    """Ends the server in order; the bytes of its journal."""
    assert server.terminate() == 0
    return (server.data_dir / "journal.db").stat().st_size


@pytest.mark.parametrize("on_disk", [False, True])
def test_o14_the_journal_grows_with_what_is_new(server: Server, on_disk: bool) -> None:
    """Field report O14: the history is written again each turn, and deleting gives no space back.

    What stays of a deleted turn are its numbers and digests: facts, which prove the chain, and a row. Where its KV is
    kept on disk, the journal names each chunk of it as well.
    """
    empty = stop(server)
    server.flags += ["--snapshots", "on" if on_disk else "off"]
    sizes = [empty]
    agent = Agent(server)
    for _ in range(2):
        server.start()
        for _ in range(TURNS):
            agent.turn()
        sizes.append(stop(server))
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    with Reader.open(server.data_dir) as reader:
        chunks = snapshots.totals(reader).chunks
    assert bool(chunks) == on_disk
    assert second < 1.25 * first + chunks * CHUNK_BYTES_MAX, sizes
    naive = sum(map(len, agent.sent.values()))
    assert sizes[2] - empty < naive / 15, (sizes, naive)
    agent.bodies_are_kept()
    verify(server.data_dir)

    where = ("--data-dir", str(server.data_dir))
    (session,) = json.loads(zj("sessions", "list", "--json", *where).stdout)
    server.start()
    before = sum(file.stat().st_size for file in server.data_dir.glob("journal.db*") if file.suffix != ".db-shm")
    deleted = zj("sessions", "delete", session["session"], "--yes", "--json", *where)
    assert json.loads(deleted.stdout)["deleted"]["turns"] == 2 * TURNS
    compacted = zj("journal", "compact", "--json", *where)
    assert compacted.returncode == 0, compacted.stderr
    told = json.loads(compacted.stdout)
    assert told["freed"] == told["before"] - told["after"] > 0, "it says how many bytes came back"
    file = server.data_dir / "journal.db"
    assert told["after"] == file.stat().st_size
    assert before - told["after"] > (sizes[2] - empty) / 2
    left = stop(server) - empty
    kept = KEPT_BYTES_MAX + (ON_DISK_BYTES_MAX if on_disk else 0)
    assert left < min(2 * TURNS * kept, sizes[2] - empty)
    verify(server.data_dir)


def test_whatever_a_client_changes_each_turn(server: Server) -> None:
    """A clock in the system prompt and answers that are changed: what is the same is stored once all the same.

    All the KV is new then, each turn: where it is kept on disk the journal names each chunk of it, and no more.
    """
    empty = stop(server)
    server.flags += ["--snapshots", "off"]
    agent = Agent(server, clock=True, honest=False, ascii_only=True)
    sizes = [empty]
    for _ in range(2):
        server.start()
        for _ in range(TURNS):
            agent.turn()
        sizes.append(stop(server))
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second < 1.25 * first, sizes

    server.flags += ["--snapshots", "on"]
    server.start()
    for _ in range(CHUNK_TURNS):
        agent.turn()
    third = stop(server) - sizes[-1]
    with Reader.open(server.data_dir) as reader:
        chunks = snapshots.totals(reader).chunks
    assert chunks > 2 * CHUNK_TURNS
    assert third < 2 * second * CHUNK_TURNS / TURNS + chunks * CHUNK_BYTES_MAX, (third, second, chunks)
    agent.bodies_are_kept()
    verify(server.data_dir)


def test_a_changed_answer_does_not_lose_the_parent(server: Server) -> None:
    """Each request begins with the whole one before it, so it continues that, in one session."""
    agent = Agent(server, honest=False)
    for _ in range(4):
        agent.turn()
    with Reader.open(server.data_dir) as reader:
        turns = [reader.turn(response) for response in agent.sent]
        parents = [turn.parent for turn in turns if turn is not None]
    assert parents == ["", *list(agent.sent)[:-1]]
