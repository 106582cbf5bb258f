"""`zj config`: what is set, and by whom."""

from __future__ import annotations

import typer

from zjournal.cli import options
from zjournal.config import SETTINGS, Config


@options.with_config(*options.ALL)
def show(config: Config, as_json: options.AsJson = False) -> None:
    """Print every setting, its value and where the value comes from."""
    rows = []
    for setting in SETTINGS:
        value = getattr(config, setting.name)
        rows.append((setting.name, "-" if value is None else setting.show(value), config.origins[setting.name]))
    if as_json:
        import json

        values = {
            setting.name: {
                "value": value
                if isinstance(value := getattr(config, setting.name), int | float | None)
                else str(value),
                "origin": config.origins[setting.name],
            }
            for setting in SETTINGS
        }
        typer.echo(json.dumps(values, indent=2))
        return
    from zjournal.cli import view

    view.table(("setting", "value", "origin"), rows)
