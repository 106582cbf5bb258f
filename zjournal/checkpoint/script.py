"""The file of a scripted model: what it may say, and how it is read. docs/scripted.md shows it.

Both processes read it: the server before it binds its port, so that a mistake is one line, and the engine to play it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from zjournal.errors import ModelFault

SCRIPT_BYTES_MAX = 64 << 20

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Delay = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request gets: `text` or `tokens`, and when and how. Delays are milliseconds."""

    text: str | None = None
    tokens: tuple[Count, ...] | None = None
    when: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    delay_ms: Delay | None = None  # per token; None: the script's
    prefill_ms_per_1k: Delay = 0
    fail_after: Count | None = None
    die_after: Count | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("A turn has either `text` or `tokens`")


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. `dialect` names the one in which prompts are rendered and calls are written.

    It is one that needs no tag to be a token, for the tokenizer is whatever model's.
    """

    turns: Annotated[tuple[Turn, ...], msgspec.Meta(min_length=1)]
    context: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 1_000_000
    dialect: Literal["chatml", "chatml+think", "qwen-xml", "qwen-xml+think"] = "chatml"
    delay_ms: Delay = 0
    load_when: Annotated[str, msgspec.Meta(min_length=1)] | None = None  # a file; the model is loaded once it is there


def read_script(path: Path) -> Script:
    """Reads and checks a script. Raises ModelFault with the file and the JSON path of what is wrong."""
    try:
        if path.stat().st_size > SCRIPT_BYTES_MAX:
            raise ModelFault(f"{path}: larger than {SCRIPT_BYTES_MAX >> 20} MiB")
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise ModelFault(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelFault(f"{path}: {error}") from error
