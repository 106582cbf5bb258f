"""What a plan stands on: the rate that was measured, and which namespaces are not in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.journal.facts import START_US, accepted, open_journal, session, whole_turn
from tests.unit.journal.stored import backed_up
from tests.unit.snapshots.chunks import NAMESPACE, tokens
from zjournal.errors import JournalFault
from zjournal.journal import snapshots as journaled
from zjournal.journal.events import CacheMatched, EngineStarted, Fact, PromptRendered, ResponseFinished
from zjournal.journal.log import Journal
from zjournal.sessions import identity, snapshots
from zjournal.snapshots.plan import Rates, Why

DATA = tokens(300, 1)


def computed(journal: Journal, response: str, prompt: int, cached: int, seconds: float) -> None:
    """A turn that took so long for the tokens of its prompt that were not cached."""
    end = ResponseFinished(
        tenant="local",
        response=response,
        reason="stop",
        output=1,
        queue_us=0,
        decode_us=1,
        prefill_us=int(seconds * 1e6),
    )
    journal.append(
        [
            accepted(journal, response)[0],
            Fact(PromptRendered(tenant="local", response=response, count=prompt)),
            Fact(CacheMatched(tenant="local", response=response, tier="device", cached=cached, prompt=prompt)),
            Fact(end),
        ]
    ).result()


def store(journal: Journal, response: str, namespace: str) -> None:
    event, marks = backed_up(response, DATA, namespace=namespace)
    assert journal.run(lambda tx: journaled.back_up(tx, event, marks)).result()


def test_the_rate_is_that_of_turns_which_computed_enough(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        assert snapshots.rates(journal) == Rates(snapshots.PREFILL_TOKENS_S)
        right = Rates(500.0)
        for number, (prompt, cached) in enumerate([(2000, 0), (3000, 2500)]):
            computed(journal, f"r{number}", prompt, cached, right.recompute_s(cached, prompt - cached))
        computed(journal, "r9", 2000, 1999, 5.0)  # one token tells nothing
        assert snapshots.rates(journal).prefill_tokens_s == pytest.approx(500.0, rel=1e-3)


def test_a_new_life_is_told_the_speed_of_the_last_engine_that_computed(tmp_path: Path) -> None:
    def start(fingerprint: str) -> None:
        engine = EngineStarted(pid=1, model="m", fingerprint=fingerprint, kernels="k", context=1, kv_tokens=1)
        journal.append([Fact(engine)]).result()

    with open_journal(tmp_path) as journal:
        journal.append([session("s1")]).result()
        assert snapshots.speed(journal) is None
        start("slow")
        computed(journal, "r1", 2000, 0, Rates(50.0).recompute_s(0, 2000))
        assert snapshots.speed(journal) == ("slow", pytest.approx(50.0, rel=1e-3))
        start("fast")
        assert snapshots.speed(journal) == ("slow", pytest.approx(50.0, rel=1e-3)), "the new one computed nothing yet"
        computed(journal, "r2", 2000, 0, Rates(5000.0).recompute_s(0, 2000))
        assert snapshots.speed(journal) == ("fast", pytest.approx(5000.0, rel=1e-3)), "what others did does not count"
        assert 50 < snapshots.rates(journal).prefill_tokens_s < 5000


@pytest.mark.parametrize("salt", ["", "ab12"])
def test_kv_of_other_weights_goes_first_and_only_for_room(tmp_path: Path, salt: str) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1"), *whole_turn(journal, "r2", parent="r1")]).result()
        started = EngineStarted(pid=1, model="m", fingerprint="today", kernels="k", context=1, kv_tokens=1)
        store(journal, "r1", identity.kv_namespace(identity.namespace("today", "local"), salt))
        assert snapshots.foreign(journal, snapshots.load(journal)[1].values()) == frozenset(), "nothing is known yet"
        journal.append([Fact(started)]).result()
        assert snapshots.foreign(journal, snapshots.load(journal)[1].values()) == frozenset()
        other = EngineStarted(pid=1, model="m", fingerprint="new", kernels="k", context=1, kv_tokens=1)
        journal.append([Fact(other)]).result()
        rows = snapshots.load(journal)[1].values()
        assert snapshots.foreign(journal, rows) == {NAMESPACE}
        plan, _, _ = snapshots.plan_collection(journal, 1 << 30, START_US)
        assert plan.deletions == () and plan.fits
        plan, _, _ = snapshots.plan_collection(journal, 0, START_US)
        assert {one.why for one in plan.deletions} == {Why.FOREIGN} and len(plan.deletions) == 2


def test_rows_that_contradict_each_other_are_no_plan(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.append([session("s1"), *whole_turn(journal, "r1")]).result()
        store(journal, "r1", "n")
        journal.run(lambda tx: tx.db.execute("DELETE FROM chunk WHERE tokens = 256")).result()
        with pytest.raises(JournalFault, match="rebuild"):
            snapshots.plan_collection(journal, 0, START_US)
        journal.rebuild()
        assert snapshots.plan_collection(journal, 0, START_US)[0].freed > 0
