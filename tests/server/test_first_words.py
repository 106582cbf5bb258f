"""`zj sessions list` tells sessions apart by what was said first, beside a running server, in every protocol."""

from __future__ import annotations

import json
from pathlib import Path

from tests.serving import Server, scripted, zj

RULES = "You keep the log of a harbour and answer in few words. " * 20
REMINDER = "<system-reminder>\nToday is a Monday, and there are many rules.\n</system-reminder>"


def listed(server: Server) -> dict[str, str | None]:
    """First words by session, as JSON has them."""
    done = zj("sessions", "list", "--json", "--data-dir", str(server.data_dir))
    assert (done.returncode, done.stderr) == (0, "")
    return {row["session"]: row["first_words"] for row in json.loads(done.stdout)}


def test_the_first_words_of_each_session(tmp_path: Path) -> None:
    with Server(tmp_path / "data", model=scripted(tmp_path, *[{"text": "Ok."}] * 9)) as server:
        told: list[str] = []

        def begun() -> str | None:
            """The words of the session that is new."""
            found = listed(server)
            (new,) = set(found) - set(told)
            told.append(new)
            return found[new]

        server.respond(input="Hi", instructions=RULES)
        assert begun() == "Hi"
        first = server.respond(input="When is the tide high, and how high will it be by then?", instructions=RULES)
        assert begun() == "When is the tide high, and how high will it be by then?"
        server.respond(input="And then?", previous_response_id=first["id"])
        chat = [{"role": "system", "content": RULES}, {"role": "user", "content": "Two\n lines \x1b[31mof a chat é"}]
        assert server.post("/v1/chat/completions", {"model": "default", "messages": chat}).status_code == 200
        assert begun() == "Two lines \\x1b[31mof a chat é"
        parts = [{"type": "text", "text": REMINDER}, {"type": "text", "text": "Tidy the sheds up. " * 100}]
        asked = {
            "model": "claude-x",
            "max_tokens": 9,
            "system": RULES,
            "messages": [{"role": "user", "content": parts}],
        }
        assert server.post("/v1/messages", asked).status_code == 200
        assert begun() == ("Tidy the sheds up. " * 100)[:199].rstrip() + "…"
        asked["messages"] = [{"role": "user", "content": parts[:1]}]
        assert server.post("/v1/messages", asked).status_code == 200
        assert begun() == " ".join(REMINDER.split()), "there is nothing else"

        gone = server.respond(input="canary-8812: what is to be deleted, every word of it", store=True)
        assert begun() == "canary-8812: what is to be deleted, every word of it"
        where = ("--data-dir", str(server.data_dir))
        assert zj("sessions", "delete", gone["id"], "--yes", *where).returncode == 0
        assert "canary-8812" not in json.dumps(listed(server))

        table = zj("sessions", "list", *where, env={**server.env, "COLUMNS": "100"}).stdout
        assert "\x1b" not in table and "canary" not in table and RULES[:20] not in table
        lines = table.splitlines()
        assert lines[0].split()[-2:] == ["first", "words"] and len(lines) == 1 + len(listed(server))
        assert any(line.rstrip().endswith(" Hi") for line in lines)
