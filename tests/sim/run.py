"""The driver: plays a plan on the real journal, life after life, and holds each life's remains against the model.

It alone knows what was acknowledged. What was under way when a life ended may be there or not, but whole; what failed
may come back with the next opening, as long as nothing was committed since; everything else must be there exactly.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.sim import life as living
from tests.sim.disk import Disk
from tests.sim.kept import Mismatch
from tests.sim.model import (
    Append,
    Collect,
    Command,
    Compact,
    EraseHidden,
    Export,
    Model,
    Pin,
    Prune,
    Rebuild,
    Recover,
    Seal,
    Sweep,
    TenantNamed,
    all_facts,
)
from tests.sim.plan import Life, Plan
from tests.sim.shelves import check_tier, damage
from tests.sim.traffic import Traffic
from zjournal.errors import Fault, JournalFault
from zjournal.journal import events, headfile
from zjournal.journal.datadir import JOURNAL_FILE
from zjournal.journal.events import Fact, Recorded
from zjournal.journal.log import Journal
from zjournal.journal.salvage import salvage
from zjournal.journal.verify import verify
from zjournal.sessions import snapshots as files
from zjournal.sessions.exported import Exported
from zjournal.sessions.importing import ImportFile, import_file

HOME = "home"  # has always been there; the folders below it are made by the journal
TORN_BYTES_MAX = 9_000
CUT_SHARE = 0.5  # of the lives that leave a log: what its end would tell is cut off in a copy
Say = Callable[[str], None]
Stage = Command | EraseHidden


class Run:
    """One run of a plan in an empty folder. `shim`: whether this process runs with it. `lying`: syncs do nothing."""

    def __init__(self, plan: Plan, folder: Path, *, shim: bool, lying: bool = False, say: Say = lambda _: None) -> None:
        self._plan = plan
        self._say = say
        self._root = folder / "root"
        (self._root / HOME).mkdir(mode=0o700, parents=True)
        self._data_dir = self._root / HOME / "share" / "data"
        self._copy = folder / "copy"
        self._cut = folder / "cut"
        self._salvaged = folder / "salvaged"
        self._export = folder / "export.jsonl"
        self._imported = folder / "imported"
        self.met: Counter[str] = Counter()  # what a run is for, as far as it came about
        self._log = folder / "log" if shim else None
        self._chance = random.Random(f"disk {plan.seed}")
        self._disk = Disk(self._chance, HOME, lying)
        self._traffic = Traffic(plan)
        self._digest = hashlib.sha256()
        self._model = Model()
        self._under_way: list[list[Stage]] = []  # transactions that were asked for and not answered
        self._asked_us = 0
        self._must = False  # what is under way was committed, and only not told
        # What may come back or go when the power does, since the last commit: what failed attempts would have made,
        # and what there was before a life that ended in the middle of a commit.
        self._unsure: list[Model] = []
        self._sweep: tuple[int, int] | None = None  # now and retention of a sweep that may have done some of its work
        self._serving: int | None = None  # when the engine was asked for what it may have told in part
        self._damaged: set[bytes] = set()  # chunks whose files were tampered with since they were written
        self._faulty = False  # whether the disk of this life was told to fail
        self._fired = 0
        self._dead = False

    def run(self) -> str:
        """Plays the plan; returns the digest of all that happened. Raises Mismatch."""
        for number, life in enumerate(self._plan.lives):
            self._live(number, life)
            self._settle(number, life)
            if life.power:
                self._committed()  # what is there now is on the disk
        return self._digest.hexdigest()

    # --- a life ---------------------------------------------------------------------------------------

    def _live(self, number: int, life: Life) -> None:
        ours, theirs = multiprocessing.Pipe()
        now = self._traffic.tick()
        if self._log:
            self._log.unlink(missing_ok=True)
        rules = life.rules if self._log else ()
        self._faulty = bool(rules)
        seed = f"entropy {self._plan.seed} {number}"
        birth = living.Birth(
            self._root, self._data_dir, self._log, rules, seed, now, life.checkpoint_pages, life.sealing, life.chunks
        )
        pid = os.fork()
        if pid == 0:
            ours.close()
            living.live(birth, theirs)
        theirs.close()
        self._channel, self._pid, self._fired, self._dead = ours, pid, 0, False
        told = self._play(life)
        ours.close()
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            raise Mismatch(f"life {number} ended with status {os.waitstatus_to_exitcode(status)}")
        if self._log and self._log.exists():
            self._disk.replay(self._log)
        if life.power:
            told += "; power lost: " + (self._disk.lose_power(self._root) if self._log else self._tear_log())
        self._note(f"life {number}: {told}; {len(self._model.facts)} facts acknowledged")

    def _play(self, life: Life) -> str:
        opened = self._receive()
        if opened is None:
            return "killed while it opened"
        (outcome,) = opened.outcomes
        if outcome.kind != "ok":
            self._excused(outcome, opened.fired, "opening")
            return f"refused to open: {outcome.value}"
        self._committed()  # what a start has found is durable before it tells anyone
        kinds = ("started", "recover", "local", *(self._traffic.kind() for _ in range(life.steps)))
        for number, kind in enumerate(kinds):
            self._step(kind)
            if self._dead:
                return f"killed in step {number} ({kind})"
        return self._end(life)

    def _step(self, kind: str) -> None:
        now = self._traffic.tick()
        if kind == "started":
            self._batch(now, (Append((Fact(events.ServerStarted(version="1", pid=1)),)),))
        elif kind == "recover":
            self._batch(now, (Recover(),))
        elif kind == "local" or not self._model.tenants:
            self._batch(now, (TenantNamed("local"),))
        elif kind == "jump":
            self._traffic.jump()
        elif kind in ("serve", "attend"):
            self._serve(now, living.Serve(now, self._traffic.ask(self._model) if kind == "serve" else None))
        elif kind == "engine":
            self._ask(living.Engine())
        elif kind == "damage":
            self._damage()
        elif kind == "silence":
            answer = self._ask(living.Silence(now))
            if answer is not None and answer.outcomes[0].kind != "ok":
                raise Mismatch(f"time cannot pass: {answer.outcomes[0].value}")
        elif kind == "hold":
            answer = self._ask(living.Hold(self._chance.random() < 0.5))
            if answer is not None and answer.outcomes[0].kind != "ok":
                self._excused(answer.outcomes[0], answer.fired, kind)
        elif commands := self._traffic.commands(kind, self._model):
            self._batch(now, commands)

    def _end(self, life: Life) -> str:
        if life.end == "close":
            answer = self._ask(living.Close())
            if answer is not None and answer.outcomes[0].kind != "ok":
                self._excused(answer.outcomes[0], answer.fired, "closing")
            return "closed" if answer is not None else "killed while it closed"
        facts: tuple[Fact, ...] = ()
        if life.end != "kill" and self._model.tenants:
            append = self._traffic.append(self._model)
            facts = append.facts
            now = self._traffic.tick()
            if life.end == "untold":
                self._under_way, self._asked_us = [[append]], now
                self._must = not self._faulty
        self._channel.send(living.Die(life.end if facts else "kill", self._traffic.now, facts))
        if self._receive() is not None:
            raise Mismatch("a life that was to die answered")
        return f"killed at its end ({life.end})"

    # --- talking to it --------------------------------------------------------------------------------

    def _ask(self, message: object) -> living.Answer | None:
        """None when the life ended instead of answering."""
        try:
            self._channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._dead = True
            return None
        return self._receive()

    def _receive(self) -> living.Answer | None:
        try:
            while isinstance(answer := self._channel.recv(), living.Heard):
                self._hear(answer.facts)
        except (EOFError, ConnectionResetError):
            self._dead = True
            return None
        outcomes = [(outcome.kind, outcome.value if outcome.kind == "ok" else None) for outcome in answer.outcomes]
        self._digest.update(repr((outcomes, answer.changes, answer.fired)).encode())
        return answer

    def _serve(self, now: int, order: living.Serve) -> None:
        self._serving = now
        answer = self._ask(order)
        if answer is None:
            return
        (outcome,) = answer.outcomes
        if outcome.kind != "ok":
            self._excused(outcome, answer.fired, "the engine")
        elif outcome.value.waiting and answer.fired == self._fired:
            raise Mismatch("the engine's facts are not taken, and the disk did not fail")
        elif not outcome.value.waiting:
            self._serving = None
            self.met["restored"] += outcome.value.restored > 0
            self.met["refused"] += outcome.value.refused
        self._fired = answer.fired

    def _hear(self, facts: Sequence[Recorded]) -> None:
        """The engine's facts of one commit: from now on they must be there, and what they name as well."""
        now = self._serving
        assert now is not None
        self._model.take_tier(facts, now, self._damaged)
        for fact in facts:
            self.met[type(fact.event).__name__] += 1
            if isinstance(fact.event, events.CacheBackedUp):
                self._damaged -= {chunk.hash for chunk in fact.event.chunks}
        self._committed()
        self._serving = now

    def _damage(self) -> None:
        """Someone cuts, changes or removes a file of a chunk."""
        if self._model.kept.chunks and self._serving is None:
            hash_ = self._chance.choice(list(self._model.kept.chunks))
            if damage(files.folder_of(self._data_dir), self._model.kept.chunks[hash_].space, hash_, self._chance):
                self._damaged.add(hash_)
                self.met["damaged"] += 1

    def _excused(self, outcome: living.Outcome, fired: int, what: str) -> None:
        """Only a fault of the disk during this very step excuses a failure, and only a typed one."""
        if outcome.kind not in ("unavailable", "fault"):
            raise Mismatch(f"{what} failed without a typed fault: {outcome.value}")
        if fired == self._fired:
            raise Mismatch(f"{what} failed, and the disk did not: {outcome.value}")

    def _batch(self, now: int, commands: tuple[Command, ...]) -> None:
        """Sends commands and follows what became of them in the model."""
        alone = len(commands) == 1
        self._under_way = [[s] for s in _stages(commands[0])] if alone else [*_transactions(commands)]
        self._asked_us = now
        if isinstance(commands[0], Sweep):
            self._sweep = now, commands[0].retention_s
        answer = self._ask(living.Batch(now, commands))
        if answer is None:
            return
        self._under_way = []
        outcomes = iter(answer.outcomes)
        for transaction in _transactions(commands, [outcome.kind == "wrong" for outcome in answer.outcomes]):
            self._follow(transaction, [next(outcomes) for _ in transaction], now, answer.fired)
        self._fired = answer.fired

    def _follow(self, transaction: Sequence[Command], outcomes: Sequence[living.Outcome], now: int, fired: int) -> None:
        command, outcome = transaction[0], outcomes[0]
        if len({outcome.kind for outcome in outcomes}) > 1:
            raise Mismatch(f"one transaction ended in two ways: {outcomes}")
        if isinstance(command, Append) and outcome.kind == "wrong" and (command.wrong or self._model.orphaned(command)):
            return
        match command:
            case Sweep():
                self._follow_sweep(command, outcome, now, fired)
                return
            case Prune():
                self._follow_prune(command, outcome, now, fired)
                return
            case Export():
                self._follow_export(command, outcome, fired)
                return
            case Seal() | Compact() | Pin() | Collect() if outcome.kind == "ok":
                self.met[type(command).__name__.lower()] += 1
        if outcome.kind != "ok":
            self._excused(outcome, fired, type(command).__name__)
            self._unsure.append(_after(self._model, [list(transaction)], now))
            return
        before = len(self._model.facts)
        for command, outcome in zip(transaction, outcomes, strict=True):
            right = self._model.apply(command, now)
            if isinstance(command, TenantNamed):
                self._take_tenant(command, outcome)
            elif outcome.value != right:
                raise Mismatch(f"{type(command).__name__} returned {outcome.value!r}, not {right!r}: {command!r:.300}")
        if len(self._model.facts) > before:
            self._committed()

    def _take_tenant(self, command: TenantNamed, outcome: living.Outcome) -> None:
        known = self._model.tenants.setdefault(command.name, outcome.value)
        if known != outcome.value:
            raise Mismatch(f"tenant {command.name} has changed")

    def _follow_sweep(self, command: Sweep, outcome: living.Outcome, now: int, fired: int) -> None:
        if outcome.kind != "ok":
            self._excused(outcome, fired, "Sweep")
        answer = self._ask(living.Read(len(self._model.facts)))
        if answer is None:
            return
        found = answer.outcomes[0].value
        if answer.outcomes[0].kind != "ok":
            raise Mismatch(f"reading failed: {found}")
        self._model.take_erasures(found, now, command.retention_s)
        if found:
            self._committed()
        if outcome.kind != "ok":
            self._sweep = now, command.retention_s
            return
        self._sweep = None
        left = self._model.due(now, command.retention_s)
        erased = sum(isinstance(fact.event, events.PayloadErased) for fact in found)
        if left or outcome.value != erased:
            raise Mismatch(f"a sweep said {outcome.value}, erased {erased} and left {left}")

    def _follow_prune(self, command: Prune, outcome: living.Outcome, now: int, fired: int) -> None:
        hide, erase = _stages(command)
        hidden = self._model.copy()
        names = hidden.apply(hide, now)
        if not isinstance(names, list):  # it is refused
            if outcome.kind != "fault":
                self._excused(outcome, fired, "Prune")
            return
        gone = hidden.copy()
        gone.apply(erase, now)
        if outcome.kind == "ok":
            kept = [name for name in names if not gone.turns[name].erased]
            right = [str(len(names)), str(len(names) - len(kept)), *kept]
            if outcome.value != right:
                raise Mismatch(f"Prune returned {outcome.value}, not {right}")
            self._model = gone
            self._committed()
            self.met["prune"] += 1
            return
        self._excused(outcome, fired, "Prune")
        answer = self._ask(living.Read(len(self._model.facts)))
        if answer is None:
            self._under_way = [[hide], [erase]]
            return
        found = [*self._model.facts, *answer.outcomes[0].value]
        states = [self._model, hidden, gone]
        at = next((k for k, state in enumerate(states) if len(state.facts) == len(found)), None)
        if at is None:
            raise Mismatch(f"a prune that failed left {found[len(self._model.facts) :]}")
        self._model = states[at]
        if at:
            self._committed()
        self._unsure += states[at + 1 : at + 2]

    def _follow_export(self, command: Export, outcome: living.Outcome, fired: int) -> None:
        """The file holds the session's facts as they are, and another journal takes it."""
        if outcome.kind != "ok":
            self._excused(outcome, fired, "Export")
            return
        self._export.write_bytes(outcome.value)
        right = {fact.seq: fact for fact in self._model.exported(command.session)}
        with Exported(self._export) as file:
            told = {line.seq: line for line in file.lines}
            if told.keys() != right.keys():
                raise Mismatch(f"an export holds facts {sorted(told)}, not {sorted(right)}")
            for seq, line in told.items():
                if (line.body, line.payload) != (right[seq].event, right[seq].payload):
                    raise Mismatch(f"an export says {line}, not {right[seq]}")
            turns = len(file.turns)
        shutil.rmtree(self._imported, ignore_errors=True)
        with Journal.open(self._imported, clock=lambda: self._traffic.now) as journal:
            done = import_file(journal, ImportFile(str(self._export)))
            if done.turns != turns:
                raise Mismatch(f"an import took {done.turns} turns of {turns}")
        if not verify(self._imported).clean:
            raise Mismatch(f"verify of an import: {verify(self._imported).fault}")
        self.met["export"] += 1

    def _committed(self) -> None:
        """From here on nothing comes back and nothing goes: what there is is durable, and the rest is overwritten."""
        self._unsure = []
        self._sweep = None
        self._serving = None

    # --- what a life leaves ---------------------------------------------------------------------------

    def _settle(self, number: int, life: Life) -> None:
        """Opens a copy of what is there, finds out what became of what was under way, and checks all of it."""
        shutil.rmtree(self._copy, ignore_errors=True)
        if not (self._data_dir / JOURNAL_FILE).exists():
            if self._model.facts or self._model.tenants:
                raise Mismatch(f"the whole journal is gone after life {number}")
            self._under_way, self._must = [], False
            return
        shutil.copytree(self._data_dir, self._copy)
        shutil.rmtree(self._cut, ignore_errors=True)
        shutil.copytree(self._data_dir, self._cut)
        with self._open_copy() as journal:
            possible = self._possible()
            self._unsure = [] if self._must else possible
            self._model = self._explained(all_facts(journal), possible)
            self._under_way, self._must, self._serving = [], False, None
            report = verify(self._copy)
            if not report.clean:
                raise Mismatch(f"verify after life {number}: {report.fault}")
            self._digest.update(report.link.encode())
            for tenant in self._model.tenants.values():
                if journal.tenant(tenant.name) != tenant:
                    raise Mismatch(f"tenant {tenant.name} has changed")
            self._model.compare(journal)
            self._count_segments(journal)
            self._cut_log(number, sure=not self._faulty)
            self._check_start(journal)
            self.met += check_tier(self._copy, journal, self._model, self._damaged, f"after life {number}")
        if not verify(self._copy).clean:
            raise Mismatch(f"verify of the repaired copy after life {number}: {verify(self._copy).fault}")

    def _count_segments(self, journal: Journal) -> None:
        with journal.transaction() as db:
            packed = db.execute("SELECT first, last FROM segment").fetchall()
        self.met["segments"] = max(self.met["segments"], len(packed))
        last = packed[-1][1] if packed else 0
        self.met["sealed facts"] = max(self.met["sealed facts"], last)
        self.met["facts"] = len(self._model.facts)
        gone = sum(fact.payload is None for fact in self._model.facts[:last])
        self.met["erased in segments"] = max(self.met["erased in segments"], gone)

    def _cut_log(self, number: int, *, sure: bool) -> None:
        """Cuts bytes off the log's end that were synced: then the last facts are missing, or nothing is believed.

        `sure`: nothing else went wrong, so that the head file is as it should be.
        """
        log = self._cut / (JOURNAL_FILE + "-wal")
        size = log.stat().st_size if log.exists() else 0
        if not size or self._chance.random() > CUT_SHARE:
            return
        os.truncate(log, self._chance.randrange(size))
        seen = headfile.read(self._cut)
        whole = [(fact.seq, fact.time, fact.event) for fact in self._model.facts]
        try:
            with Journal.open(self._cut, clock=lambda: self._traffic.now) as journal:
                found = all_facts(journal)
        except Fault as fault:
            self.met["cuts refused"] += 1
            self._digest.update(b"refused")
            self._check_salvage(whole, fault.message)
            return
        if [(fact.seq, fact.time, fact.event) for fact in found] != whole[: len(found)]:
            if sure or verify(self._cut).clean:
                raise Mismatch(f"a log that was cut after life {number} tells other facts")
            self.met["cuts found by verify"] += 1
            return
        if seen is not None and seen.head.seq > len(found):
            raise Mismatch(f"a log that was cut after life {number} has {len(found)} facts, and was seen with more")
        report = verify(self._cut)
        if not report.clean and sure:
            raise Mismatch(f"verify of a log that was cut after life {number}: {report.fault}")
        self.met["cuts" if report.clean else "cuts found by verify"] += 1

    def _check_salvage(self, whole: list[tuple], why: str) -> None:
        """What can be proved of a journal that was refused is a beginning of it, and the loss is said."""
        shutil.rmtree(self._salvaged, ignore_errors=True)
        try:
            done = salvage(self._cut, self._salvaged)
        except JournalFault:
            return  # not even the identity is left
        with Journal.open(self._salvaged, clock=lambda: self._traffic.now) as journal:
            found = [(fact.seq, fact.time, fact.event) for fact in all_facts(journal)]
        if found[: done.facts] != whole[: done.facts]:
            raise Mismatch(f"salvage of {why} tells other facts")
        seen = headfile.read(self._cut)
        if done.whole and done.facts < (seen.head.seq if seen else 0):
            raise Mismatch(f"salvage says that all is there, and facts up to {done.facts} are: {why}")
        self.met["salvaged"] += 1

    def _open_copy(self) -> Journal:
        try:
            return Journal.open(self._copy, clock=lambda: self._traffic.now)
        except JournalFault as fault:
            raise Mismatch(f"acknowledged facts cannot be read any more: {fault.message}") from None

    def _check_start(self, journal: Journal) -> None:
        """What the next start does with it: no turn runs on, and the projections come out the same when rebuilt."""
        after = self._model.copy()
        after.apply(Recover(), self._traffic.now)
        journal.recover()
        if journal.running():
            raise Mismatch("turns run on after recover()")
        after.compare(journal)
        before = _projections(journal)
        after.apply(Rebuild(), self._traffic.now)
        journal.rebuild()
        if _projections(journal) != before:
            raise Mismatch("the projections come out differently when they are rebuilt")

    def _possible(self) -> list[Model]:
        """The states that the journal may be in: where the disk fails, one may have failed and a later one not."""
        count = len(self._under_way)
        ways = itertools.product((True, False), repeat=count) if self._faulty else _beginnings(count)
        states = [
            _after(self._model, itertools.compress(self._under_way, way), self._asked_us)
            for way in ways
            if any(way) or not self._must
        ]
        return states + ([] if self._must else self._unsure)

    def _explained(self, found: list[Recorded], possible: Sequence[Model]) -> Model:
        """The state that these facts are; raises Mismatch when they are none that could be."""
        for candidate in possible:
            if candidate.facts == found:
                found_as = candidate.copy()
                found_as.tenants = self._model.tenants
                return found_as
        if self._sweep is not None:
            swept = self._model.copy()
            swept.take_erasures(found[len(swept.facts) :], *self._sweep)
            if swept.facts == found:
                return swept
        if self._serving is not None and len(found) > len(self._model.facts):
            served = self._model.copy()
            served.take_tier(found[len(served.facts) :], self._serving, self._damaged)
            if served.facts == found:
                return served
        known = len(self._model.facts)
        if len(found) < known:
            raise Mismatch(f"{known - len(found)} of {known} acknowledged facts are lost")
        changed = [right.seq for told, right in zip(found, self._model.facts, strict=False) if told != right]
        if changed:
            told, right = found[changed[0] - 1], self._model.facts[changed[0] - 1]
            raise Mismatch(f"acknowledged fact {changed[0]} is {told}, not {right}")
        raise Mismatch(f"{len(found) - known} facts too many, from {found[known:][:1]} on; they are no whole append")

    def _tear_log(self) -> str:
        """Without the shim: a torn write at the log's end, which is all that can be said of what was not synced."""
        log = self._data_dir / (JOURNAL_FILE + "-wal")
        if not log.exists() or not log.stat().st_size:
            return "nothing was waiting"
        data = log.read_bytes()
        start = self._chance.randrange(len(data))
        torn = data[start : start + self._chance.randint(1, TORN_BYTES_MAX)]
        log.write_bytes(data + torn)
        return f"{len(torn)} bytes torn"

    def _note(self, text: str) -> None:
        text = text.replace(str(self._root), "")
        self._digest.update(text.encode())
        self._say(text)


