"""The command `zj`: its tree of commands, and how a Fault becomes one line and an exit code.

Everything heavy is imported inside the function that needs it, so that `zj --help` is instant.
"""

from __future__ import annotations

import os
import sys
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

_sessions = _group("Sessions in the journal.")
_sessions.command("list")(sessions.list_sessions)
_sessions.command("show")(sessions.show_session)
_sessions.command("diff")(sessions.diff_sessions)
_sessions.command("export")(transfer.export_session)
_sessions.command("import")(transfer.import_session)
_sessions.command("delete")(remove.delete)
_sessions.command("prune")(remove.prune)
_sessions.command("pin")(remove.pin)
_sessions.command("unpin")(remove.unpin)
app.add_typer(_sessions, name="sessions")

_snapshots = _group("What of the KV is on disk.")
_snapshots.command("list")(snapshots.list_snapshots)
_snapshots.command("show")(snapshots.show_snapshot)
_snapshots.command("gc")(snapshots.gc)
_snapshots.command("verify")(snapshots.verify)
_snapshots.command("pin")(snapshots.pin)
_snapshots.command("unpin")(snapshots.unpin)
app.add_typer(_snapshots, name="snapshots")

_journal = _group("The journal itself.")
_journal.command("verify")(journal.verify)
_journal.command("stats")(journal.stats)
_journal.command("backup")(journal.backup)
_journal.command("compact")(journal.compact)
_journal.command("rebuild")(journal.rebuild)
_journal.command("salvage")(journal.salvage)
app.add_typer(_journal, name="journal")

_models = _group("Models on this machine.")
_models.command("pull")(models.pull)
app.add_typer(_models, name="models")

_keys = _group("Who may use the server.")
_keys.command("add")(keys.add)
_keys.command("list")(keys.show)
app.add_typer(_keys, name="keys")

_client = _group("What clients need to know to use the server that runs.")
_client.command("codex")(client.codex)
_client.command("claude")(client.claude)
_client.command("opencode")(client.opencode)
_client.command("openwebui")(client.openwebui)
app.add_typer(_client, name="client")

_dialect = _group("How models write tools.")
_dialect.command("check")(dialect.check)
app.add_typer(_dialect, name="dialect")

_config = _group("Settings and where they come from.")
_config.command("show")(config.show)
app.add_typer(_config, name="config")


# A group of one command would be folded into its parent without a callback of its own.
@_journal.callback()
@_models.callback()
@_dialect.callback()
@_config.callback()
def _group_root() -> None:
    pass


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
