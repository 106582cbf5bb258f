"""`zj sessions diff` on journals that a real server wrote: beside it, and after it without a model."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_restart import verify
from tests.serving import Server, scripted, zj

RULES = "Always answer in one short line, and never mention the weather in the harbour. " * 8
REMINDER = "<note>Skills: map, log, tides. Use them only when the keeper asks for one of them.</note>"
TOOL = {"type": "object", "properties": {"port": {"type": "string"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("diff")
    with Server(folder / "data", model=scripted(folder, {"text": "The tide is low."})) as server:
        yield server


def chat(server: Server, *messages: tuple[str, Any], **more: Any) -> str:
    """The id of a chat completion."""
    body = {"model": "default", "messages": [{"role": role, "content": text} for role, text in messages], **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def diff(server: Server, *arguments: str, code: int) -> dict[str, Any]:
    done = zj("sessions", "diff", *arguments, "--json", "--data-dir", str(server.data_dir))
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_r01_a_clock_in_the_system_prompt(server: Server) -> None:
    a = chat(server, ("system", f"It is 10:41:07.\n{RULES}"), ("user", "Log the tide."))
    b = chat(server, ("system", f"It is 10:41:39.\n{RULES}"), ("user", "Log the tide."))
    told = diff(server, a, b, code=1)
    assert told["verdict"] == "client-changed"
    assert told["a"]["path"] == told["b"]["path"] == "messages[0].content"
    assert (told["a"]["role"], told["a"]["turn"], told["b"]["turn"]) == ("system", a, b)
    assert told["a"]["before"].endswith("It is 10:41:")
    assert told["a"]["after"].startswith("07.\\nAlways")
    assert told["b"]["after"].startswith("39.\\nAlways")
    assert told["first"]["byte"] == len("<|im_start|>system\nIt is 10:41:")
    assert told["resync"] == {
        "kind": "replacement",
        "removed_tokens": 2,
        "inserted_tokens": 2,
        "matching_tokens": told["a"]["tokens"] - told["shared_tokens"] - 2,
    }
    assert told["lost_tokens"] == told["a"]["tokens"] - told["shared_tokens"]


def test_r02_more_in_the_git_status_is_an_insertion(server: Server) -> None:
    a = chat(server, ("system", f"Status: clean\n{RULES}"), ("user", "Go."))
    b = chat(server, ("system", f"Status: clean\n M notes/tea.md\n{RULES}"), ("user", "Go."))
    told = diff(server, a, b, code=1)
    assert told["verdict"] == "client-changed"
    assert told["resync"]["kind"] == "insertion"
    assert told["resync"]["inserted_tokens"] == told["b"]["tokens"] - told["a"]["tokens"]


def test_o07_an_attribution_line(server: Server) -> None:
    parts = [
        [{"type": "text", "text": f"billing: cch={cch};"}, {"type": "text", "text": RULES}]
        for cch in ("aaaa1", "bbbb2")
    ]
    a, b = (chat(server, ("system", content), ("user", "Go.")) for content in parts)
    told = diff(server, a, b, code=1)
    assert (told["verdict"], told["b"]["path"]) == ("client-changed", "messages[0].content[0].text")
    assert told["resync"]["matching_tokens"] > 100


def test_o08_a_call_sent_back_with_sorted_keys(server: Server) -> None:
    spelled = [
        '{"path":"notes/tea.md","edits":[{"new_string":"oolong","old_string":"sencha"}]}',
        '{"edits": [{"old_string": "sencha", "new_string": "oolong"}], "path": "notes/tea.md"}',
        '{"path":"notes/tea.md","edits":[{"new_string":"assam","old_string":"sencha"}]}',
    ]
    ids = []
    for arguments in spelled:
        call = {"id": "call_1", "type": "function", "function": {"name": "edit", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "Change it."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        ]
        answer = server.post("/v1/chat/completions", {"model": "default", "messages": messages})
        ids.append(answer.json()["id"])
    told = diff(server, ids[0], ids[1], code=1)
    assert (told["verdict"], told["a"]["role"]) == ("client-changed", "assistant")
    assert told["a"]["path"] == "messages[1].tool_calls[0].function.arguments"
    assert told["reason"] == "equal JSON, other bytes: the client spelled the same value in another way"
    told = diff(server, ids[0], ids[2], code=1)
    assert told["reason"] == "the client's texts differ"


def test_o10_a_reminder_that_moved(server: Server) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    guide = "The guide ends here.\n"
    a = chat(server, ("user", parts(guide, REMINDER, "start the survey")))
    b = chat(
        server,
        ("user", parts(guide, "start the survey")),
        ("assistant", "The tide is low."),
        ("user", parts(REMINDER, "go on")),
    )
    told = diff(server, a, b, code=1)
    assert told["verdict"] == "client-changed"
    assert (told["moved"]["from"], told["moved"]["to"]) == (
        "messages[0].content[1].text",
        "messages[2].content[0].text",
    )
    assert told["moved"]["tokens"] > 10
    assert told["resync"]["kind"] == "deletion"
    assert told["resync"]["removed_tokens"] == told["moved"]["tokens"]


def test_o27_a_tool_description(server: Server) -> None:
    def tools(third: str) -> list[dict[str, Any]]:
        described = [("height", "Height of the tide."), ("log", "Writes the log."), ("buoys", third)]
        return [{"type": "function", "name": name, "description": text, "parameters": TOOL} for name, text in described]

    a, b = (
        server.respond(input="Go.", instructions=RULES, tools=tools(text))["id"]
        for text in ("Lists buoys.", "Lists all buoys.")
    )
    told = diff(server, a, b, code=1)
    assert told["verdict"] == "client-changed"
    assert told["a"]["path"] == told["b"]["path"] == "tools[2].description"
    done = zj("sessions", "diff", a, b, "--data-dir", str(server.data_dir))
    assert done.returncode == 1
    assert "where     tools[2].description" in done.stdout.splitlines()


def test_a_chain_only_appends_and_a_branch_forks(server: Server) -> None:
    first = server.respond(input="My boat is called Osprey.")
    second = server.respond(input="What is it called?", previous_response_id=first["id"])
    branch = server.respond(input="Where does it lie?", previous_response_id=first["id"])
    session = diff(server, first["id"], second["id"], code=0)["b"]["session"]
    told = diff(server, second["id"], code=0)  # against its parent
    assert (told["verdict"], told["a"]["response"]) == ("append-only", first["id"])
    assert told["lost_tokens"] == 0
    assert "The tide is low.<|im_end|>" in told["b"]["after"]
    told = diff(server, second["id"], session, code=1)  # a session is its newest turn
    assert told["b"]["response"] == branch["id"]
    # Both texts stand at `input` of a request of their own, and so does the first turn's.
    assert (told["verdict"], told["a"]["path"], told["a"]["turn"]) == ("client-changed", "input", second["id"])
    assert diff(server, session, "--turn", "2:3", code=1) == told
    assert diff(server, second["id"], second["id"], code=0)["verdict"] == "identical"


def test_a_client_that_edits_our_answer(server: Server) -> None:
    said = ("user", "Log the tide of today, please.")
    a = chat(server, said, ("assistant", "The tide is low."), ("user", "And?"))
    first = chat(server, said)
    replayed = chat(server, said, ("assistant", "The tide is low."), ("user", "And?"))
    edited = chat(server, said, ("assistant", "The tide is high."), ("user", "And?"))
    assert first != a
    told = diff(server, replayed, edited, code=1)
    assert told["verdict"] == "client-changed"
    assert (told["a"]["path"], told["b"]["path"]) == (f"response:{first}", "messages[1].content")
    assert told["a"]["role"] == told["b"]["role"] == "assistant"


def test_it_needs_neither_server_nor_model_and_the_vocabulary_is_there_once(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "Ok."})
    with Server(tmp_path / "data", model=model) as server:
        a = server.respond(input="one\u00a0two\tthree")["id"]
        server.restart()
        b = server.respond(input="one two\tthree")["id"]
        assert server.terminate() == 0
    verify(tmp_path / "data")
    with sqlite3.connect(tmp_path / "data" / "journal.db") as db:
        kept = db.execute("SELECT refs FROM content WHERE tenant = 'server'").fetchall()
    assert kept == [(2,), (2,)]  # vocabulary and template, of two starts
    shutil.copytree(tmp_path / "data", tmp_path / "alone")
    script = (
        "import sys; from zjournal.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print([n for n in ('torch', 'litestar', 'zjournal.checkpoint.locate') if n in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "sessions", "diff", a, b, "--data-dir", str(tmp_path / "alone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "[]\n")
    assert "one\\u00a0two\\tthree" in done.stdout.replace('"|"', "")


def test_redacted_there_is_no_text(server: Server) -> None:
    a = chat(server, ("system", f"code word kestrel {RULES}"), ("user", "Go."))
    b = chat(server, ("system", f"code word osprey {RULES}"), ("user", "Go."))
    for more in ([], ["--json"]):
        done = zj("sessions", "diff", a, b, "--redact", *more, "--data-dir", str(server.data_dir))
        assert done.returncode == 1
        assert "hmac:" in done.stdout and "messages[0].content" in done.stdout
        assert not any(word in done.stdout for word in ("kestrel", "osprey", "word", "Always"))
