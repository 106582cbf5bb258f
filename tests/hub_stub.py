"""A stub of the Hugging Face hub on loopback, which can cut connections, damage files and refuse."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections import Counter
from collections.abc import Mapping

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
LARGE = 1000


class Stub(http.server.ThreadingHTTPServer):
    """The hub's two routes. `cuts`: after how many bytes the next longer answers break off."""

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos = repos
        self.cuts: list[int] = []
        self.ranges: list[str] = []
        self.asked: Counter[str] = Counter()
        self.damaged = False
        self.endless = False  # files go on and on, until nobody reads
        self.status: dict[str, tuple[int, str]] = {}  # path -> status, error code

    def __enter__(self) -> Stub:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.asked[path] += 1
        if path in self.server.status:
            status, code = self.server.status[path]
            return self.answer(status, b"{}", {"X-Error-Code": code})
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        if listing:
            return self.listing(listing[1], listing[2])
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file and file[3] in self.server.repos.get(file[1], {}):
            return self.file(self.server.repos[file[1]][file[3]])
        return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def listing(self, repo: str, revision: str) -> None:
        if repo not in self.server.repos:
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = {"main": COMMIT, COMMIT: COMMIT, "v1": OLDER}.get(revision)
        if commit is None:
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for name, data in self.server.repos[repo].items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            one = {"rfilename": name, "size": len(data), "blobId": git}
            if len(data) > LARGE:
                one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(one)
        self.answer(200, json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode())

    def file(self, data: bytes) -> None:
        if self.server.endless and self.command == "GET":
            return self.forever(data)
        headers, status = {}, 200
        if self.server.damaged and len(data) > LARGE:
            data = b"X" + data[1:]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted:
            self.server.ranges.append(wanted[0])
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        cut = self.server.cuts.pop(0) if self.server.cuts and len(data) > self.server.cuts[0] else len(data)
        self.answer(status, data, headers, cut)

    def forever(self, data: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(data)

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut])
        if cut is not None and cut < len(data):
            self.close_connection = True
