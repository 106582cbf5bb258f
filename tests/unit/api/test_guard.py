"""Who may speak to the server, by Host and Origin."""

import pytest

from zjournal.api.guard import Neighbours
from zjournal.errors import Forbidden


def allowed(bound: str, host: str | None, origin: str | None = None) -> bool:
    headers = [(b"accept", b"*/*")]
    if host is not None:
        headers.append((b"host", host.encode("latin-1")))
    if origin is not None:
        headers.append((b"origin", origin.encode("latin-1")))
    try:
        Neighbours(bound, 8080).check(headers)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "127.9.9.9", "localhost."]
)
def test_loopback_names_are_ours(host):
    assert allowed("127.0.0.1", host)


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.7",
     "localhost@evil.example", "localhost:80:80", "[::2]", "localhost/", "\xe9", "0x7f.1", "[127.0.0.1", "::1"],
)  # fmt: skip
def test_other_hosts_are_foreign(host):
    assert not allowed("127.0.0.1", host)


def test_a_trailing_dot_is_the_same_name():
    assert allowed("127.0.0.1", "localhost.:8080")


def test_two_hosts_are_refused():
    with pytest.raises(Forbidden):
        Neighbours("127.0.0.1", 8080).check([(b"host", b"localhost"), (b"host", b"localhost")])


def test_the_bound_address_is_ours():
    assert allowed("192.168.1.7", "192.168.1.7:8080")
    assert allowed("box.lan", "box.lan:8080")
    assert not allowed("192.168.1.7", "192.168.1.8:8080")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_bound_to_all_interfaces_any_address_is_ours_but_no_name(bound):
    assert allowed(bound, "192.168.1.7:8080")
    assert not allowed(bound, "evil.example:8080")


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8080", "https://localhost"]
)
def test_loopback_origins_may_speak(origin):
    assert allowed("127.0.0.1", "localhost:8080", origin)


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "", "http://", "http://localhost.evil.example", "http://evil.example:8080",
     "file://localhost", "http://localhost@evil.example", "chrome-extension://abc", "http://192.168.1.7"],
)  # fmt: skip
def test_foreign_origins_may_not(origin):
    assert not allowed("127.0.0.1", "localhost:8080", origin)


def test_the_bound_origin_needs_the_port():
    assert allowed("192.168.1.7", "192.168.1.7:8080", "http://192.168.1.7:8080")
    assert not allowed("192.168.1.7", "192.168.1.7:8080", "http://192.168.1.7:3000")
