"""`python -m tests.clients.probe`: llmprobe, all of it, against a scripted model and the demo model.

A MUST holds if it passed against the demo model; where that model could not do what the question needs (it is small,
and it does not think), it must pass against a scripted one that can. What contradicts the protocol itself is listed
in AGAINST with the reason. llmprobe is fetched from npm into build/clients.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.clients.agents import KEY, alone, environment, installed, loopback
from tests.serving import Server, saying, scripted

PACKAGE = "llmprobe"
PROBE_S_MAX = 900.0
TIMES = 20
INSIDE = "--inside"

_EXCLUSIVE = (
    "It compares cache_read_input_tokens with input_tokens. In this protocol the latter are what was computed alone, "
    "and the three counts add up to the prompt; so of a prompt that was met whole nearly all is read."
)
AGAINST: Mapping[str, str] = MappingProxyType(
    {
        "messages-usage-cached-bound": _EXCLUSIVE,
        "messages-cache-bound": _EXCLUSIVE,
        "messages-cache-prefix-bound": _EXCLUSIVE,
    }
)

# What the scripted model says where a prompt ends with these words. A whole chain stands in the first: the model says
# the name only where the earlier turn is a part of the prompt.
NOTED = "Noted, Ada."
SAID = {
    f"My name is Ada. Remember it.<|im_end|>\n<|im_start|>assistant\n{NOTED}<|im_end|>\n<|im_start|>user\nWhat is my name?": "Ada",  # noqa: E501
    "My name is Ada. Remember it.": NOTED,
    "Say exactly: alpha beta gamma": "alpha beta gamma",
    "The city you are asking about is Par": "is.",
    "What is 17 * 23?": "<think>\n17 * 20 is 340, 17 * 3 is 51.\n</think>\n\n391",
    "why the sky is blue": f"<think>\n{'Short waves scatter more than long ones. ' * 20}\n</think>\n\nIt scatters.",
    'reply with exactly the word "quartz"': "quartz",
}
ELSE = "The answer is 4. Paris is the capital of France."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.probe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    if not parser.parse_args().inside:
        if shutil.which("npm") is None:
            print("npm is not installed; llmprobe comes from there", file=sys.stderr)
            return 2
        installed(PACKAGE, PACKAGE)
        if alone():
            command = ["unshare", "-rn", sys.executable, "-m", "tests.clients.probe", INSIDE]
            return subprocess.run(command, check=False).returncode
    else:
        loopback()
    with tempfile.TemporaryDirectory(prefix="zjournal-probe-") as folder:
        room = Path(folder)
        real = _run(room / "real", None)
        played = _run(room / "scripted", scripted(room, *saying(SAID, TIMES), {"text": ELSE}, dialect="chatml+think"))
    return 1 if _told(real, played) else 0


def _run(data_dir: Path, model: str | None) -> dict[str, Any]:
    """What llmprobe says of a server, as it writes it."""
    report = data_dir.with_suffix(".json")
    with Server(data_dir, model=model) as server:
        name = server.http.get("/v1/models").json()["data"][0]["id"]
        command = [str(installed(PACKAGE, PACKAGE)), str(server.http.base_url), "-k", KEY, "--model", name]
        command += ["--full", "--no-bench", "--no-save", "--json", "--save", str(report)]
        # Its status says that the demo model is small.
        subprocess.run(
            command,
            env=environment(data_dir.parent, {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=PROBE_S_MAX,
            check=False,
        )
        assert "Traceback" not in server.log.read_text()
    return json.loads(report.read_text())


def _told(real: dict[str, Any], played: dict[str, Any]) -> list[str]:
    """Prints what came out, and gives the questions that were not met."""
    first, second = ({one["id"]: one for one in run["conformance"]["results"]} for run in (real, played))
    counts: dict[str, int] = {}
    failed = []
    for name, one in first.items():
        how, why = _judged(one, second[name])
        counts[how] = counts.get(how, 0) + 1
        if why:
            print(f"{how}: {name}: {why}")
        if how == "FAILED":
            failed.append(name)
    for run, title in ((real, "the demo model"), (played, "a scripted model")):
        met = run["conformance"]
        print(f"MUST assertions of {title} alone: {met['passed']} of {met['total']}")
    print(", ".join(f"{how} {count}" for how, count in sorted(counts.items())))
    return failed


def _judged(real: dict[str, Any], played: dict[str, Any]) -> tuple[str, str]:
    """How one question came out, and why it is not simply so."""
    missed = [one for one in real["failures"] if one["severity"] == "MUST"]
    left = [one for one in missed if one["id"] not in AGAINST]
    if real["outcome"] == "pass" or (missed and not left):
        return ("passed", "") if real["outcome"] == "pass" else ("against the protocol", AGAINST[missed[0]["id"]])
    if played["outcome"] == "pass":
        return "passed with a scripted model", real.get("reason") or left[0]["message"]
    if real["outcome"] == "unsupported":
        return "not asked", real.get("reason") or ""
    if real["outcome"] == "inconclusive":
        return "not met by a model", real.get("reason") or ""
    return "FAILED", "; ".join(one["message"] for one in left)


if __name__ == "__main__":
    sys.exit(main())
