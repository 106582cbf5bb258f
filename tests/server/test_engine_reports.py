"""Field reports about the engine, as a client sees them: over HTTP, with real processes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.server.test_cancel import wait_turns
from tests.server.test_load import samples
from tests.serving import Server, hanging, happened, scripted, until
from zjournal.journal.events import TokensSampled

TEXT = "The tide is low and the boats lie in the mud of the harbour. " * 60
IDLE_S_MAX = 2.0  # as the report asks


def body(path: str, text: str, **more: object) -> dict:
    ask = {"input": text} if "responses" in path else {"messages": [{"role": "user", "content": text}]}
    return {"model": "default", "temperature": 0, **ask, **more}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("phase", ["prefill", "decode", "queue"])
@pytest.mark.parametrize("stream", [True, False])
def test_o19_the_engine_is_idle_soon_after_the_client_has_gone(
    tmp_path: Path, path: str, phase: str, stream: bool
) -> None:
    """Field report O19: the socket is closed in prefill, in decode, and while queued."""
    slow = {"prefill_ms_per_1k": 500.0} if phase == "prefill" else {"delay_ms": 20.0}
    model = scripted(tmp_path, {"text": "word " * 400, **slow})
    with Server(tmp_path / "data", "--max-running", "1", model=model) as server:
        if phase == "queue":
            running = server.events("/v1/responses", body("/v1/responses", "first", stream=True))
            while next(running)["type"] != "response.output_text.delta":
                pass
        busy = "zj_waiting" if phase == "queue" else "zj_running"
        with hanging(server, path, body(path, TEXT * 12, stream=stream)) as sock:
            wait_until(server, busy, 1)
            if phase == "decode" and stream:
                while b"word" not in (told := sock.recv(1 << 16)):
                    assert told
            elif phase == "decode":
                until(lambda: happened(server.data_dir, TokensSampled))
        gone = time.monotonic()
        while samples(server)[("zj_accepted",)] > (phase == "queue"):
            assert time.monotonic() - gone < IDLE_S_MAX
            threading.Event().wait(0.02)
        (turn,) = wait_turns(server, 1, "cancelled")
        assert (turn["output_tokens"] > 0) == (phase == "decode")
        if phase == "queue":
            running.close()


def wait_until(server: Server, gauge: str, least: int) -> None:
    """Returns once the gauge says so; it is told twice a second."""
    until(lambda: samples(server)[(gauge,)] >= least)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_o21_cached_tokens_are_told_alike_streamed_or_not(tmp_path: Path, path: str) -> None:
    """Field report O21: the same body again, streamed and not: all but the last token of the prompt is cached."""
    model = scripted(tmp_path, {"text": "Yes."})
    with Server(tmp_path / "data", model=model) as server:
        first = usage_of(server, path, stream=False)
        assert first["cached"] == 0
        for stream in (False, True):
            again = usage_of(server, path, stream=stream)
            assert again == {**first, "cached": first["prompt"] - 1}
        counted = samples(server)
        assert counted["zj_prompt_tokens_total", "vram"] == 2 * (first["prompt"] - 1)
        assert counted["zj_prompt_tokens_total", "computed"] == first["prompt"] + 2


def usage_of(server: Server, path: str, *, stream: bool) -> dict[str, int]:
    """Prompt, cached and output tokens as this protocol tells them."""
    if "responses" in path:
        if stream:
            usage = list(server.events(path, body(path, TEXT, stream=True)))[-1]["response"]["usage"]
        else:
            usage = server.post(path, body(path, TEXT)).json()["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return {"prompt": usage["input_tokens"], "cached": cached, "output": usage["output_tokens"]}
    if stream:
        asked = body(path, TEXT, stream=True, stream_options={"include_usage": True})
        usage = list(server.events(path, asked))[-1]["usage"]
    else:
        usage = server.post(path, body(path, TEXT)).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"prompt": usage["prompt_tokens"], "cached": cached, "output": usage["completion_tokens"]}


def test_r03_another_reasoning_effort_keeps_the_prefix(tmp_path: Path) -> None:
    """Field report R03: a setting that is no part of the prompt must not move it."""
    model = scripted(tmp_path, {"text": "Yes."})
    with Server(tmp_path / "data", model=model) as server:
        for number, effort in enumerate(("low", "high", "medium")):
            usage = server.respond(input=TEXT, reasoning={"effort": effort})["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] == (usage["input_tokens"] - 1 if number else 0)


def test_flex_work_yields_to_everybody_else(tmp_path: Path) -> None:
    """`service_tier: flex`: of two that wait for the one place, the later, ordinary one goes first."""
    model = scripted(
        tmp_path, {"when": "first", "text": "word " * 600, "delay_ms": 10}, {"text": "word " * 30, "delay_ms": 10}
    )
    with Server(tmp_path / "data", "--max-running", "1", model=model) as server:
        running = server.events("/v1/responses", body("/v1/responses", "first", stream=True))
        while next(running)["type"] != "response.output_text.delta":
            pass
        ends: list[str] = []

        def ask(tier: str) -> None:
            answer = httpx.post(
                f"http://127.0.0.1:{server.port}/v1/responses",
                json=body("/v1/responses", f"for {tier}", service_tier=tier),
                timeout=60,
            )
            assert answer.json()["service_tier"] == tier
            ends.append(tier)

        threads = [threading.Thread(target=ask, args=(tier,)) for tier in ("flex", "default")]
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_until(server, "zj_waiting", number)
        list(running)
        for thread in threads:
            thread.join()
        assert ends == ["default", "flex"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("guided_json", {"type": "object"}), ("ignore_eos", True), ("stop_token_ids", [5]), ("best_of", 2), ("n", 17)],
)
def test_what_would_change_the_answer_and_is_not_done_here_is_refused(
    tmp_path_factory: pytest.TempPathFactory, server: Server, path: str, field: str, value: object
) -> None:
    answer = server.post(path, body(path, "hello", **{field: value}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("refused")
    with Server(folder / "data", model=scripted(folder, {"text": "Yes."})) as started:
        yield started


def test_a_prompt_over_the_kv_memory_is_told_so(tmp_path: Path) -> None:
    """Not the context is too small, but what the operator gave: the message says which."""
    model = scripted(tmp_path, {"text": "Yes."})
    with Server(tmp_path / "data", "--kv-memory", "1MiB", model=model) as server:
        answer = server.post("/v1/responses", body("/v1/responses", "word " * 1100))
        assert answer.status_code == 400
        assert "KV memory" in answer.json()["error"]["message"]
