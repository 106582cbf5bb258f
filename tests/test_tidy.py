"""The tree keeps its own rules: first lines, lengths, links, and a command line that starts at once."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 70
FOLDERS = ("zjournal", "kernels", "migrations", "tests", "benchmarks", "docs")
HEAVY = ("torch", "triton", "litestar", "sqlite_utils", "rich", "uvicorn", "tokenizers", "gguf", "numpy")


def _sources() -> list[Path]:
    """Every Python file of the tree once: the two links inside the package are not followed, empty ones own nothing."""
    found = []
    for folder in FOLDERS:
        for place, folders, files in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            found += [
                Path(place) / name for name in files if name.endswith(".py") and (Path(place) / name).stat().st_size
            ]
    return sorted(found)


SOURCES = _sources()
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_first_line_says_what_the_file_owns(path: Path) -> None:
    module = ast.parse(path.read_text())
    docstring = ast.get_docstring(module)
    assert docstring, f"{path} has no docstring"
    assert len(docstring.splitlines()[0].split()) >= 3, docstring
    assert module.body[0].lineno == 1, f"{path} does not begin with its docstring"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_functions_fit_on_a_screen(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions) and node.end_lineno and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert not long


@pytest.mark.parametrize("name", ["kernels", "migrations"])
def test_links_are_relative_and_lead_into_the_tree(name: str) -> None:
    link = ROOT / "zjournal" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_every_package_is_one_that_the_wheel_takes() -> None:
    """setuptools leaves out a folder without `__init__.py`, without a word."""
    folders = {path.parent for path in SOURCES if path.parts[len(ROOT.parts)] in ("zjournal", "kernels", "migrations")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['zj', '--help']\n"
        "from zjournal.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage: zj" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_is_instant() -> None:
    """At most 200 ms of processor time: the wall clock of a busy machine says nothing. The best of five."""

    def spent() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "zjournal", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(spent() for _ in range(5)) < 0.2


def test_package_itself_imports_nothing() -> None:
    module = ast.parse((ROOT / "zjournal" / "__init__.py").read_text())
    assert not [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_only_config_looks_at_the_environment() -> None:
    """A variable read elsewhere would be a setting that nothing documents. Passing it on is fine."""
    reading = re.compile(r"environ\.get|environ\[[^]]*\](?! = )|getenv")
    readers = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.is_relative_to(ROOT / "zjournal") and path.name != "config.py" and reading.search(path.read_text())
    ]
    assert not readers


def test_engine_knows_no_protocol() -> None:
    words = ("openai", "anthropic", "previous_response_id", "select ", "litestar")
    found = [
        f"{path.name}: {word}"
        for path in SOURCES
        if path.is_relative_to(ROOT / "zjournal" / "engine")
        for word in words
        if word in path.read_text().lower()
    ]
    assert not found
