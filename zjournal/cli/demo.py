"""`zj demo`: the product's promise in half a minute, with a real model and a real SIGKILL.

Three turns, a fourth that is killed in the middle with both processes, a restart on the same data directory, and the
fourth again from the third's id, with the KV of the third read back from disk. Greedy decoding makes it checkable: the
continued answer must equal that of a second server that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zjournal.cli import options
from zjournal.config import Config
from zjournal.errors import Fault

if TYPE_CHECKING:
    from zjournal.cli import process

OUTPUT_TOKENS_MAX = 48
KILL_AFTER_PIECES = 12
TEXT_SHOWN_CHARS = 40
COUNTS = ("prompt", "cached", "TTFT ms", "output")
PROMPTS = (
    "Why do bees make honey?",
    "Which flowers do they like best?",
    "Who takes care of their young?",
    "Write a short story about a bee who gets lost and finds her way home.",
)


@dataclasses.dataclass(frozen=True)
class Report:
    """What the demo saw. `equal`: all four answers are those of the uninterrupted run."""

    turns: tuple[process.Answer, ...]  # three before the kill
    killed: process.Answer
    killed_pids: tuple[int, int]
    ready_again_s: float
    recalled: int  # of the three answers, those that GET gave back unchanged after the restart
    continued: process.Answer
    restored: int  # of its cached tokens, those that were read back from disk
    uninterrupted: process.Answer
    equal: bool
    journal_facts: int
    journal_break: str | None

    @property
    def chained(self) -> bool:
        """The continued turn really stood on the third: same parent, same prompt as without a kill."""
        return (
            self.continued.status in ("completed", "incomplete")
            and self.continued.previous == self.turns[-1].response
            and self.continued.prompt == self.uninterrupted.prompt
        )

    @property
    def ok(self) -> bool:
        cut = self.killed.status == "cut" and self.continued.text.startswith(self.killed.text)
        recalled = self.recalled == len(self.turns)
        return cut and recalled and self.chained and self.equal and self.journal_break is None


@options.with_config("cache_dir")
def demo(config: Config, as_json: options.AsJson = False) -> None:
    """Chat, kill the server with SIGKILL in the middle of an answer, restart it, and go on."""

    def say(text: str) -> None:
        typer.echo(text, nl=False)

    def nothing(text: str) -> None:
        pass

    report = play(config.cache_dir, "smollm2", nothing if as_json else say)
    if as_json:
        import json

        verdict = {"chained": report.chained, "ok": report.ok}
        typer.echo(json.dumps(dataclasses.asdict(report) | verdict, indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.ok else 1)


def play(cache_dir: Path, model: str, say: Callable[[str], None]) -> Report:
    """Runs the whole story in a temporary folder; `say` gets what a watcher should read as it happens.

    Raises Fault if a server cannot be started or refuses a request.
    """
    from zjournal.cli import process

    with tempfile.TemporaryDirectory(prefix="zjournal-demo-") as scratch:
        folder = Path(scratch) / "demo"
        folder.mkdir()
        serving = process.Serving(folder, model, cache_dir)
        try:
            say(f"zj serve is ready after {serving.wait_ready():.1f} s\n\n")
            turns: list[process.Answer] = []
            for prompt in PROMPTS[:-1]:
                turns.append(_turn(serving, prompt, turns[-1].response if turns else None, say))
            killed, pids = _turn_with_kill(serving, turns[-1].response, say)
            serving = process.Serving(folder, model, cache_dir)
            ready_again_s = serving.wait_ready()
            say(f"restarted on the same data directory, ready after {ready_again_s:.1f} s\n\n")
            recalled = sum(serving.recall(turn.response) == turn.text for turn in turns)
            continued = _turn(serving, PROMPTS[-1], turns[-1].response, say)
        finally:
            serving.stop()
        restored = _restored(serving.data_dir, continued.response)
        facts, broken = _verify(serving.data_dir)
        say("the same four turns on a second server, without a kill, to compare …\n\n")
        reference = _uninterrupted(Path(scratch) / "reference", model, cache_dir)
        return Report(
            turns=tuple(turns),
            killed=killed,
            killed_pids=pids,
            ready_again_s=ready_again_s,
            recalled=recalled,
            continued=continued,
            restored=restored,
            uninterrupted=reference[-1],
            equal=[turn.text for turn in (*turns, continued)] == [turn.text for turn in reference],
            journal_facts=facts,
            journal_break=broken,
        )


def _body(prompt: str, previous: str | None) -> dict[str, Any]:
    return {
        "model": "default",
        "input": prompt,
        "previous_response_id": previous,
        "temperature": 0,
        "max_output_tokens": OUTPUT_TOKENS_MAX,
        "stream": True,
    }


def _turn(serving: process.Serving, prompt: str, previous: str | None, say: Callable[[str], None]) -> process.Answer:
    say(f"> {prompt}\n")
    answer = serving.ask(_body(prompt, previous), say)
    if answer.status not in ("completed", "incomplete"):
        raise Fault(f"the turn {prompt!r} ended as {answer.status}")
    say("\n\n")
    return answer


def _turn_with_kill(
    serving: process.Serving, previous: str, say: Callable[[str], None]
) -> tuple[process.Answer, tuple[int, int]]:
    """The fourth turn, killed after a few pieces of its stream. Returns what was seen of it, and the pids."""
    engine = _engine_pid(serving.data_dir)
    pieces = 0
    pids: list[tuple[int, int]] = []

    def kill_in_the_middle(text: str) -> None:
        nonlocal pieces
        pieces += 1
        if not pids:
            say(text)
        if pieces == KILL_AFTER_PIECES:
            pids.append(serving.kill(engine))

    say(f"> {PROMPTS[-1]}\n")
    answer = serving.ask(_body(PROMPTS[-1], previous), kill_in_the_middle)
    if not pids:
        raise Fault(f"the fourth answer was over after {pieces} pieces, before the kill: {answer.text!r}")
    say(f"\n\n*** SIGKILL of the API process {pids[0][0]} and the engine process {pids[0][1]} ***\n\n")
    return answer, pids[0]


def _uninterrupted(folder: Path, model: str, cache_dir: Path) -> list[process.Answer]:
    from zjournal.cli import process

    folder.mkdir()
    serving = process.Serving(folder, model, cache_dir)
    answers: list[process.Answer] = []
    try:
        serving.wait_ready()
        for prompt in PROMPTS:
            answers.append(_turn(serving, prompt, answers[-1].response if answers else None, lambda text: None))
    finally:
        serving.stop()
    return answers


def _engine_pid(data_dir: Path) -> int:
    """The engine process as the journal names it."""
    from zjournal.journal.events import EngineStarted
    from zjournal.journal.reader import Reader

    pid, at = None, 0
    with Reader.open(data_dir) as reader:
        while page := reader.read(after=at):
            at = page[-1].seq
            pid = next((fact.event.pid for fact in reversed(page) if isinstance(fact.event, EngineStarted)), pid)
    if pid is None:
        raise Fault("the journal names no engine process")
    return pid


def _restored(data_dir: Path, response: str | None) -> int:
    """Of a response's prompt, the tokens whose KV was read back from disk."""
    from zjournal.journal.events import CacheMatched
    from zjournal.journal.reader import Reader

    restored, at = 0, 0
    with Reader.open(data_dir) as reader:
        while page := reader.read(after=at):
            at = page[-1].seq
            matches = [fact.event for fact in page if isinstance(fact.event, CacheMatched)]
            restored = next((one.restored for one in matches if one.response == response), restored)
    return restored