def _stages(command: Command) -> list[Stage]:
    """What a command does in transactions of their own."""
    return [command, EraseHidden(command.session)] if isinstance(command, Prune) else [command]


def _transactions(commands: Sequence[Command], wrong: Iterable[bool] = ()) -> list[list[Command]]:
    """How the writer groups what was queued together: appends share a transaction, unless one of them is wrong.

    `wrong`: of each, whether it turned out to be; else as far as the command knows.
    """
    groups: list[list[Command]] = []
    known = wrong or [isinstance(command, Append) and command.wrong for command in commands]
    pairs = list(zip(commands, known, strict=True))
    for is_append, members in itertools.groupby(pairs, lambda pair: isinstance(pair[0], Append)):
        run = list(members)
        together = is_append and not any(bad for _, bad in run)
        groups += [[command for command, _ in run]] if together else [[command] for command, _ in run]
    return groups


def _after(state: Model, transactions: Iterable[Sequence[Stage]], now: int) -> Model:
    """The state once these have been committed."""
    after = state.copy()
    for command in itertools.chain.from_iterable(transactions):
        after.apply(command, now)
    return after


def _beginnings(count: int) -> list[tuple[bool, ...]]:
    return [(True,) * done + (False,) * (count - done) for done in range(count, -1, -1)]


def _projections(journal: Journal) -> tuple[list, ...]:
    with journal.transaction() as db:
        turns = db.execute("SELECT * FROM turn ORDER BY accepted_seq").fetchall()
        sessions = db.execute("SELECT * FROM session ORDER BY opened_seq").fetchall()
        snapshots = db.execute("SELECT * FROM snapshot ORDER BY made_seq").fetchall()
        return turns, sessions, snapshots, db.execute("SELECT * FROM chunk ORDER BY number").fetchall()
