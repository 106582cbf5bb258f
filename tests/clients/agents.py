"""How each agent is installed, told of our server, and asked one thing. Nothing here talks to the server itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.serving import Server, zj

FOLDER = Path(__file__).parents[2] / "build" / "clients"
READ = "cat note.txt"
KEY = "none"  # the server asks for no key; agents want to send one


class NotServed(Exception):
    """The server does not offer what the agent would use."""


class Agent(NamedTuple):
    """A program from npm, and the tool by which it runs a command."""

    name: str
    package: str
    binary: str
    tool: str
    prepare: Callable[[Server, Path, Path], dict[str, str]]  # (server, home, work) to its environment
    arguments: Callable[[str], list[str]]  # of a prompt
    call: dict[str, str]  # what it takes to read the note


def _told(server: Server, *arguments: str) -> str:
    """What `zj client` prints for this server."""
    done = zj("client", *arguments, "--port", str(server.port))
    assert done.returncode == 0, done.stderr
    return done.stdout


def _codex(server: Server, home: Path, work: Path, websocket: bool = False) -> dict[str, str]:
    folder = home / ".codex"
    folder.mkdir(exist_ok=True)
    catalog = folder / "catalog.json"
    catalog.write_text(_told(server, "codex", "--catalog"))
    config = _told(server, "codex", "--catalog-file", str(catalog))
    if websocket and "supports_websockets = true" not in config:
        raise NotServed("this server does not speak WebSocket")
    config = re.sub(r"supports_websockets = \w+", f"supports_websockets = {str(websocket).lower()}", config)
    # Nobody is there to be asked.
    (folder / "config.toml").write_text(
        f'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n{config}',
    )
    return {"ZJ_API_KEY": KEY}


def _codex_websocket(server: Server, home: Path, work: Path) -> dict[str, str]:
    return _codex(server, home, work, websocket=True)


def _claude(server: Server, home: Path, work: Path) -> dict[str, str]:
    lines = _told(server, "claude").splitlines()
    names = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    told = {name: shlex.split(value)[0] for name, value in names.items() if "$" not in value}
    return {**told, "ANTHROPIC_AUTH_TOKEN": KEY, "IS_SANDBOX": "1"}


def _opencode(server: Server, home: Path, work: Path) -> dict[str, str]:
    config = json.loads(_told(server, "opencode"))
    config |= {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}
    (home / "opencode.json").write_text(json.dumps(config))
    return {"ZJ_API_KEY": KEY, "OPENCODE_CONFIG": str(home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def _exec(prompt: str) -> list[str]:
    return ["exec", "--skip-git-repo-check", prompt]


AGENTS = (
    Agent("codex", "@openai/codex", "codex", "exec_command", _codex, _exec, {"cmd": READ}),
    Agent("codex-ws", "@openai/codex", "codex", "exec_command", _codex_websocket, _exec, {"cmd": READ}),
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        "claude",
        "Bash",
        _claude,
        lambda prompt: ["-p", prompt, "--allowedTools", "Bash"],
        {"command": READ, "description": "Reads the note"},
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "opencode",
        "bash",
        _opencode,
        lambda prompt: ["run", prompt],
        {"command": READ, "description": "Reads the note"},
    ),
)


def installed(package: str, binary: str) -> Path:
    """A program from npm, which is fetched once into FOLDER."""
    found = FOLDER / "node_modules" / ".bin" / binary
    if not found.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), package]
        subprocess.run(command, check=True)
    return found


def alone() -> bool:
    """Whether a network namespace with nothing but loopback can be made, so that a program reaches only our server."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    done = subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    return done.returncode == 0


def loopback() -> None:
    """Inside a new namespace loopback is down."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def environment(home: Path, more: dict[str, str]) -> dict[str, str]:
    """No more of ours than the way to programs: no proxy, no keys, no configuration of whoever runs this."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **more}
