"""`zj serve`: checks the settings, then becomes the server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from zjournal.cli import options
from zjournal.config import Config, check_serving


@options.with_config(*options.ALL)
def serve(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --log-format json.")] = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    check_serving(config)
    if as_json or config.log_format == "json":
        _log_json(config.log_level)
    from zjournal import server

    raise typer.Exit(server.run(config))


def _log_json(level: str) -> None:
    """One JSON object a line on stderr: time (Unix seconds), level, logger, message and any traceback."""
    import json
    import logging

    class Lines(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            line = {
                "time": round(record.created, 6),
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
            if record.exc_info:
                line["traceback"] = self.formatException(record.exc_info)
            return json.dumps(line, ensure_ascii=False)

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.basicConfig(level=level.upper(), handlers=[handler])  # the server's own set-up then keeps this handler
