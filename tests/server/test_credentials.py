"""No credential is ever written: not to the journal, its log, a metric or the server's log, wherever it was sent."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path

import pytest

from tests.serving import Server, scripted, zj

KEY = "zj-canary-7a21-the-right-key"
WRONG = "zj-canary-7a21-a-wrong-key"
COOKIE = "zj-canary-7a21-cookie"
QUERY = "zj-canary-7a21-query"
USER = "zj-canary-7a21-user:zj-canary-7a21-password"
BASIC = base64.b64encode(USER.encode()).decode()
NEEDLES = [b"canary-7a21", BASIC.encode(), *(text.encode("utf-16-le") for text in (KEY, COOKIE))]


def _request(port: int, target: str, headers: dict[str, str], body: bytes) -> bytes:
    """A raw request, so that nothing a client library would refuse or rewrite is left out."""
    lines = [f"POST {target} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        with sock.makefile("rb") as file:
            return file.read()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_no_credential_is_written(tmp_path: Path, path: str) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"me:{KEY}\n")
    body = {"model": "default", "input": "hello"}
    if path.endswith("completions"):
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
    raw = json.dumps(body).encode()
    flags = ("--api-key-file", str(keys), "--log-level", "debug")
    # Fields that some clients send along, and where remote tools have their keys.
    tool = {"type": "mcp", "server_label": "x", "server_url": f"https://{USER}@host/x", "authorization": COOKIE}
    more = {
        "api_key": QUERY,
        "extra_headers": {"Authorization": f"Bearer {KEY}", "X-Whatever": COOKIE},
        "tools": [tool | {"headers": {"X-Token": COOKIE}}],
        "metadata": {"note": f"my key is {KEY}", "password": QUERY},
        "prompt_cache_key": KEY,
        "user": KEY,
    }
    with Server(tmp_path / "data", *flags, model=scripted(tmp_path, {"text": "hi"})) as server:
        cookie = {"Cookie": f"session={COOKIE}", "User-Agent": "an-agent/1"}
        places = [
            (path, {"Authorization": f"Bearer {KEY}"}, b" 200 "),
            (f"{path}?api_key={QUERY}&token={QUERY}", {"x-api-key": KEY}, b" 200 "),
            (f"http://{USER}@127.0.0.1:{server.port}{path}", {"x-api-key": KEY}, b" "),
            (
                path,
                {"Authorization": f"Basic {BASIC}", "x-api-key": KEY, "Proxy-Authorization": f"Basic {BASIC}"},
                b" ",
            ),
            (path, {"Authorization": f"Bearer {WRONG}"}, b" 401 "),
            (f"{path}?key={QUERY}", {"x-goog-api-key": QUERY, "api-key": QUERY}, b" 401 "),
        ]
        for target, headers, status in places:
            answer = _request(server.port, target, cookie | headers, raw)
            assert status in answer.split(b"\r\n", 1)[0], answer[:200]
            assert b"canary-7a21" not in answer
        for name, value in more.items():
            answer = server.post(path, {**body, name: value}, headers={"x-api-key": KEY, **cookie})
            assert answer.status_code in (200, 400), answer.text
            assert "canary-7a21" not in answer.text
        metrics = server.http.get("/metrics", headers={"x-api-key": KEY}).content
        assert server.terminate() == 0
    where = ("--data-dir", str(server.data_dir))
    shown = zj("sessions", "list", "--json", *where)
    assert len(json.loads(shown.stdout)) >= 2
    written = {file.name: file.read_bytes() for file in server.data_dir.iterdir() if file.is_file()}
    for session in json.loads(shown.stdout):
        exported = zj("sessions", "export", session["session"], *where)
        assert exported.returncode == 0, exported.stderr
        written[f"export {session['session']}"] = exported.stdout.encode()
    written |= {"the log": server.log.read_bytes(), "metrics": metrics, "list": shown.stdout.encode()}
    for name, data in {**written, **_contents(server.data_dir)}.items():
        for needle in NEEDLES:
            assert needle not in data, (name, needle)


def _contents(data_dir: Path) -> dict[str, bytes]:
    """Everything that is stored compressed: contents, and bodies and prompts as they are read from records."""
    from zjournal.journal.reader import Reader
    from zjournal.sessions.makers import Makers
    from zjournal.sessions.records import Records

    with Reader.open(data_dir) as reader:
        with reader.transaction() as db:
            named = db.execute("SELECT tenant, digest FROM content").fetchall()
        found = {f"content {digest.hex()}": reader.content(tenant, digest) for tenant, digest in named}
        records = Records(reader, Makers(reader))
        for session in reader.sessions():
            for turn in reader.turns(session.session):
                vocabulary = records.vocabulary(turn)
                assert vocabulary is not None
                found[f"body {turn.response}"] = records.body(turn)
                found[f"prompt {turn.response}"] = vocabulary.decode(records.prompt(turn)[0])
    assert any(b"hello" in data for name, data in found.items() if name.startswith("prompt"))
    return found
