"""Start, readiness, drain, locks and ports: what an operator meets before and after the work."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.serving import STOP_S_MAX, Server, scripted, until, zj


def _status(server: Server, path: str) -> int:
    """0 while nobody listens."""
    try:
        return server.http.get(path).status_code
    except httpx.TransportError:
        return 0


def test_o29_up_is_not_ready(tmp_path: Path) -> None:
    """Field report O29: /livez at once; /readyz and chat say `loading` until a token can be made."""
    model = scripted(tmp_path, {"text": "Ok."}, load_when="now")
    (tmp_path / "now").touch()
    with Server(tmp_path / "data", model=model) as server:  # ready by now; start a second one and watch it load
        server.kill()
        (tmp_path / "now").unlink()
        server.spawn()
        until(lambda: _status(server, "/livez") == 200)
        until(lambda: server.http.get("/readyz").json()["progress"] == 0.5)  # the engine is there, and loads
        for path in ("/readyz", "/health"):
            ready = server.http.get(path)
            assert (ready.status_code, ready.json()) == (503, {"status": "loading", "progress": 0.5})
        messages = [{"role": "user", "content": "x"}]
        for path, body in (
            ("/v1/responses", {"input": "x"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/messages", {"messages": messages, "max_tokens": 9}),
        ):
            early = server.post(path, {"model": "default", **body})
            assert early.status_code == 503
            assert int(early.headers["retry-after"]) >= 1
            error = early.json()["error"]
            assert error.get("code", error["type"]) in ("server_unavailable", "overloaded_error")
        assert _status(server, "/livez") == 200
        (tmp_path / "now").touch()
        server.wait_ready()
        assert server.respond(input="x")["status"] == "completed"
        assert server.http.head("/livez").status_code == 200
        assert server.http.get("/health").status_code == 200


def test_r13_sigterm_finishes_what_runs(tmp_path: Path) -> None:
    """Field report R13: the stream ends whole, new requests are refused meanwhile, and the exit status is 0."""
    model = scripted(tmp_path, {"text": "word " * 200, "delay_ms": 20})
    with Server(tmp_path / "data", model=model) as server:
        seen = server.events("/v1/responses", {"model": "default", "input": "go", "stream": True})
        while next(seen)["type"] != "response.output_text.delta":
            pass
        assert server.process is not None
        server.process.terminate()
        with httpx.Client(base_url=server.http.base_url, timeout=60) as other:
            until(lambda: other.get("/readyz").status_code != 200)
            ready = other.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (503, "draining")
            assert other.post("/v1/responses", json={"model": "default", "input": "x"}).status_code == 503
        last = list(seen)[-1]
        assert last["type"] == "response.completed"
        assert last["response"]["output"][0]["content"][0]["text"] == "word " * 200
        assert server.process.wait(STOP_S_MAX) == 0


def test_sigterm_parks_what_does_not_finish_and_who_asks_again_has_its_prompt_at_once(tmp_path: Path) -> None:
    """The stream ends as failed, which clients try again; what it had computed is on disk by then."""
    prompt = "The tide table of the port is on the wall. " * 100
    model = scripted(tmp_path, {"text": "word " * 2000, "delay_ms": 20})
    body = {"model": "default", "input": prompt, "stream": True}
    with Server(tmp_path / "data", "--drain-timeout", "300ms", model=model) as server:
        seen = server.events("/v1/responses", body)
        while next(seen)["type"] != "response.output_text.delta":
            pass
        rest: list[dict] = []
        thread = threading.Thread(target=lambda: rest.extend(seen))
        thread.start()
        assert server.terminate() == 0
        thread.join(STOP_S_MAX)
        last = rest[-1]
        assert last["type"] == "response.failed"
        assert "ask again" in last["response"]["error"]["message"]
        server.start()
        stored = server.http.get(f"/v1/responses/{last['response']['id']}").json()
        assert stored == last["response"]
        again = server.respond(input=prompt, max_output_tokens=2)
        usage = again["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] * 0.9


def test_a_second_sigterm_does_not_wait_for_what_runs(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 20_000, "delay_ms": 20})
    with Server(tmp_path / "data", "--drain-timeout", "10m", model=model) as server:
        seen = server.events("/v1/responses", {"model": "default", "input": "go", "stream": True})
        while next(seen)["type"] != "response.output_text.delta":
            pass
        rest: list[dict] = []
        thread = threading.Thread(target=lambda: rest.extend(seen))
        thread.start()
        assert server.process is not None
        server.process.terminate()
        with httpx.Client(base_url=server.http.base_url, timeout=60) as other:
            until(lambda: other.get("/readyz").json()["status"] == "draining")
        assert server.terminate() == 0
        thread.join(STOP_S_MAX)
        assert rest[-1]["type"] == "response.failed"


def test_sigterm_while_a_request_waits_its_turn_ends_that_too(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "word " * 2000, "delay_ms": 20})
    flags = ("--drain-timeout", "300ms", "--max-running", "1", "--keep-alive", "100ms")
    with Server(tmp_path / "data", *flags, model=model) as server:
        first = server.events("/v1/responses", {"model": "default", "input": "go", "stream": True})
        while next(first)["type"] != "response.output_text.delta":
            pass
        ends: list[str] = []
        second = server.events("/v1/responses", {"model": "default", "input": "wait", "stream": True})
        while "prompt_progress" not in next(second):
            pass
        threads = [
            threading.Thread(target=lambda one=one: ends.append(list(one)[-1]["type"])) for one in (first, second)
        ]
        for thread in threads:
            thread.start()
        assert server.terminate() == 0
        for thread in threads:
            thread.join(STOP_S_MAX)
        assert ends == ["response.failed"] * 2


def test_a_second_server_on_the_data_directory_names_the_first(tmp_path: Path) -> None:
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "x"})) as server:
        assert server.process is not None
        before = {path.name: path.stat().st_mtime_ns for path in server.data_dir.iterdir() if path.suffix != ".sock"}
        began = time.monotonic()
        second = zj("serve", "--port", "0", "--data-dir", str(server.data_dir))
        assert time.monotonic() - began < 5
        assert second.returncode == 75
        assert str(server.process.pid) in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        after = {path.name: path.stat().st_mtime_ns for path in server.data_dir.iterdir() if path.suffix != ".sock"}
        assert after == before
        server.kill()
        server.start()  # a kill leaves no lock behind


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    model = scripted(tmp_path, {"text": "x"})
    with Server(tmp_path / "data", model=model) as server:
        other = zj("serve", "--port", str(server.port), "--data-dir", str(tmp_path / "other"), "--model", model)
        assert other.returncode == 69
        assert f"Port {server.port}" in other.stderr
        assert len(other.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_a_bad_model_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    done = zj("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(path))
    assert done.returncode == 66
    assert str(path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_truncated_model_file_is_one_line(tmp_path: Path) -> None:
    from zjournal.checkpoint.locate import locate

    whole = locate(None, tmp_path).path.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    done = zj("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(path))
    assert done.returncode == 66
    assert str(path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_tensor_type_that_cannot_be_run_is_one_line_before_anything_is_bound(tmp_path: Path) -> None:
    from zjournal.checkpoint.locate import locate

    data = bytearray(locate(None, tmp_path).path.read_bytes())
    name = b"blk.0.attn_q.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of axes and the two extents
    assert data[kind] == 3  # Q4_1
    data[kind] = 39
    path = tmp_path / "mxfp4.gguf"
    path.write_bytes(data)
    done = zj("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", str(path))
    assert done.returncode == 66
    assert "blk.0.attn_q.weight" in done.stderr and "MXFP4" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "script",
    ['{"turns": []}', '{"turns": [{"text": "x"}], "dialect": "glm"}', '{"turns": [{"text": "x", "when": ""}]}'],
)
def test_a_bad_script_is_one_line_before_anything_is_bound(tmp_path: Path, script: str) -> None:
    path = tmp_path / "turns.json"
    path.write_text(script)
    done = zj("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", f"scripted:{path}")
    assert done.returncode == 66
    assert str(path) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_context_beyond_the_models_is_a_configuration_error(tmp_path: Path) -> None:
    began = time.monotonic()
    done = zj("serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--context", "99999")
    assert done.returncode == 78
    assert "99999" in done.stderr and "8192" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert time.monotonic() - began < 20  # 2 s alone; machines are shared


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    done = zj("serve", "--data-dir", str(tmp_path / "data"), "--model", str(tmp_path / "nowhere.gguf"))
    assert done.returncode == 66
    assert "nowhere.gguf" in done.stderr
    assert not (tmp_path / "data").exists()


def test_files_are_private(tmp_path: Path) -> None:
    with Server(tmp_path / "data", model=scripted(tmp_path, {"text": "x"})) as server:
        server.respond(input="x")
        assert server.data_dir.stat().st_mode & 0o777 == 0o700
        for path in server.data_dir.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a chunk's part that was renamed meanwhile
                assert path.stat().st_mode & 0o077 == 0, path
