"""`zj keys`: who may use the server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from zjournal.cli import options
from zjournal.config import Config
from zjournal.errors import ConfigFault

NO_LIMIT = "0: no limit."


@options.with_config("api_key_file")
def add(
    config: Config,
    name: Annotated[str, typer.Argument(help="Whose key it is; what a name stores belongs to it alone.")],
    requests: Annotated[int, typer.Option(min=0, help=f"Requests a minute. {NO_LIMIT}")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help=f"Tokens a minute, of prompts and answers. {NO_LIMIT}")] = 0,
    streams: Annotated[int, typer.Option(min=0, help=f"Answers at the same time. {NO_LIMIT}")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Draw a key and print it: the file keeps only its digest. A server that runs knows it a second later."""
    from zjournal import keys

    path = _file(config)
    key = keys.add(path, name, keys.Limits(requests, tokens, streams))
    if as_json:
        import json

        typer.echo(json.dumps({"name": name, "key": key, "file": str(path)}))
        return
    typer.echo(key)
    typer.echo(f"This is the key of {name}, and nobody can show it again; its digest is in {path}.", err=True)


@options.with_config("api_key_file")
def remove(
    config: Config,
    name: Annotated[str, typer.Argument(help="Whose keys to take out of the file.")],
    keep_last: Annotated[
        bool, typer.Option("--keep-last", help="All but the one that was added last: the end of a rotation.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Take a name's keys out of the file. A server that runs refuses them a second later; what it tells is told."""
    from zjournal import keys

    path = _file(config)
    count = keys.remove(path, name, keep_last)
    if as_json:
        import json

        typer.echo(json.dumps({"name": name, "removed": count, "file": str(path)}))
        return
    gone = "1 key" if count == 1 else f"{count} keys"
    typer.echo(f"{gone} of {name} removed from {path}; answers that are being told go on, and what {name} stored stays")


@options.with_config("api_key_file")
def show(config: Config, as_json: options.AsJson = False) -> None:
    """List the names in the key file, how many keys each has, and their limits."""
    from zjournal import keys

    known = keys.read(_file(config))
    rows = [(name, known.count(name), *dataclasses.astuple(known.limits(name))) for name in known.names]
    names = ("name", "keys", *(field.name for field in dataclasses.fields(keys.Limits)))
    if as_json:
        import json

        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
        return
    from zjournal.cli import view

    view.table(names, [(row[0], str(row[1]), *(str(limit) if limit else "-" for limit in row[2:])) for row in rows])


def _file(config: Config) -> Path:
    if config.api_key_file is None:
        raise ConfigFault("there is no api_key_file; say which file with --api-key-file", param="api_key_file")
    return config.api_key_file
