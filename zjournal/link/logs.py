"""How both processes write their log: lines on stderr, as text or as JSON objects. Never a prompt, never a key."""

from __future__ import annotations

import json
import logging
import sys

# Libraries that tell each request or event at INFO: a hub's redirects carry signatures in their queries.
_CHATTER = ("uvicorn.error", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "huggingface_hub")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """Time (Unix seconds), level, logger, message and any traceback."""

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


def configure(level: str, form: str) -> None:
    """Sets up this process's log. `level` as in the setting log_level; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in _CHATTER:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
