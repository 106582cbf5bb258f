"""The log of both processes: what libraries say at INFO stays out, what they warn of does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SAY = """
import logging, sys
from zjournal.link import logs
logs.configure("info", sys.argv[1])
for name in ("httpx", "httpx2", "urllib3", "huggingface_hub.file_download"):
    logging.getLogger(name).info("GET https://cdn/x?X-Amz-Signature=SECRET from %s", name)
    logging.getLogger(name).warning("slow: %s", name)
logging.getLogger("zjournal.server").info("serving")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_addresses_of_redirects_stay_out_of_the_log(form: str) -> None:
    done = subprocess.run([sys.executable, "-c", _SAY, form], capture_output=True, text=True, check=True)
    assert "SECRET" not in done.stderr
    assert done.stderr.count("slow: ") == 4
    assert "serving" in done.stderr
