"""`zj dialect check`: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import smollm2
from tests.serving import scripted
from zjournal.cli.main import main
from zjournal.config import DIALECTS
from zjournal.dialects.choose import NAMES


@pytest.fixture
def zj(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ZJ_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["zj", "dialect", *arguments])
        try:
            code = main()
        except SystemExit as left:
            code = int(left.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_demo_model(zj) -> None:
    code, out, _ = zj("check")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["dialect", "chatml"] in lines and ["thoughts", "none"] in lines
    assert ["trigger", "<tool_call>", "44", "19324", "79", "4350", "46", "text"] in lines
    for section in ("inverse", "prefix", "fence"):
        results = [line for line in lines if line[:1] == [section]]
        assert results and all(line[-2:] == ["ok", "-"] for line in results)


def test_as_json_and_another_dialect(zj, tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "x"}, dialect="chatml+think")
    code, out, _ = zj("check", model, "--json")
    told = json.loads(out)
    assert (code, told["dialect"], told["kept"], told["failed"]) == (0, "chatml", "after_user", [])
    assert {one["name"] for one in told["prefix"] if one["fault"]} == {"thoughts", "thoughts behind a tool loop"}
    code, out, _ = zj("check", model, "--dialect", "qwen-xml", "--json")
    assert (code, json.loads(out)["dialect"]) == (0, "qwen-xml")


def test_a_tokenizer_that_cannot_write_the_dialect(zj) -> None:
    code, out, err = zj("check", "--dialect", "glm-4.5")
    assert code not in (0, 2) and out == ""
    assert "the dialect glm-4.5 needs '<tool_call>' to be a token of its own" in err
    code, _, err = zj("check", "--dialect", "morse")
    assert code != 0 and "is not one of auto, chatml" in err


def test_what_fails_is_the_exit_code(zj, monkeypatch: pytest.MonkeyPatch) -> None:
    from zjournal.dialects import check

    monkeypatch.setattr(check, "_fences", lambda *_: iter([check.Result("accepts a call", "it is refused")]))
    code, out, _ = zj("check")
    assert code == 1
    assert [line.split()[:5] for line in out.splitlines() if "FAILED" in line] == [
        ["fence", "accepts", "a", "call", "FAILED"]
    ]


def test_the_setting_has_every_dialect() -> None:
    assert set(DIALECTS) == {name.removesuffix("+think") for name in NAMES}


def test_a_model_without_a_chat_template(zj, tmp_path: Path) -> None:
    data = smollm2.path().read_bytes()
    assert data.count(b"tokenizer.chat_template") == 1
    (tmp_path / "bare.gguf").write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))
    code, out, err = zj("check", str(tmp_path / "bare.gguf"))
    assert (code, out) == (66, ""), "the file cannot be used"
    assert "bare.gguf" in err and "no tokenizer.chat_template" in err
    assert "Traceback" not in err
