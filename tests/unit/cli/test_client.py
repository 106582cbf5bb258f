"""`zj client`: what is printed for each client, from a list of models as the server tells it."""

from __future__ import annotations

import http.server
import json
import shlex
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.unit.cli.conftest import Zj
from zjournal.api import models
from zjournal.api.submit import ModelCard

CARD = ModelCard('smol\'s "own"', 1_764_000_000, 8192, ("org/smol",))


class Listing(http.server.BaseHTTPRequestHandler):
    """A server that tells its models to who has the key."""

    body = models.listing([CARD], {})
    keys: ClassVar[list[str | None]] = []
    upgrades: ClassVar[int] = 426

    def do_GET(self) -> None:
        self.keys.append(self.headers["authorization"])
        if self.path == "/v1/responses" and self.headers["upgrade"] == "websocket":
            self.send_response(self.upgrades)
            self.end_headers()
            return
        known = self.path == "/v1/models" and self.headers["authorization"] != "Bearer wrong"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Listing.keys.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def exports(text: str) -> dict[str, str]:
    """The exports of lines for a shell."""
    found = {}
    for line in text.splitlines():
        export, assignment = shlex.split(line)
        assert export == "export"
        name, _, found[name] = assignment.partition("=")
    return found


def test_codex(zj: Zj, url: str, tmp_path: Path) -> None:
    told = tomllib.loads(zj("client", "codex", "--url", url).out)
    assert (told["model"], told["model_provider"]) == (CARD.id, "zjournal")
    assert told["model_catalog_json"] == str(tmp_path / "home/.codex/zjournal-models.json")
    provider = told["model_providers"]["zjournal"]
    assert provider["base_url"] == f"{url}/v1" and provider["wire_api"] == "responses"
    assert provider["name"] != "OpenAI", "of that provider Codex expects more"
    [entry] = json.loads(zj("client", "codex", "--catalog", "--url", f"{url}/v1/").out)["models"]
    assert (entry["slug"], entry["context_window"]) == (CARD.id, 8192)


def test_codex_is_told_of_websocket_where_the_server_speaks_it(
    zj: Zj, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, speaks in ((101, True), (426, False), (404, False)):
        monkeypatch.setattr(Listing, "upgrades", status)
        told = tomllib.loads(zj("client", "codex", "--url", url).out)
        assert told["model_providers"]["zjournal"]["supports_websockets"] is speaks


def test_codex_is_told_of_a_key_only_where_there_is_one(zj: Zj, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex does not start where the variable that it is told of is not set."""
    for key in ("", "zj-secret-of-mine"):
        monkeypatch.setenv("ZJ_API_KEY", key)
        provider = tomllib.loads(zj("client", "codex", "--url", url).out)["model_providers"]["zjournal"]
        assert provider.get("env_key") == ("ZJ_API_KEY" if key else None)


def test_claude(zj: Zj, url: str) -> None:
    told = exports(zj("client", "claude", "--url", url).out)
    assert told["ANTHROPIC_BASE_URL"] == url
    assert told["ANTHROPIC_MODEL"] == told["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == CARD.id
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    assert told["ANTHROPIC_AUTH_TOKEN"] == "${ZJ_API_KEY:-none}"


def test_opencode_and_open_webui(zj: Zj, url: str) -> None:
    told = json.loads(zj("client", "opencode", "--url", url).out)
    assert told["model"] == f"zjournal/{CARD.id}"
    assert told["provider"]["zjournal"]["models"][CARD.id]["limit"]["context"] == 8192
    assert exports(zj("client", "openwebui", "--url", url).out)["OPENAI_API_BASE_URL"] == f"{url}/v1"


def test_the_key_is_sent_and_not_printed(zj: Zj, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZJ_API_KEY", "zj-secret-of-mine")
    for client in ("codex", "claude", "opencode", "openwebui"):
        done = zj("client", client, "--url", url)
        assert done.code == 0 and "secret" not in done.out + done.err
    assert Listing.keys == ["Bearer zj-secret-of-mine"] * 5, "one of them also asks for an upgrade"
    monkeypatch.setenv("ZJ_API_KEY", "wrong")
    done = zj("client", "codex", "--url", url)
    assert done.code == 69 and "wants a key" in done.err


def test_without_a_server_it_says_what_to_do(zj: Zj) -> None:
    done = zj("client", "codex", "--port", "1")
    assert (done.code, done.out) == (69, "")
    assert "http://127.0.0.1:1 cannot be asked" in done.err and "zj serve" in done.err
