"""The demo's story with a scripted model, and what its verdict depends on."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from tests.serving import held_port, scripted
from zjournal.cli import demo, process
from zjournal.errors import EngineStartFault, Fault

STORY = (
    "Lua the bee flew over the river and lost the way. She asked a swallow and a cat, and then smelled her own roof."
)
# The story stands first: after a restart all turns are unused again, and the last prompt holds the earlier ones.
TURNS = (
    {"when": "short story", "text": STORY},
    {"when": "care of their young", "text": "The nurse bees."},
    {"when": "Which flowers", "text": "Lavender."},
    {"when": "make honey", "text": "To eat in winter."},
)


def test_the_chain_goes_on_after_a_real_kill(tmp_path: Path) -> None:
    said: list[str] = []
    report = demo.play(tmp_path / "cache", scripted(tmp_path, *TURNS, delay_ms=40), said.append)
    assert report.ok
    assert [turn.text for turn in report.turns] == ["To eat in winter.", "Lavender.", "The nurse bees."]
    assert report.killed.status == "cut"
    assert 0 < len(report.killed.text) < len(STORY)
    assert report.continued.text == STORY
    assert report.continued.prompt == report.uninterrupted.prompt > report.turns[-1].prompt
    assert report.uninterrupted.cached > 0
    assert 0 < report.restored <= report.continued.cached
    assert report.journal_facts > 20
    assert f"SIGKILL of the API process {report.killed_pids[0]}" in "".join(said)
    json.dumps(dataclasses.asdict(report))


def test_an_answer_that_is_too_short_to_be_killed_is_no_success(tmp_path: Path) -> None:
    turns = ({"when": "short story", "text": "No."}, {"text": "Yes."})
    with pytest.raises(Fault, match="before the kill"):
        demo.play(tmp_path / "cache", scripted(tmp_path, *turns), lambda text: None)


def test_a_server_that_cannot_start_is_told_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFault, match=r"zj serve ended with 66: .*absent\.gguf"):
        demo.play(tmp_path / "cache", str(tmp_path / "absent.gguf"), lambda text: None)


def test_a_port_that_was_taken_meanwhile_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_port() as taken, held_port() as free:
        taken.listen()
        ports = [place.getsockname()[1] for place in (taken, free)]
        monkeypatch.setattr(process, "_free_port", lambda: ports.pop(0))
        serving = process.Serving(tmp_path, scripted(tmp_path, *TURNS), tmp_path / "cache")
        try:
            assert serving.wait_ready() > 0
            assert serving.port == free.getsockname()[1]
        finally:
            assert serving.stop() == 0


def _report() -> demo.Report:
    def answer(name: str, previous: str | None, prompt: int) -> process.Answer:
        return process.Answer(name, f"text of {name}", "completed", 1.0, prompt, 0, 5, previous)

    turns = (answer("a", None, 10), answer("b", "a", 20), answer("c", "b", 30))
    continued = answer("d", "c", 40)
    killed = process.Answer("k", "text", "cut", 1.0)
    return demo.Report(turns, killed, (1, 2), 1.0, 3, continued, 0, continued, True, 50, None)


@pytest.mark.parametrize(
    "change",
    [
        {"recalled": 2},
        {"equal": False},
        {"journal_break": "event 3: changed"},
        {"killed": process.Answer("k", "text of d", "completed", 1.0)},
        {"killed": process.Answer("k", "another text", "cut", 1.0)},
        {"continued": dataclasses.replace(_report().continued, previous="b")},
        {"continued": dataclasses.replace(_report().continued, prompt=39)},
        {"continued": dataclasses.replace(_report().continued, status="failed")},
    ],
)
def test_the_verdict_needs_every_part(change: dict[str, object]) -> None:
    assert _report().ok
    assert not dataclasses.replace(_report(), **change).ok


def test_table_shows_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    demo._show(_report())
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()[1:7]] == [
        "1",
        "2",
        "3",
        "4, killed",
        "4, after the restart",
        "4, never interrupted",
    ]
    assert "3 of 3 answers" in out and "50 facts, unbroken" in out and "continued from c" in out


def test_events_are_read_from_the_bytes_of_a_stream() -> None:
    raw = b'event: a\ndata: {"type": "a"}\n\n: alive\n\ndata:{"type": "b"}\n\ndata: [DONE]\n\ndata: {"type": "c"}\n\n'
    assert [event["type"] for event in process._events(io.BytesIO(raw))] == ["a", "b"]  # type: ignore[arg-type]
