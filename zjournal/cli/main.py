"""The command `zj`: its tree of commands, and how a Fault becomes one line and an exit code.

Everything heavy is imported inside the function that needs it, so that `zj --help` is instant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from zjournal.cli import (
    client,
    config,
    demo,
    dialect,
    journal,
    keys,
    models,
    remove,
    replay,
    serve,
    sessions,
    snapshots,
    transfer,
)
from zjournal.errors import Fault

EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 141  # as a shell reports SIGPIPE


def _group(help: str) -> typer.Typer:
    return typer.Typer(
        help=help,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        from zjournal.config import version

        typer.echo(f"zjournal {version()}")
        raise typer.Exit


app = _group("An event-sourced LLM inference server for agents that must not lose their place.")


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("replay")(replay.replay_session)

_GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "sessions": (
        "Sessions in the journal.",
        {
            "list": sessions.list_sessions,
            "show": sessions.show_session,
            "diff": sessions.diff_sessions,
            "export": transfer.export_session,
            "import": transfer.import_session,
            "delete": remove.delete,
            "prune": remove.prune,
            "pin": remove.pin,
            "unpin": remove.unpin,
        },
    ),
    "snapshots": (
        "What of the KV is on disk.",
        {
            "list": snapshots.list_snapshots,
            "show": snapshots.show_snapshot,
            "gc": snapshots.gc,
            "verify": snapshots.verify,
            "pin": snapshots.pin,
            "unpin": snapshots.unpin,
        },
    ),
    "journal": (
        "The journal itself.",
        {
            "verify": journal.verify,
            "stats": journal.stats,
            "backup": journal.backup,
            "compact": journal.compact,
            "rebuild": journal.rebuild,
            "salvage": journal.salvage,
        },
    ),
    "models": ("Models on this machine.", {"pull": models.pull}),
    "keys": ("Who may use the server.", {"add": keys.add, "list": keys.show, "remove": keys.remove}),
    "client": (
        "What clients need to know to use the server that runs.",
        {
            "codex": client.codex,
            "claude": client.claude,
            "opencode": client.opencode,
            "openwebui": client.openwebui,
        },
    ),
    "dialect": ("How models write tools.", {"check": dialect.check}),
    "config": ("Settings and where they come from.", {"show": config.show}),
}


def _group_root() -> None:
    pass


for _name, (_help, _commands) in _GROUPS.items():
    _commanded = _group(_help)
    _commanded.callback()(_group_root)  # without one, a group of one command would be folded into its parent
    for _command, _function in _commands.items():
        _commanded.command(_command)(_function)
    app.add_typer(_commanded, name=_name)


def main() -> int:
    """Runs the command line of this process. Returns the exit code; usage errors leave through SystemExit with 2."""
    try:
        app(prog_name="zj")
    except Fault as fault:
        print("zj: " + " ".join(fault.message.split()), file=sys.stderr)
        return fault.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        return EXIT_BROKEN_PIPE
    return 0
