"""What each command prints, and how it ends."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Zj
from zjournal import server
from zjournal.config import SETTINGS, Config, version
from zjournal.errors import DataDirLocked
from zjournal.journal.events import Fact, SessionOpened
from zjournal.journal.log import Journal


def test_version_and_help(zj: Zj) -> None:
    assert zj("--version").out == f"zjournal {version()}\n"
    done = zj("--help")
    assert done.code == 0
    assert all(f"\n  {group}" in done.out for group in ("serve", "demo", "sessions", "journal", "models", "config"))


def test_wrong_usage_ends_with_2(zj: Zj) -> None:
    assert zj("sevre").code == 2
    assert zj("serve", "--no-such-flag").code == 2


def test_config_show_names_value_and_origin(zj: Zj, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zj.toml").write_text("max_running = 2\n")
    monkeypatch.setenv("ZJ_KV_MEMORY", "1536MiB")
    done = zj("config", "show", "--port", "9000", "--insecure-bind")
    lines = {words[0]: " ".join(words[1:]) for line in done.out.splitlines() if (words := line.split())}
    assert done.code == 0
    assert lines["port"] == "9000 flag --port"
    assert lines["insecure_bind"] == "true flag --insecure-bind"
    assert lines["kv_memory"] == "1536MiB environment ZJ_KV_MEMORY"
    assert lines["max_running"] == f"2 file {tmp_path}/zj.toml:1"
    assert lines["api_key_file"] == "- default"
    assert set(lines) == {"setting", *(setting.name for setting in SETTINGS)}
    told = zj("config", "show", "--json", "--port", "9000").json
    assert told["port"] == {"value": 9000, "origin": "flag --port"}
    assert told["kv_memory"]["value"] == 1536 << 20
    assert told["api_key_file"]["value"] is None
    assert told["data_dir"]["value"] == str(tmp_path / "home/.local/share/zjournal")


def test_a_fault_is_one_line_and_its_code(zj: Zj) -> None:
    done = zj("config", "show", "--port", "x")
    assert (done.code, done.out, done.err) == (78, "", "zj: --port: 'x' is not a whole number\n")


def test_serve_hands_over_the_settings(zj: Zj, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    def run(config: Config) -> int:
        seen.append(config)
        return 5

    monkeypatch.setattr(server, "run", run)
    assert zj("serve", "--port", "0", "--model", "m.gguf").code == 5
    assert (seen[0].port, seen[0].model) == (0, str(tmp_path / "m.gguf"))


def test_serve_shows_what_the_server_refuses(zj: Zj, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config) -> int:
        raise DataDirLocked("in use by\nprocess 7")

    monkeypatch.setattr(server, "run", run)
    assert zj("serve")[::2] == (75, "zj: in use by process 7\n")


def test_serve_refuses_an_open_address_without_keys(zj: Zj, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run", lambda config: pytest.fail("the server was started"))
    done = zj("serve", "--host", "0.0.0.0")
    assert done.code == 78
    assert "--api-key-file" in done.err


def test_sessions_list(zj: Zj, data_dir: Path) -> None:
    done = zj("sessions", "list", "--data-dir", str(data_dir))
    assert [line.split()[:2] for line in done.out.splitlines()[1:]] == [["ses_two", "1"], ["ses_one", "4"]]
    told = zj("sessions", "list", "--json", "--data-dir", str(data_dir)).json
    assert [(s["session"], s["turn_count"]) for s in told] == [("ses_two", 1), ("ses_one", 4)]
    assert all(s["opened"].startswith("2027-01-15T08:00:") for s in told)


def test_sessions_list_marks_replays(zj: Zj, replayed_dir: Path) -> None:
    where = ("--data-dir", str(replayed_dir))
    assert zj("sessions", "pin", "rep_one", *where).code == 0
    lines = {line.split()[0]: line for line in zj("sessions", "list", *where).out.splitlines()[1:]}
    assert "replay of ses_one, pinned" in lines["rep_one"]
    assert not any("replay" in lines[name] for name in ("ses_one", "ses_two"))
    told = zj("sessions", "list", "--json", *where).json
    assert {one["session"]: one["replay_of"] for one in told} == {
        "ses_one": None,
        "ses_two": None,
        "rep_one": "ses_one",
    }


def test_o25_sessions_name_their_owners(zj: Zj, data_dir: Path) -> None:
    """Field report O25: who may see all sees whose each is, by the name of the key."""
    with Journal.open(data_dir) as journal:
        owner = journal.tenant("alice").id
        journal.append([Fact(SessionOpened(tenant=owner, session="ses_three"))]).result()
    assert owner.startswith("t_")
    where = ("--data-dir", str(data_dir))
    head, *lines = zj("sessions", "list", *where).out.splitlines()
    assert "owner" in head
    # "last used" is two words.
    found = {line.split()[0]: line.split()[head.split().index("owner") - 1] for line in lines}
    assert found == {"ses_one": "local", "ses_two": "local", "ses_three": "alice"}
    told = zj("sessions", "list", "--json", *where).json
    assert {(one["session"], one["tenant"], one["owner_name"]) for one in told} == {
        ("ses_one", "local", "local"),
        ("ses_two", "local", "local"),
        ("ses_three", owner, "alice"),
    }
    assert zj("sessions", "show", "ses_three", *where).out.splitlines()[0].endswith("  alice")
    shown = zj("sessions", "show", "ses_three", "--json", *where).json
    assert (shown["tenant"], shown["owner_name"]) == (owner, "alice")


@pytest.mark.parametrize("name", ["ses_one", "ses_o", "resp_a2", "resp_b3"])
def test_sessions_show_draws_the_tree(zj: Zj, data_dir: Path, name: str) -> None:
    done = zj("sessions", "show", name, "--data-dir", str(data_dir))
    title, *lines = done.out.splitlines()
    assert title.startswith("ses_one  4 turns")
    assert [(line.index("resp_"), line[line.index("resp_") :].split()[0]) for line in lines] == [
        (4, "resp_a1"),
        (8, "resp_a2"),
        (8, "resp_b2"),
        (12, "resp_b3"),
    ]
    assert lines[0].endswith("prompt 40  cached 30  output 7  TTFT 25 ms  stop")
    assert lines[3].endswith("TTFT -  failed: The engine died.")


def test_sessions_show_as_json(zj: Zj, data_dir: Path) -> None:
    told = zj("sessions", "show", "ses_two", "--json", "--data-dir", str(data_dir)).json
    (turn,) = told["turns"]
    assert (turn["prompt_tokens"], turn["cached_tokens"]) == (40, 30)
    assert (turn["output_tokens"], turn["ttft_ms"], turn["stop_reason"], turn["stored"]) == (7, 25.0, "stop", False)
    failed = zj("sessions", "show", "resp_b3", "--json", "--data-dir", str(data_dir)).json["turns"][-1]
    assert failed["error"] == {"code": "engine_error", "message": "The engine died."}
    assert (failed["parent"], failed["stop_reason"]) == ("resp_b2", None)


@pytest.mark.parametrize(
    ("name", "said"),
    [("resp_zz", "no session or response"), ("ses_", "ses_one, ses_two"), ("resp_", "resp_a1, "), ("", "no session")],
)
def test_sessions_show_wants_one_session(zj: Zj, data_dir: Path, name: str, said: str) -> None:
    done = zj("sessions", "show", name, "--data-dir", str(data_dir))
    assert done.code == 1
    assert said in done.err


def test_verify_of_a_clean_journal(zj: Zj, data_dir: Path) -> None:
    done = zj("journal", "verify", "--data-dir", str(data_dir))
    assert done.code == 0
    assert "clean" in done.out and "2 sessions, 5 turns" in done.out
    told = zj("journal", "verify", "--json", "--data-dir", str(data_dir)).json
    assert (told["clean"], told["turns"], told["fault"]) == (True, 5, None)


def test_verify_names_the_first_break(zj: Zj, data_dir: Path) -> None:
    with sqlite3.connect(data_dir / "journal.db") as db:
        db.execute("UPDATE event SET time = time + 1 WHERE seq = 9")
    done = zj("journal", "verify", "--data-dir", str(data_dir))
    assert done.code == 1
    assert "BROKEN at event 9: " in done.out
    told = zj("journal", "verify", "--json", "--data-dir", str(data_dir))
    assert told.code == 1
    assert (told.json["clean"], told.json["fault"]["seq"]) == (False, 9)


@pytest.mark.parametrize("command", [("sessions", "list"), ("sessions", "show", "x"), ("journal", "verify")])
def test_reading_without_a_journal_says_so_and_makes_none(zj: Zj, tmp_path: Path, command: tuple[str, ...]) -> None:
    done = zj(*command, "--data-dir", str(tmp_path / "absent"))
    assert done.code == 65
    assert "there is no journal here" in done.err
    assert not (tmp_path / "absent").exists()


def test_reading_leaves_the_folder_as_it_was(zj: Zj, data_dir: Path) -> None:
    before = (data_dir / "journal.db").read_bytes()
    zj("sessions", "list", "--data-dir", str(data_dir))
    zj("journal", "verify", "--data-dir", str(data_dir))
    assert (data_dir / "journal.db").read_bytes() == before


def test_models_pull_refuses_other_names(zj: Zj) -> None:
    done = zj("models", "pull", "gpt-5")
    assert done.code == 66
    assert done.err == "zj: unknown model 'gpt-5'; give smollm2, or ORG/NAME on the Hugging Face hub\n"


def test_models_pull_says_where_it_is(zj: Zj, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zjournal.checkpoint import download

    monkeypatch.setattr(download, "pull_smollm2", lambda cache_dir, progress: cache_dir / "models" / "m.gguf")
    assert zj("models", "pull", "smollm2", "--cache-dir", "c").out == f"smollm2 is at {tmp_path}/c/models/m.gguf\n"
    told = zj("models", "pull", "smollm2", "--json", "--cache-dir", "c").json
    assert told == {"model": "smollm2", "path": f"{tmp_path}/c/models/m.gguf"}