def _verify(data_dir: Path) -> tuple[int, str | None]:
    """The number of facts, and the first break of the journal in words."""
    from zjournal.cli.journal import describe
    from zjournal.journal.verify import verify

    report = verify(data_dir)
    return report.facts, describe(report.fault) if report.fault else None


def _show(report: Report) -> None:
    from zjournal.cli import view

    rows: list[tuple[object, ...]] = [_row(number, answer) for number, answer in enumerate(report.turns, 1)]
    rows.append(_row("4, killed", report.killed))
    rows.append(_row("4, after the restart", report.continued))
    rows.append(_row("4, never interrupted", report.uninterrupted))
    view.table(("turn", "prompt", "cached", "TTFT ms", "output", "text"), rows, numbers=COUNTS)
    same = "the same as" if report.equal else "NOT the same as"
    chain = "continued" if report.chained else "did NOT continue"
    state = "unbroken" if report.journal_break is None else f"BROKEN: {report.journal_break}"
    typer.echo(
        f"\nsurvived: {report.recalled} of {len(report.turns)} answers by GET; "
        f"a journal of {report.journal_facts} facts, {state}\n"
        f"the chain {chain} from {report.turns[-1].response}; the answers are {same} without a kill\n"
        f"after the restart {report.restored} of {report.continued.cached} cached tokens came from snapshots on disk"
    )


def _row(turn: object, answer: process.Answer) -> tuple[object, ...]:
    ttft = None if answer.ttft_ms is None else round(answer.ttft_ms)
    shown = " ".join(answer.text.split())
    shown = shown if len(shown) <= TEXT_SHOWN_CHARS else shown[: TEXT_SHOWN_CHARS - 1] + "…"
    return turn, answer.prompt, answer.cached, ttft, answer.output, shown
