"""What a client of the whole server waits for: start, memory, and the second turn against the cold one.

    python benchmarks/serve.py

Prints a table; each line is measured in this run, on this machine, with the default model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.serving import Server

ROOT = Path(__file__).resolve().parent.parent
STARTS = 5
TURNS = 3
PROMPT_CHARACTERS = 6100  # about 2,000 tokens of this text


def main() -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory() as folder:
        live, ready = zip(*(start_times(Path(folder) / f"start{number}") for number in range(STARTS)), strict=True)
        row("/livez after the start of the process, median of 5, s", statistics.median(live), 2)
        row("/readyz after the start of the process, median of 5, s", statistics.median(ready), 20)
        with Server(Path(folder) / "data") as server:
            cold, warm, prompt = zip(*(ttfts(server, number) for number in range(TURNS)), strict=True)
            ratio = statistics.median(w / c for w, c in zip(warm, cold, strict=True))
            row(f"TTFT of a cold prompt of {prompt[0]} tokens, ms", statistics.median(cold) * 1000)
            row("TTFT of the second turn on it, ms", statistics.median(warm) * 1000)
            row("second turn against the cold one", ratio, 0.08)
            row("resident memory of the API process, MiB", resident_mib(server), 150)


def row(what: str, value: float, most: float | None = None) -> None:
    verdict = "" if most is None else f"at most {most:g}: {'reached' if value <= most else 'MISSED'}"
    print(f"{what:<60} {value:>10.3f}   {verdict}", flush=True)


def start_times(data_dir: Path) -> tuple[float, float]:
    """Seconds from the spawn of `zj serve` to the first 200 of /livez and of /readyz."""
    server = Server(data_dir)
    began = time.perf_counter()
    server.spawn()
    try:
        live = wait(server, "/livez") - began
        ready = wait(server, "/readyz") - began
        return live, ready
    finally:
        server.kill()
        server.http.close()


def wait(server: Server, path: str) -> float:
    while True:
        try:
            if server.http.get(path).status_code == 200:
                return time.perf_counter()
        except httpx.TransportError:
            pass
        time.sleep(0.01)


def ttfts(server: Server, number: int) -> tuple[float, float, int]:
    """Time to the first text of a cold conversation and of a short second turn on it; tokens of the cold prompt."""
    text = (ROOT / "docs" / "journal.md").read_text()[:PROMPT_CHARACTERS]
    cold, first, prompt = ttft(server, {"input": f"Notes of day {number}:\n{text}\nWhat is this about?"})
    warm, _, _ = ttft(server, {"input": "Tell me a story about a ship.", "previous_response_id": first})
    return cold, warm, prompt


def ttft(server: Server, body: dict) -> tuple[float, str, int]:
    ask = {"model": "default", "stream": True, "temperature": 0, "max_output_tokens": 8, **body}
    began = time.perf_counter()
    took, response, prompt = 0.0, "", 0
    for event in server.events("/v1/responses", ask):
        if event["type"] == "response.created":
            response = event["response"]["id"]
        if event["type"] == "response.output_text.delta" and not took:
            took = time.perf_counter() - began
        if event["type"] in ("response.completed", "response.incomplete"):
            prompt = event["response"]["usage"]["input_tokens"]
    assert took, "the answer has no text; another prompt is needed"
    return took, response, prompt


def resident_mib(server: Server) -> float:
    assert server.process is not None
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    main()
