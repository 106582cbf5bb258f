"""`zj serve`: checks the settings, then becomes the server."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from zjournal import collector
from zjournal.cli import options
from zjournal.config import Config, check_serving


@options.with_config(*options.ALL)
def serve(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --log-format json.")] = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    check_serving(config)
    if as_json:
        config = dataclasses.replace(config, log_format="json")
    with collector.paused():
        from zjournal import server

    raise typer.Exit(server.run(config))
