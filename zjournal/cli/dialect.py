"""`zj dialect`: how a model writes tools, and whether it can be relied upon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from zjournal.cli import options
from zjournal.config import Config

if TYPE_CHECKING:
    from zjournal.dialects.check import Literal, Report, Result


@options.with_config("cache_dir", "dialect")
def check(
    config: Config,
    model: Annotated[
        str | None, typer.Argument(help="smollm2, a GGUF file, a folder, or scripted:FILE; without it the default.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Try the dialect of a model: its tags, parse(render(x)) = x, prompts that begin with the one before, the fence.

    Exit code 1 if something fails; `exception` is what the dialect leaves out by design. Nothing is downloaded and no
    weights are read.
    """
    import dataclasses

    from zjournal.dialects.check import check as tried
    from zjournal.sessions.served import Served, choose

    config = dataclasses.replace(config, model=model or config.model)
    served = Served.load(choose(config.model, config.cache_dir), config.dialect)
    report = tried(served.template, served.tokenizer, served.dialect)
    if as_json:
        import json

        typer.echo(json.dumps(_json(report), ensure_ascii=False))
    else:
        _draw(report)
    if report.failed:
        raise typer.Exit(1)


def _draw(report: Report) -> None:
    from zjournal.cli import view

    typer.echo(f"dialect   {report.dialect}")
    typer.echo(f"thoughts  {report.kept or 'none'}")
    typer.echo("")
    rows = [("literal", *_literal(one)) for one in report.literals]
    rows += [("trigger", *_literal(one)) for one in report.triggers]
    view.table(("", "text", "ids", "token"), rows)
    typer.echo("")
    sections = (("inverse", report.inverse), ("prefix", report.prefix), ("fence", report.fence))
    view.table(
        ("test", "of", "result", "why"),
        [(section, one.name, _word(one), one.fault or None) for section, results in sections for one in results],
    )


def _literal(one: Literal) -> tuple[str, str, str]:
    return one.text, " ".join(map(str, one.ids)), "own" if len(one.ids) == 1 else "text"


def _word(one: Result) -> str:
    if not one.fault:
        return "ok"
    return "exception" if one.expected else "FAILED"


def _json(report: Report) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(report), "failed": [one.name for one in report.failed]}
