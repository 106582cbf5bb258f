"""`zj sessions export` and `import`: sessions as files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zjournal.cli import options
from zjournal.cli.sessions import _find, _print_json
from zjournal.config import Config
from zjournal.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zjournal.journal.projections import Turn
    from zjournal.journal.reader import Reader
    from zjournal.sessions.transfer import Selection

FORMATS = ("jsonl", "md")


@options.with_config("data_dir")
def export_session(
    config: Config,
    name: Annotated[str, typer.Argument(metavar="ID", help="Id of a session or a response, or its beginning.")],
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="jsonl: lossless, for import; md: Markdown, for people.")
    ] = "jsonl",
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="File to make, mode 0600 [default: stdout].")
    ] = None,
    turns: Annotated[
        str | None,
        typer.Option("--turns", metavar="N[:M]", help="The Nth to Mth turn, and in jsonl all that they build on."),
    ] = None,
) -> None:
    """Write a session to a file that another journal can import, or that people can read."""
    from zjournal.journal.output import new_file
    from zjournal.journal.reader import Reader
    from zjournal.sessions.conversations import holding

    if form not in FORMATS:
        raise BadRequest(f"--format: {form!r} is not one of {', '.join(FORMATS)}", param="format")
    with Reader.open(config.data_dir) as reader:
        selection, pieces = _pieces(reader, name, form, turns)
        conversations = holding(reader, selection.turns)
        if output is None:
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        else:
            target = Path.cwd() / os.path.expanduser(output)
            with new_file(target) as part, part.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                size = file.tell()
            typer.echo(f"{target}: {len(selection.turns)} turns of {selection.session.session}, {size:,} bytes")
    if selection.running:
        typer.echo(f"zj: {selection.running} running turns were left out; export again when they have ended", err=True)
    if conversations:
        lists = "a conversation" if conversations == 1 else f"{conversations} conversations"
        typer.echo(f"zj: {lists} of /v1/conversations with turns of this session: no list is in the file", err=True)


def _pieces(reader: Reader, name: str, form: str, numbers: str | None) -> tuple[Selection, Iterator[bytes]]:
    from zjournal.api.recorded import DECODERS
    from zjournal.sessions.markdown import markdown
    from zjournal.sessions.transfer import Selection, export

    session = _find(reader, name)
    turns = _range(reader.turns(session.session), numbers)
    if form == "md":
        ended = tuple(turn for turn in turns if turn.finished_us is not None)
        selection = Selection(session, ended, len(turns) - len(ended))
        return selection, (piece.encode(errors="replace") for piece in markdown(reader, selection, DECODERS))
    selection = Selection.of(reader, session, turns)
    return selection, export(reader, selection, DECODERS)


def _range(turns: list[Turn], numbers: str | None) -> list[Turn]:
    """The turns of these numbers, from 1, in order of acceptance."""
    if numbers is None:
        return turns
    first, _, last = numbers.partition(":")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= len(turns)):
        raise NotFound(f"there are no turns {numbers!r} in this session: it has {len(turns)}")
    return turns[int(first) - 1 : int(last)]


@options.with_config("data_dir")
def import_session(
    config: Config,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file made by `zj sessions export`.")],
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME", help="Who is to own it: the name of a key, or local.")
    ] = "local",
    as_json: options.AsJson = False,
) -> None:
    """Bring an exported session into this journal, under the same ids; a file that was imported changes nothing."""
    from zjournal.cli import admin
    from zjournal.sessions.importing import Imported, ImportFile

    path = Path.cwd() / os.path.expanduser(file)
    done = admin.perform(config, "sessions.import", ImportFile(str(path), tenant), Imported)
    if as_json:
        import msgspec

        _print_json(msgspec.to_builtins(done))
        return
    told = f"{done.session}: {done.turns} turns imported for {done.tenant}"
    told += f", {done.known} were here already" if done.known else ""
    typer.echo(told + (f", {done.erased} had been erased" if done.erased else ""))
