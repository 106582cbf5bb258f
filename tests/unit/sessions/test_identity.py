"""Names that must come out the same when derived again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zjournal import ask
from zjournal.sessions import identity

SECRET = b"s" * 32


def user(*parts: str) -> ask.Message:
    return ask.Message("user", tuple(ask.Text(part, f"p{i}") for i, part in enumerate(parts)))


def test_item_ids_are_stable_and_depend_on_every_part() -> None:
    def made(secret: bytes, response: str, index: int, prefix: str) -> str:
        return identity.item_id(identity.item_secret(secret, response), index, prefix)

    name = made(SECRET, "resp_1", 0, "msg")
    assert name == made(SECRET, "resp_1", 0, "msg")
    assert name.startswith("msg_")
    others = {
        made(b"t" * 32, "resp_1", 0, "msg"),
        made(SECRET, "resp_2", 0, "msg"),
        made(SECRET, "resp_1", 1, "msg"),
        made(SECRET, "resp_1", 0, "fc"),
    }
    assert len({name, *others}) == 5


def test_namespaces_differ_by_tenant_and_model() -> None:
    assert len({identity.namespace(model, tenant) for model in "ab" for tenant in "xy"}) == 4


def test_a_salt_narrows_the_namespace_and_cannot_be_guessed_back() -> None:
    salts = {identity.salt(secret, tenant, name) for secret in (SECRET, b"t" * 32) for tenant in "xy" for name in "ab"}
    assert len(salts) == 8
    namespace = identity.namespace("model", "x")
    assert identity.kv_namespace(namespace, identity.salt(SECRET, "x", None)) == namespace
    assert len({identity.kv_namespace(namespace, salt) for salt in salts}) == 8
    assert all(salt != "a" for salt in salts) and identity.salt(SECRET, "x", "\ud800")


def test_how_a_text_was_cut_into_parts_does_not_count() -> None:
    start = identity.history_start(SECRET)
    assert identity.history(start, [user("hello world")]) == identity.history(start, [user("hello", " world")])


def test_an_output_counts_as_what_the_client_saw_of_it() -> None:
    start = identity.history_start(SECRET)
    seen = ask.Message("assistant", (ask.Text("yes"),))
    output = ask.Output("resp_1", (seen,), b"\1\0\0\0")
    assert identity.history(start, [user("x"), output]) == identity.history(start, [user("x"), seen])


texts = st.text(max_size=6)
items = st.one_of(
    st.builds(user, texts),
    st.builds(lambda text: ask.Message("assistant", (ask.Text(text),)), texts),
    st.builds(ask.Call, texts, texts, texts),
    st.builds(lambda name, text: ask.Result(name, (ask.Text(text),)), texts, texts),
)


@given(st.lists(items, max_size=4), st.lists(items, max_size=4))
def test_equal_digests_mean_equal_histories(a: list[ask.Item], b: list[ask.Item]) -> None:
    start = identity.history_start(SECRET)

    def plain(found: list[ask.Item]) -> list:
        return [(type(item), getattr(item, "role", ""), item.text if hasattr(item, "text") else item) for item in found]

    def calls(found: list[ask.Item]) -> list:
        return [item.call_id for item in found if isinstance(item, ask.Result)]

    same = plain(a) == plain(b) and calls(a) == calls(b)
    assert (identity.history(start, a) == identity.history(start, b)) == same


def test_a_call_is_named_by_a_key_that_depends_on_every_part() -> None:
    key = identity.call_key(SECRET, "local", "call_1")
    assert len(key) == identity.CALL_KEY_BYTES
    others = [(b"t" * 32, "local", "call_1"), (SECRET, "t_1", "call_1"), (SECRET, "local", "call_2")]
    assert len({key, *(identity.call_key(*parts) for parts in others)}) == 4
