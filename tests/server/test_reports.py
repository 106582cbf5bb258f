"""Field reports that the journal answers, each with its input on a real server; others have files of their own.

O11: test_restart, O14: test_growth, O17: test_log_size and test_transfer, R23: test_vocabulary, R27: test_memory. What
O13, O15, O16 and R22 say of snapshots on SSD is asked in test_snapshot_reports; here it is asked of the journal.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.golden import make
from tests.server.test_growth import Agent, stop
from tests.server.test_restart import verify
from tests.serving import Server, scripted, until, zj
from tests.unit.journal.facts import open_journal, session, whole_turn
from zjournal.journal import datadir, removal
from zjournal.journal.database import SCHEMA_VERSION
from zjournal.journal.events import CacheMatched, RequestAccepted, SessionDeleted
from zjournal.journal.reader import Reader


def _stats(data_dir: Path) -> dict:
    done = zj("journal", "stats", "--json", "--data-dir", str(data_dir))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _held(data_dir: Path) -> int:
    found = _stats(data_dir)
    return found["file_bytes"] - found["free_bytes"]


def _listed(data_dir: Path) -> list[str]:
    done = zj("sessions", "list", "--json", "--data-dir", str(data_dir))
    assert done.returncode == 0, done.stderr
    return [row["session"] for row in json.loads(done.stdout)]


def test_o13_a_limit_is_kept_above_all_after_a_restart(tmp_path: Path) -> None:
    """Field report O13: 83 GB with a limit of 64 GB, and old files accepted at the start without a check.

    Twenty sessions that were there before the limit; each one that goes is a fact, and a dry run predicts the list.
    """
    data_dir = tmp_path / "data"
    names = [f"s_{k:016x}" for k in range(20)]
    with open_journal(data_dir) as journal:  # its clock stands at 2023
        for k, name in enumerate(names):
            journal.append([session(name)])
            record = random.Random(k).randbytes(20_000)
            journal.append(whole_turn(journal, f"resp_{k:04x}{0:028x}", session=name, record=record)).result()
    model = scripted(tmp_path, {"text": "Noted."})
    with Server(data_dir, model=model) as server:
        server.respond(input="before the limit")
        assert server.terminate() == 0
        for limit in (_held(data_dir) - 80_000, _held(data_dir) - 200_000):
            where = ("--data-dir", str(data_dir))
            plan = zj("sessions", "prune", "--older-than", "1h", "--max-bytes", str(limit), "--json", *where)
            predicted = [row["session"] for row in json.loads(plan.stdout)["sessions"] if row["action"] == "delete"]
            before = _listed(data_dir)
            server.flags += ["--journal-max-bytes", str(limit)]
            server.start()
            until(lambda limit=limit: _held(data_dir) <= limit)  # type: ignore[misc]
            server.respond(input="and after it")
            assert server.terminate() == 0
            left = _listed(data_dir)
            gone = set(before) - set(left)
            assert gone == set(predicted) and gone
            assert max(gone) < min(set(names) & set(left)), "the oldest went"
            del server.flags[-2:]
    with Reader.open(data_dir) as reader:
        told = [fact.event for fact in reader.before(reader.head + 1, SessionDeleted)]
        assert {event.session for event in told} == set(names) - {row.session for row in reader.sessions()}
        assert {event.cause for event in told} == {"size_cap"}
    verify(data_dir)


def test_o15_other_weights_under_the_same_name_match_nothing(tmp_path: Path) -> None:
    """Field report O15: other weights at the same path take what the old ones left: "hit", then garbage.

    The namespace, under which alone KV is looked for, is that of the weights and not of the name or the time; what was
    said before is told as it was.
    """
    model = scripted(tmp_path, {"text": "one and two"})
    path = Path(model.partition(":")[2])
    words = " ".join(f"word{k}" for k in range(100))
    with Server(tmp_path / "data", "--snapshots", "off", model=model) as server:
        first = server.respond(input=words)
        server.kill()
        os.utime(path, (1, 1))  # touched, and the same
        server.start()
        same = server.respond(input=words)
        server.kill()
        scripted(tmp_path, {"text": "something else"})
        server.start()
        other = server.respond(input=words)
        assert server.http.get(f"/v1/responses/{first['id']}").json() == first
        again = server.respond(input=words)
        assert server.terminate() == 0
    with Reader.open(tmp_path / "data") as reader:
        facts = {
            answer["id"]: [fact.event for fact in reader.read_response(answer["id"])]
            for answer in (first, same, other, again)
        }
    spaces = [_one(facts[answer["id"]], RequestAccepted).namespace for answer in (first, same, other, again)]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]
    matched = _one(facts[other["id"]], CacheMatched)
    assert (matched.cached, matched.reason) == (0, "cold")
    assert _one(facts[again["id"]], CacheMatched).cached > 100
    assert other["output"][0]["content"][0]["text"] == "something else"
    verify(tmp_path / "data")


def _one(found: list, kind: type) -> RequestAccepted | CacheMatched:
    (event,) = (event for event in found if isinstance(event, kind))
    return event


def test_o16_what_was_half_written_breaks_no_later_start(tmp_path: Path) -> None:
    """Field report O16: killed while it wrote, and from then on every start and every retry fails."""
    data_dir = tmp_path / "data"
    datadir.prepare(data_dir)
    (data_dir / "journal.db.new").write_bytes(random.Random(1).randbytes(5_000))  # killed while it made the first
    (data_dir / "journal.head.new").write_bytes(b"zjhead")
    chance = random.Random(2)
    with Server(data_dir, model=scripted(tmp_path, {"text": "word " * 200, "delay_ms": 1})) as server:
        previous = {}
        for _ in range(3):
            told = server.respond(input="before", **previous)
            previous = {"previous_response_id": told["id"]}
            body = {"model": "default", "input": "go on", "stream": True, **previous}
            with server.http.stream("POST", "/v1/responses", json=body) as answer:
                for _, _line in zip(range(chance.randrange(20, 60)), answer.iter_lines(), strict=False):
                    pass
                server.kill()
            with (data_dir / "journal.db-wal").open("ab") as log:  # a frame whose end never reached the disk
                log.write(chance.randbytes(24 + 4_096)[: chance.randrange(1, 4_100)])
            (data_dir / "journal.head.new").write_bytes(b"zjhead")
            server.start()
            assert server.http.get(f"/v1/responses/{told['id']}").json() == told
        assert server.respond(input="and now?", **previous)["status"] == "completed"
        assert server.terminate() == 0
        assert "Traceback" not in server.log.read_text()
    assert {path.name for path in data_dir.iterdir()} == {"journal.db", "journal.head", "snapshots", "zjournal.lock"}
    verify(data_dir)


@pytest.fixture
def twelve(tmp_path: Path) -> Path:
    """Twelve sessions, the lower the number the older: s_3 has no token, s_5 is pinned, s_2 branches off s_1."""
    with open_journal(tmp_path / "data") as journal:
        for k in range(12):
            journal.append([session(f"s_{k}")])
            more = {"session": f"s_{k}", "record": b"canary-o28-%d " % k * 20}
            facts = whole_turn(journal, f"resp_{k}", parent="resp_1" if k == 2 else "", **more)  # type: ignore[arg-type]
            journal.append(facts if k != 3 else facts[:2]).result()
        journal.recover()
        removal.pin(journal, "s_5", True)
    return tmp_path / "data"


def test_o28_prune_takes_what_it_names_and_nothing_else(tmp_path: Path, twelve: Path) -> None:
    """Field report O28: a prune with a hidden second filter finds nothing, or takes what runs. Beside a server."""
    where = ("--data-dir", str(twelve))
    slow = {"when": "slow", "text": "word " * 2_000, "delay_ms": 50}
    with Server(twelve, model=scripted(tmp_path, slow, {"text": "Noted."})) as server:
        server.respond(input="of today", prompt_cache_key="today")
        body = {"model": "default", "input": "slow", "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            today = [name for name in _listed(twelve) if not name.startswith("s_") or len(name) > 5]
            assert len(today) == 2
            bare = zj("sessions", "prune", "--yes", *where)
            assert (bare.returncode, "prune needs a filter" in bare.stderr) == (2, True)
            old = _plan(twelve, "--older-than", "30d")
            assert old == {f"s_{k}": "pinned" if k == 5 else "delete" for k in range(12)}
            assert _plan(twelve, "--before", "2023-01-01") == {}
            assert _plan(twelve, "--empty", "--older-than", "30d") == {"s_3": "delete"}
            assert _plan(twelve, "--id", "s_5", "--id", "s_1") == {"s_5": "pinned", "s_1": "delete"}
            assert _plan(twelve, "--model", "smollm2") == old
            assert "running" in _plan(twelve, "--before", "2999-01-01").values()
            assert len(_listed(twelve)) == 14, "a plan deletes nothing"

            done = zj("sessions", "prune", "--id", "s_1", "--yes", "--json", *where)
            assert json.loads(done.stdout)["deleted"]["kept"] == 1, "s_2 is built on it"
            done = zj("sessions", "prune", "--older-than", "30d", "--yes", *where)
            assert done.returncode == 0 and "10 sessions" in done.stdout and "bytes freed" in done.stdout
            assert sorted(_listed(twelve)) == sorted(["s_5", *today])
        assert server.terminate() == 0
    files = b"".join(path.read_bytes() for path in twelve.iterdir() if path.is_file())
    assert b"canary-o28-5" in files, "the pinned one is there"
    assert not any(b"canary-o28-%d" % k in files for k in range(12) if k != 5)
    verify(twelve)


def _plan(data_dir: Path, *filters: str) -> dict[str, str]:
    """What a dry run would do with each session that the filters match."""
    done = zj("sessions", "prune", *filters, "--json", "--data-dir", str(data_dir))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["deleted"] is None
    return {row["session"]: row["reason"] or row["action"] for row in found["sessions"]}


def test_r17_a_server_starts_on_a_journal_of_each_schema(tmp_path: Path) -> None:
    """Field report R17: after an upgrade it does not start ("no such column"), or the list looks empty."""
    for schema in range(1, SCHEMA_VERSION + 1):
        data_dir = tmp_path / f"data{schema}"
        make.unpack(make.JOURNALS / f"{schema}.db.zst", data_dir)
        with Reader.open(data_dir) as reader:
            before = {row.session for row in reader.sessions()}
        with Server(data_dir, model=scripted(tmp_path, {"text": "Noted."})) as server:
            assert before and before <= set(_listed(data_dir))
            assert server.respond(input="after the upgrade")["status"] == "completed"
            assert server.terminate() == 0
        verify(data_dir)


@pytest.mark.parametrize("on_disk, most", [("off", 1.3), ("on", 1.6)])
def test_r22_what_is_written_follows_what_is_new(tmp_path: Path, on_disk: str, most: float) -> None:
    """Field report R22: each checkpoint rewrites the whole prefix. All writing is in a log that nobody empties.

    Where KV is kept on disk, facts of it come beside the others: how many share a commit depends on the moment.
    Writing the whole prefix each time would triple the second part.
    """
    flags = ("--checkpoint", "external", "--snapshots", on_disk)
    with Server(tmp_path / "data", *flags, model=scripted(tmp_path, {"text": "The tide turns at nine."})) as server:
        agent = Agent(server)
        log = tmp_path / "data" / "journal.db-wal"
        sizes = []
        for _ in range(3):
            for _ in range(40):
                agent.turn()
            sizes.append(log.stat().st_size)
        first, second, third = sizes[0], sizes[1] - sizes[0], sizes[2] - sizes[1]
        assert third < most * second and second < most * first, sizes
        stop(server)
    shutil.rmtree(tmp_path / "data")
