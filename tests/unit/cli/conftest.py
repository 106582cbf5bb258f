"""A command line in this process, and a small journal to look at."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from zjournal.cli.main import main
from zjournal.journal.events import (
    CacheMatched,
    EngineStarted,
    Event,
    Fact,
    PromptRendered,
    RequestAccepted,
    ResponseFailed,
    ResponseFinished,
    SessionOpened,
    SessionReplayed,
)
from zjournal.journal.log import Journal


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> object:
        return json.loads(self.out)


Zj = Callable[..., Done]


@pytest.fixture
def zj(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Zj:
    """Runs `zj` with these arguments in an empty folder and without settings of the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["zj", *arguments])
        try:
            code = main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(bool(exit.code))
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A journal of two sessions: a tree of four turns (one failed, one branch), and a single unstored turn."""
    folder = tmp_path / "data"
    ticks = itertools.count(1_800_000_000_000_000, 1_000_000)
    with Journal.open(folder, clock=lambda: next(ticks)) as journal:
        owner = journal.tenant("local").id
        started = EngineStarted(pid=4711, model="m", fingerprint="f", kernels="k", context=2048, kv_tokens=4096)
        journal.append([Fact(started)]).result()
        journal.append([Fact(SessionOpened(tenant=owner, session="ses_one"))]).result()
        for response, parent, code in [
            ("resp_a1", "", ""),
            ("resp_a2", "resp_a1", ""),
            ("resp_b2", "resp_a1", ""),
            ("resp_b3", "resp_b2", "engine_error"),
        ]:
            journal.append([Fact(event) for event in _turn(owner, "ses_one", response, parent, code)]).result()
        journal.append([Fact(SessionOpened(tenant=owner, session="ses_two"))]).result()
        journal.append([Fact(event) for event in _turn(owner, "ses_two", "resp_c1", "", "", stored=False)]).result()
    return folder


@pytest.fixture
def replayed_dir(data_dir: Path) -> Path:
    """The same with a replay of `ses_one` in it, `rep_one`, whose three turns continue what the recorded ones did."""
    ticks = itertools.count(1_800_000_100_000_000, 1_000_000)
    with Journal.open(data_dir, clock=lambda: next(ticks)) as journal:
        owner = journal.tenant("local").id
        told = SessionReplayed(tenant=owner, session="rep_one", source="ses_one")
        journal.append([Fact(SessionOpened(tenant=owner, session="rep_one")), Fact(told)]).result()
        for response, parent in [("resp_r1", ""), ("resp_r2", "resp_a1"), ("resp_r3", "resp_b2")]:
            journal.append([Fact(event) for event in _turn(owner, "rep_one", response, parent, "")]).result()
    return data_dir


def _turn(owner: str, session: str, response: str, parent: str, code: str, stored: bool = True) -> list[Event]:
    accepted = RequestAccepted(
        tenant=owner,
        response=response,
        session=session,
        parent=parent,
        previous=parent,
        protocol="responses",
        model="m",
        namespace="n",
        stored=stored,
        stream=True,
        created=1_800_000_000,
        record=b"",
        dialect="chatml",
        encoder=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        max_tokens=8,
    )
    rendered = PromptRendered(tenant=owner, response=response, count=40)
    matched = CacheMatched(tenant=owner, response=response, tier="device", cached=30, prompt=40)
    end: Event
    if code:
        end = ResponseFailed(tenant=owner, response=response, code=code, message="The engine died.")
    else:
        end = ResponseFinished(
            tenant=owner, response=response, reason="stop", output=7, queue_us=1000, prefill_us=24000, decode_us=9000
        )
    return [accepted, rendered, matched, end]
