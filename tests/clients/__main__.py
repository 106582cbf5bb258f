"""`python -m tests.clients [NAME ...]`: real agents finish a round trip with a tool, and a second run finds the cache.

A scripted model has the agent read a note with its own tool, and says what stands there once the result has come. The
same prompt is then asked again by a new process. Both runs must end well, each call must have got its result, and of
the second run's prompts all but a tail must come from the cache; the journal says whether it is so. Agents are
fetched from npm into build/clients; they run in a network namespace of their own, where the system lets us make one,
so that they reach nothing but the server.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.clients.agents import AGENTS, Agent, NotServed, alone, environment, installed, loopback
from tests.serving import Server, facts, scripted
from zjournal.journal.events import CacheMatched, RequestAccepted, ToolCalled, ToolResultSeen

PROMPT = "Find out which word stands in note.txt and tell me."
CLIENT_S_MAX = 180.0
TURNS = 50  # in which the word may be told; more than any agent needs
CALLS_MAX = 8  # before the model gives up
TAIL_TOKENS_MAX = 256  # of a prompt that was asked before, computed again
INSIDE = "--inside"


class Failed(Exception):
    """An agent did not do what it should."""


class Run(NamedTuple):
    """What one run of an agent left in the journal."""

    prompts: list[tuple[int, int]]  # tokens of each, and how many came from the cache
    calls: int
    answered: int  # calls whose results came


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").splitlines()[0])
    names = [agent.name for agent in AGENTS]
    parser.add_argument("name", nargs="*", choices=[*names, []], help=f"of {', '.join(names)}; all without one")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [agent for agent in AGENTS if not arguments.name or agent.name in arguments.name]
    if not arguments.inside:
        if shutil.which("npm") is None:
            print("npm is not installed; the agents come from there", file=sys.stderr)
            return 2
        for agent in chosen:
            installed(agent.package, agent.binary)
        if alone():
            command = ["unshare", "-rn", sys.executable, "-m", "tests.clients", INSIDE, *arguments.name]
            return subprocess.run(command, check=False).returncode
        print("no network namespace can be made here: the agents may reach other servers than ours")
    else:
        loopback()
    failed = [agent.name for agent in chosen if not _tried(agent)]
    print(f"failed: {', '.join(failed)}" if failed else "done")
    return 1 if failed else 0


def _tried(agent: Agent) -> bool:
    room = Path(tempfile.mkdtemp(prefix=f"zjournal-{agent.name}-"))
    started = time.monotonic()
    try:
        first, second = _twice(agent, room)
    except NotServed as reason:
        print(f"{agent.name}: skipped: {reason}", flush=True)
        shutil.rmtree(room)
        return True
    except (Failed, AssertionError, subprocess.TimeoutExpired) as error:
        print(f"{agent.name}: FAILED: {error}\n  what there is of it: {room}", flush=True)
        return False
    told = ", ".join(f"{cached} of {prompt}" for prompt, cached in second.prompts)
    print(
        f"{agent.name}: {len(first.prompts)} + {len(second.prompts)} requests, {first.calls} + {second.calls} calls, "
        f"all with results; from the cache in the second run: {told} ({time.monotonic() - started:.0f} s)",
        flush=True,
    )
    shutil.rmtree(room)
    return True


def _twice(agent: Agent, room: Path) -> tuple[Run, Run]:
    """Both runs on one server. Raises Failed."""
    home, work = room / "home", room / "work"
    home.mkdir()
    work.mkdir()
    word = f"w{secrets.token_hex(6)}"
    (work / "note.txt").write_text(f"The word is {word}.\n")
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    with Server(room / "data", model=_model(agent, room, word)) as server:
        more = agent.prepare(server, home, work)
        first = _run(agent, server, home, work, more, word, 0)
        second = _run(agent, server, home, work, more, word, facts(room / "data")[-1].seq)
        if server.terminate() != 0:
            raise Failed(f"the server ended badly: {server.log.read_text()[-2000:]}")
    for prompt, cached in second.prompts:
        if prompt - cached > TAIL_TOKENS_MAX:
            raise Failed(f"of a prompt of {prompt} tokens that was asked before, only {cached} came from the cache")
    return first, second


def _model(agent: Agent, room: Path, word: str) -> str:
    """It calls the tool until it has seen the word, or gives up; so it does not matter what else an agent asks for."""
    call = json.dumps({"name": agent.tool, "arguments": agent.call})
    turns = [{"text": f"The word is {word}.", "when": word} for _ in range(TURNS)]
    turns += [{"text": f"I look.\n<tool_call>\n{call}\n</tool_call>"} for _ in range(CALLS_MAX)]
    return scripted(room, *turns, {"text": "I cannot find it."})


def _run(agent: Agent, server: Server, home: Path, work: Path, more: dict[str, str], word: str, after: int) -> Run:
    """One run of the agent; what it left behind `after` in the journal. Raises Failed."""
    command = [str(installed(agent.package, agent.binary)), *agent.arguments(PROMPT)]
    done = subprocess.run(
        command,
        cwd=work,
        env=environment(home, more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLIENT_S_MAX,
        check=False,
    )
    if done.returncode != 0 or word not in done.stdout:
        raise Failed(f"exit status {done.returncode}, said: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    found = [fact.event for fact in facts(server.data_dir) if fact.seq > after]
    seen = {call for event in found if isinstance(event, ToolResultSeen) for call in event.calls}
    called = {event.call for event in found if isinstance(event, ToolCalled)}
    accepted = [event for event in found if isinstance(event, RequestAccepted)]
    if not called or not called <= seen or len(accepted) < 2:
        raise Failed(f"{len(accepted)} requests, {len(called)} calls, of which {len(called & seen)} got a result")
    prompts = [(event.prompt, event.cached) for event in found if isinstance(event, CacheMatched)]
    return Run(prompts, len(called), len(called & seen))


if __name__ == "__main__":
    sys.exit(main())
