"""The pages keep up with the program: generated ones are fresh, and what a user can type stands in one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

from zjournal import loops
from zjournal.api.metrics import Metrics
from zjournal.cli.main import app
from zjournal.config import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = _generator()
COMMANDS = dict(GENERATE.commands(typer.main.get_command(app), "zj"))


def test_cli_page_is_fresh() -> None:
    assert (DOCS / "cli.md").read_text() == GENERATE.cli_page(), "run: make docs"


def test_settings_table_is_fresh() -> None:
    page = (DOCS / "config.md").read_text()
    assert page == GENERATE.config_page(page), "run: make docs"


def test_table_of_facts_is_fresh() -> None:
    page = (DOCS / "journal.md").read_text()
    assert page == GENERATE.journal_page(page), "run: make docs"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_is_documented_and_is_a_flag_of_serve(setting: object) -> None:
    page = (DOCS / "config.md").read_text()
    assert all(f"`{name}`" in page for name in (setting.name, setting.flag, setting.variable))
    assert any(setting.flag in parameter.opts for parameter in COMMANDS["zj serve"].params)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_a_section(name: str) -> None:
    assert COMMANDS[name].help
    assert f"## `{name}`" in (DOCS / "cli.md").read_text()
    undocumented = [p.name for p in COMMANDS[name].params if not getattr(p, "help", None) and p.name != "help"]
    assert not undocumented


def test_each_metric_is_documented_and_told() -> None:
    # prometheus_client adds the time of its making to each counter and histogram.
    told = set(re.findall(r"^# TYPE (\w+)(?<!_created) ", Metrics().render().decode(), re.MULTILINE))
    rows = re.findall(r"^\| (`zj_[^|]+) \|", (DOCS / "api.md").read_text(), re.MULTILINE)
    table = {name for row in rows for name in re.findall(r"zj_\w+", row)}
    of_the_journal = set(re.findall(r"`(zj_journal_\w+)`", (DOCS / "journal.md").read_text()))
    assert table and of_the_journal
    assert told == table | of_the_journal


def test_limits_of_the_guard_stand_in_its_table() -> None:
    _, _, table = (DOCS / "guard.md").read_text().partition("## Limits")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+)", table, re.MULTILINE)
    documented = {name: int(number.replace(",", "")) for name, number in rows}
    assert documented == {name: default for name, (default, _, _) in loops.LIMITS.items()}


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", *DOCS.glob("*.md")]), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    typed = {" ".join(words.split()) for words in re.findall(r"\bzj ((?:[a-z]+ ?)+)", text)}
    known = [name.removeprefix("zj ") for name in COMMANDS]
    assert typed
    assert not [words for words in typed if not any(words.startswith(name) for name in known)]
    # As typed: at the start of a line, behind a prompt, or in code quotes; not the bees of the demo.
    targets = set(re.findall(r"(?:^|^\$ |`)make ([a-z]+)\b", text, re.MULTILINE))
    assert targets
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= rules
