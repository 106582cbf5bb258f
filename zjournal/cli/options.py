"""Settings as flags: gives a command the flags it wants and hands it a settled Config.

The flags are made from config.SETTINGS, so that a setting, its flag and its help cannot drift apart. Values stay
text until config.load reads them: one parser, one kind of error, whatever the source.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from zjournal.config import SETTINGS, load

ALL = tuple(setting.name for setting in SETTINGS)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def with_config(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates `command(config, **own)` so that it takes the flags of these settings, and `--config`."""
    settings = [setting for setting in SETTINGS if setting.name in names]
    assert len(settings) == len(set(names)), names

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        first, *own = inspect.signature(command, eval_str=True).parameters.values()
        assert first.name == "config", command

        def run(**values: Any) -> None:
            flags = {name: values.pop(name) for name in (*names, "config")}
            command(load(flags, os.environ, Path.cwd()), **values)

        parameters = own + [_flag(setting.name, setting.flag, setting.help, setting.default) for setting in settings]
        parameters.append(_flag("config", "--config", "Settings file.", "zj.toml"))
        positional_first = sorted(parameters, key=lambda p: p.default is not inspect.Parameter.empty)
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in positional_first]
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        return run

    return decorate


def _flag(name: str, flag: str, help: str, default: object) -> inspect.Parameter:
    if isinstance(default, bool):
        option = typer.Option(flag, help=help, show_default=False)
        annotation: Any = Annotated[bool | None, option]
    else:
        shown = "" if default is None else f" [default: {default}]"
        metavar = flag.rsplit("-", 1)[-1].upper()
        annotation = Annotated[str | None, typer.Option(flag, help=help + shown, metavar=metavar, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
