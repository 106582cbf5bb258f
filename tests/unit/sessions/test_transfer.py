"""Export and import: nothing is lost on the way, the same file changes nothing, and no bad file gets in halfway."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.unit.sessions.talk import FINGERPRINT, Talk
from zjournal import ask
from zjournal.api.recorded import DECODERS
from zjournal.errors import BadRequest, Fault, ImportFault
from zjournal.journal import events, retention
from zjournal.journal.events import Fact
from zjournal.journal.log import Journal
from zjournal.journal.verify import verify
from zjournal.sessions import exported, identity, importing
from zjournal.sessions.follow import text_of
from zjournal.sessions.importing import Imported, ImportFile, import_file
from zjournal.sessions.makers import Makers
from zjournal.sessions.prompts import Prompts
from zjournal.sessions.reading import Answers, Models
from zjournal.sessions.records import Records
from zjournal.sessions.transfer import Selection, export

JOURNALS_OWN = ("tenant", "calls", "history", "key", "record", "client", "item_secret")


def lines_of(journal: Journal, session: str = "s_1", turns: slice = slice(None)) -> list[dict[str, Any]]:
    return [json.loads(line) for line in pieces_of(journal, session, turns)]


def pieces_of(journal: Journal, session: str = "s_1", turns: slice = slice(None)) -> list[bytes]:
    found = journal.session(session)
    assert found is not None
    return list(export(journal, Selection.of(journal, found, journal.turns(session)[turns]), DECODERS))


def write(path: Path, journal: Journal, session: str = "s_1", turns: slice = slice(None)) -> str:
    path.write_bytes(b"".join(pieces_of(journal, session, turns)))
    return str(path)


def sealed(lines: list[dict[str, Any]]) -> bytes:
    """Lines with an end that fits them, whatever they say."""
    text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(text).hexdigest()}
    return text + json.dumps(end).encode() + b"\n"


def carried(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an import keeps of an export: without what belongs to one journal, to a device, or to erased turns."""
    erased = {line["body"]["response"] for line in lines if line.get("body", {}).get("t") == "payload_erased.1"}
    kept = []
    for line in lines:
        if line["kind"] == "fact":
            body = line["body"]
            kind = body["t"].split(".")[0]
            if kind in ("cache_admitted", "session_imported", "payload_erased") or body.get("response") in erased:
                continue
            line = {**line, "seq": 0, "body": {name: body[name] for name in body if name not in JOURNALS_OWN}}
        elif line["kind"] in ("session", "end"):
            continue
        kept.append(line)
    return kept


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    with Talk(tmp_path / "a") as talk:
        talk.open("s_1")
        talk.turn("resp_1", "one", "uno")
        talk.turn("resp_2", "two", "dos", previous="resp_1")
        talk.turn("resp_x", "branch", None, previous="resp_1", stored=False)
        yield talk


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "b") as journal:
        yield journal


def test_the_conversation_is_there_under_the_same_ids(talk: Talk, other: Journal, tmp_path: Path) -> None:
    done = import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
    assert done == Imported("s_1", "local", turns=3, known=0, erased=0)
    for name in ("resp_1", "resp_2", "resp_x"):
        there, here = talk.journal.turn(name), other.turn(name)
        assert there is not None and here is not None
        for field in ("session", "parent", "protocol", "model", "stored", "created", "status", "prompt", "cached"):
            assert getattr(here, field) == getattr(there, field), field
        assert Prompts(other).of(here).ids == Prompts(talk.journal).of(there).ids
        vocabulary = Prompts(other).of(here).vocabulary
        assert vocabulary is not None and vocabulary.decode([1, 2]) == b"ab"
    assert verify(tmp_path / "b").fault is None


def test_packed_facts_are_exported_and_imported_as_rows_are(talk: Talk, other: Journal, tmp_path: Path) -> None:
    file = write(tmp_path / "f", talk.journal)
    while talk.journal.seal():
        pass
    assert Path(write(tmp_path / "g", talk.journal)).read_bytes() == Path(file).read_bytes()
    import_file(other, ImportFile(file))
    told = carried(lines_of(other))
    while other.seal():
        pass
    assert carried(lines_of(other)) == told == carried(lines_of(talk.journal))
    assert import_file(other, ImportFile(file)).known == 3, "packed turns are known as well"
    assert import_file(talk.journal, ImportFile(write(tmp_path / "h", other))).known == 3
    assert verify(tmp_path / "a").fault is None
    assert verify(tmp_path / "b").fault is None


def test_the_import_is_told_before_what_it_brought(talk: Talk, other: Journal, tmp_path: Path) -> None:
    file = write(tmp_path / "f", talk.journal)
    import_file(other, ImportFile(file))
    (told,) = [fact for fact in other.read() if isinstance(fact.event, events.SessionImported)]
    assert isinstance(told.event, events.SessionImported)
    assert told.event.source == talk.journal.id
    assert told.event.digest == hashlib.sha256(Path(file).read_bytes()).digest()
    brought = other.read(after=told.seq)
    seqs = [sum(told.event.seqs[: n + 1]) for n in range(len(told.event.seqs))]
    times = [sum(told.event.times[: n + 1]) for n in range(len(told.event.times))]
    assert len(brought) == len(seqs) == len(times)
    for fact, seq, time in zip(brought, seqs, times, strict=True):
        (source,) = talk.journal.read(after=seq - 1, limit=1)
        assert type(source.event) is type(fact.event)
        assert source.time == time
        assert source.payload == fact.payload


def test_the_same_file_twice_changes_nothing(talk: Talk, other: Journal, tmp_path: Path) -> None:
    file = write(tmp_path / "f", talk.journal)
    import_file(other, ImportFile(file))
    before = other.head
    assert import_file(other, ImportFile(file)) == Imported("s_1", "local", turns=0, known=3, erased=0)
    assert import_file(talk.journal, ImportFile(file)).turns == 0, "nor does it where it comes from"
    assert other.head == before


def test_a_longer_export_adds_what_is_new_and_a_session_can_come_home(
    talk: Talk, other: Journal, tmp_path: Path
) -> None:
    import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
    talk.turn("resp_3", "three", "tres", previous="resp_2")
    assert import_file(other, ImportFile(write(tmp_path / "g", talk.journal))).turns == 1
    assert other.turn("resp_3") is not None
    with Journal.open(tmp_path / "c") as third:
        assert import_file(third, ImportFile(write(tmp_path / "h", other))).turns == 4
        assert carried(lines_of(third)) == carried(lines_of(other)) == carried(lines_of(talk.journal))
    assert verify(tmp_path / "b").fault is None


def test_a_resent_history_finds_an_imported_turn(talk: Talk, other: Journal, tmp_path: Path) -> None:
    import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
    said = [("user", "one"), ("assistant", "uno"), ("user", "two"), ("assistant", "dos")]
    resent = [ask.Message(role, (ask.Text(text),)) for role, text in said]  # type: ignore[arg-type]
    digest = identity.history(identity.history_start(other.secret), resent)
    found = other.find_by_history(other.tenant("local").id, [digest])
    assert found is not None and found.response == "resp_2"


def test_tool_results_are_known_by_this_journals_keys(talk: Talk, other: Journal, tmp_path: Path) -> None:
    old, new = ({"type": "function_call_output", "call_id": f"call_{age}", "output": ""} for age in ("old", "new"))
    facts = talk.facts("resp_t", "go", "va", "resp_2", "s_1", True, [old, {"role": "user", "content": "go"}, new])
    first, rendered = facts[0]  # type: ignore[misc]
    key = identity.call_key(talk.journal.secret, talk.tenant, "call_new")
    seen = events.Fact(events.ToolResultSeen(tenant=talk.tenant, response="resp_t", calls=(key,)))
    talk.journal.append([first, seen, rendered, *facts[1:]]).result()  # type: ignore[list-item]
    import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
    (here,) = [fact.event for fact in other.read() if isinstance(fact.event, events.ToolResultSeen)]
    assert here.calls == (identity.call_key(other.secret, other.tenant("local").id, "call_new"),) != (key,)
    lines = lines_of(talk.journal)[:-1]
    for line in lines:
        if line.get("body", {}).get("t") == "tool_result_seen.1":
            line["body"]["calls"] *= 3
    with Journal.open(tmp_path / "c") as third:
        assert "more tool results" in refused(third, tmp_path / "f", sealed(lines))


def test_item_ids_stay(talk: Talk, other: Journal, tmp_path: Path) -> None:
    import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
    turn = other.turn("resp_2")
    assert turn is not None
    (accepted,) = other.read(after=turn.accepted_seq - 1, limit=1)
    assert isinstance(accepted.event, events.RequestAccepted)
    assert accepted.event.item_secret == identity.item_secret(talk.journal.secret, "resp_2")


def test_the_tenant_is_the_one_that_was_named(talk: Talk, other: Journal, tmp_path: Path) -> None:
    file = write(tmp_path / "f", talk.journal)
    import_file(other, ImportFile(file, "alice"))
    alice, turn = other.tenant("alice"), other.turn("resp_1")
    assert turn is not None and turn.tenant == alice.id != "local"
    maker = Makers(other).of(turn)
    assert maker is not None and maker.fingerprint == FINGERPRINT, "its maker is known, though its namespace is local's"
    with pytest.raises(ImportFault, match="taken here"):
        import_file(other, ImportFile(file, "bob"))
    for name in ("server", "a b", ""):
        with pytest.raises(BadRequest):
            import_file(other, ImportFile(file, name))


def test_a_range_brings_what_it_builds_on(talk: Talk, other: Journal, tmp_path: Path) -> None:
    talk.open("s_2")
    talk.turn("resp_o", "other", previous="resp_2", session="s_2")
    talk.turn("resp_p", "more", previous="resp_o", session="s_2")
    done = import_file(other, ImportFile(write(tmp_path / "f", talk.journal, "s_2", slice(1, 2))))
    assert done.turns == 4
    assert {turn.response for turn in other.turns("s_1")} == {"resp_1", "resp_2"}
    assert {turn.response for turn in other.turns("s_2")} == {"resp_o", "resp_p"}


def test_a_running_turn_is_left_out_and_counted(talk: Talk) -> None:
    talk.turn("resp_r", previous="resp_2", ended=False)
    lines = lines_of(talk.journal)
    assert lines[0]["running"] == 1
    assert not any(line.get("body", {}).get("response") == "resp_r" for line in lines)


def test_deleted_and_erased_turns(talk: Talk, other: Journal, tmp_path: Path) -> None:
    assert retention.delete(talk.journal, talk.tenant, "resp_1").result()  # kept for its child
    assert retention.erase(talk.journal, "resp_x", retention.CAUSE_UNSTORED).result()
    lines = lines_of(talk.journal)
    gone = [line for line in lines if line.get("body", {}).get("response") == "resp_x" and "payload" in line]
    assert all(line["payload"] is None for line in gone)
    assert not any("branch" in json.dumps(line) for line in lines), "its content is not in the file"
    done = import_file(other, ImportFile(write(tmp_path / "f", talk.journal)))
    assert (done.turns, done.erased) == (2, 1)
    assert other.turn("resp_x") is None
    hidden = other.turn("resp_1")
    assert hidden is not None and hidden.status == "deleted"
    assert verify(tmp_path / "b").fault is None


def test_what_was_erased_here_does_not_come_back(talk: Talk, other: Journal, tmp_path: Path) -> None:
    file = write(tmp_path / "f", talk.journal)
    import_file(other, ImportFile(file))
    assert retention.delete(other, "local", "resp_2").result()
    with pytest.raises(ImportFault, match="was erased here"):
        import_file(other, ImportFile(file))


def test_another_turn_of_the_same_id_is_refused(talk: Talk, other: Journal, tmp_path: Path) -> None:
    with Talk(tmp_path / "c") as rival:
        rival.open("s_1")
        rival.turn("resp_1", "one", "une")
        with pytest.raises(ImportFault, match="resp_1 is taken here by another turn"):
            import_file(rival.journal, ImportFile(write(tmp_path / "f", talk.journal)))
        assert rival.journal.turn("resp_2") is None, "nothing of the file is here"


# --- bad files ------------------------------------------------------------------------------------------


def refused(other: Journal, path: Path, data: bytes) -> str:
    path.write_bytes(data)
    head = other.head
    with pytest.raises(ImportFault) as caught:
        import_file(other, ImportFile(str(path)))
    assert other.head == head
    assert str(path) in caught.value.message
    return caught.value.message


def test_files_that_are_none(other: Journal, tmp_path: Path) -> None:
    assert "is empty" in refused(other, tmp_path / "f", b"")
    assert "line 1 cannot be read" in refused(other, tmp_path / "f", b"hello\n")
    assert "cut off in line 1" in refused(other, tmp_path / "f", b"hello")
    assert "is of format 2" in refused(other, tmp_path / "f", b'{"kind": "session", "format": 2, "new": {}}\n')
    with pytest.raises(ImportFault, match="cannot be read"):
        import_file(other, ImportFile(str(tmp_path / "absent")))
    os.mkfifo(tmp_path / "pipe")  # nobody will ever write to it
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(ImportFault, match="it is not a file"):
            import_file(other, ImportFile(path))
    with pytest.raises(ImportFault, match="cannot be read"):
        import_file(other, ImportFile("zero\0byte"))
    with pytest.raises(ImportFault, match="cannot be read"):
        import_file(other, ImportFile(str(tmp_path)))


def test_a_file_that_was_cut_off_anywhere(talk: Talk, other: Journal, tmp_path: Path) -> None:
    pieces = pieces_of(talk.journal)
    for count in range(1, len(pieces)):
        assert "cut off" in refused(other, tmp_path / "f", b"".join(pieces[:count]))
    assert "does not fit" in refused(other, tmp_path / "f", b"".join([*pieces[:-2], pieces[-1]]))
    assert "does not fit" in refused(other, tmp_path / "f", b"".join([*pieces, b"x"]))


Change = Callable[[dict[str, Any]], object]


def _fact(kind: str, change: Change) -> Change:
    """A change of the lines of one kind of fact."""
    return lambda line: change(line) if line.get("body", {}).get("t") == f"{kind}.1" else None


LIES: dict[str, Change] = {
    "continues resp_0": _fact("request_accepted", lambda line: line["body"].update(parent="resp_0", previous="")),
    "not its parent": _fact("request_accepted", lambda line: line["body"].update(parent="", previous="resp_1")),
    "protocol": _fact("request_accepted", lambda line: line["body"].update(protocol="telnet")),
    "dialect 'klingon' is unknown": _fact("request_accepted", lambda line: line["body"].update(dialect="klingon")),
    "a content of it is not in": _fact("request_accepted", lambda line: line["body"].update(tools=2)),
    "session is no id": _fact("request_accepted", lambda line: line["body"].update(session="a b")),
    "names no response": _fact("request_accepted", lambda line: line["body"].update(response="")),
    "is never opened": _fact("request_accepted", lambda line: line["body"].update(session="s_9")),
    "secret": _fact("request_accepted", lambda line: line.update(item_secret="YQ==")),
    "content of it is not in the file": _fact("request_accepted", lambda line: line["contents"].pop("raw")),
    "does not stand before it": _fact("request_accepted", lambda line: line["contents"].update(raw="00" * 32)),
    "body does not name": _fact("prompt_rendered", lambda line: line["contents"].update(key=line["contents"]["spans"])),
    "spans do not cover": _fact("prompt_rendered", lambda line: line["body"].update(count=99)),
    "match with the cache": _fact("cache_matched", lambda line: line["body"].update(cached=99)),
    "are not one run": _fact("tokens_sampled", lambda line: line["body"].update(count=2)),
    "tokens are not one run": _fact("tokens_sampled", lambda line: line.update(payload=None)),
    "negative": _fact("response_finished", lambda line: line["body"].update(queue_us=-1)),
    "does not fit its tokens": _fact("response_finished", lambda line: line["body"].update(output=1)),
    "end does not fit": _fact("response_finished", lambda line: line["body"].update(reason="bored")),
    "out of range": _fact("request_accepted", lambda line: line["body"].update(created=1 << 63)),
    "time is out of range": _fact("session_opened", lambda line: line.update(time=-1)),
    "too long": _fact("response_failed", lambda line: line["body"].update(message="x" * 70_000)),
    "has not ended": _fact("response_finished", lambda line: line["body"].update(response="resp_9")),
    "does not match its name": lambda line: line.update(text="x") if "sha256" in line else None,
    "stand before it": lambda line: line.update(vocabulary="00" * 32) if line["kind"] == "engine" else None,
    "journal that it comes from": lambda line: line.update(journal="?") if line["kind"] == "session" else None,
    "cannot be read as one": lambda line: line.update(kind="joke") if line["kind"] == "engine" else None,
}


@pytest.mark.parametrize("said", LIES)
def test_a_file_that_lies(said: str, talk: Talk, other: Journal, tmp_path: Path) -> None:
    lines = lines_of(talk.journal)[:-1]
    for line in lines:
        LIES[said](line)
    assert said in refused(other, tmp_path / "f", sealed(lines))


@pytest.mark.parametrize(("index", "said"), [(0, "without any"), (1, "not one run")])
def test_calls_that_an_answer_cannot_have_made(
    index: int, said: str, talk: Talk, other: Journal, tmp_path: Path
) -> None:
    *facts, end = talk.facts("resp_9", "hi", "yes", "", "s_1", True)
    called = events.ToolCalled(tenant=talk.tenant, response="resp_9", call=b"k" * 16, index=index)
    for fact in (*facts, Fact(called), end):
        talk.journal.append([fact] if isinstance(fact, Fact) else fact).result()
    path = tmp_path / "f"
    write(path, talk.journal)
    assert said in refused(other, path, path.read_bytes())


def test_what_a_file_says_was_begun_cannot_confuse_a_parser(talk: Talk, other: Journal, tmp_path: Path) -> None:
    lines = lines_of(talk.journal)[:-1]
    lie = _fact("request_accepted", lambda line: line["body"].update(begun='<tool_call>{"name": "x", "arguments": '))
    for line in lines:
        lie(line)
    path = tmp_path / "f"
    path.write_bytes(sealed(lines))
    import_file(other, ImportFile(str(path)))
    turn = other.turn("resp_1")
    assert turn is not None
    makers = Makers(other)
    answer = Answers(other, Records(other, makers), Models(makers), DECODERS).of(turn)
    assert answer is not None and text_of(answer.deltas) == "uno"


def test_a_content_that_says_nothing(talk: Talk, other: Journal, tmp_path: Path) -> None:
    """Its name is right, and yet it is no body, no items, no spans or no vocabulary."""
    lines = lines_of(talk.journal)[:-1]
    junk = b"\x81" * 7
    name = hashlib.sha256(junk).hexdigest()
    told = {"kind": "content", "sha256": name, "base64": base64.b64encode(junk).decode()}
    for field in ("raw", "items", "spans", "tokens", "vocabulary"):
        changed = json.loads(json.dumps([lines[0], told, *lines[1:]]))
        renamed = 0
        for line in changed:
            where = line if field in line and line["kind"] == "engine" else line.get("contents", {})
            if field in where:
                where[field] = name
                renamed += 1
        assert renamed, f"no line has {field}"
        refused(other, tmp_path / "f", sealed(changed))


def test_a_file_that_changes_while_it_is_read(
    talk: Talk, other: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write(tmp_path / "f", talk.journal))
    whole = importing._Writing.write

    def spoil(self: importing._Writing, tx: Any) -> None:
        path.write_bytes(path.read_bytes().replace(b'"one', b'"ONE'))
        whole(self, tx)

    monkeypatch.setattr(importing._Writing, "write", spoil)
    with pytest.raises(ImportFault, match="was changed"):
        import_file(other, ImportFile(str(path)))
    assert other.turn("resp_1") is None
    assert verify(tmp_path / "b").fault is None


def test_limits(talk: Talk, other: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"".join(pieces_of(talk.journal))
    for name in ("FACTS_MAX", "FACT_BYTES_MAX", "LINE_BYTES_MAX", "CONTENTS_MAX", "TEXT_CHARS_MAX", "ENGINES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(exported, name, 0)
            refused(other, tmp_path / "f", data)


# --- properties -----------------------------------------------------------------------------------------

# Shrinking a case of many commits takes minutes, and the cases are small.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
letters = st.text("abcxyz", max_size=5)
trees = st.lists(
    st.tuples(
        st.integers(0, 7),  # which turn it continues: one before it, or none
        letters,
        st.one_of(letters, st.none()),
        st.booleans(),  # stored
        st.integers(0, 1),  # session
        st.sampled_from(["", "", "delete", "erase"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=NO_SHRINKING)
@given(tree=trees)
def test_export_import_export_is_the_same(tree: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as folder, Talk(Path(folder) / "a") as talk:
        talk.open("s_0")
        talk.open("s_1")
        good: list[str] = []
        for number, (parent, text, answer, stored, session, _) in enumerate(tree):
            previous = good[parent] if parent < len(good) else ""
            talk.turn(f"resp_{number}", text, answer, previous=previous, session=f"s_{session}", stored=stored)
            if answer is not None:
                good.append(f"resp_{number}")
        for number, (*_, after) in enumerate(tree):
            if after == "delete":
                retention.delete(talk.journal, talk.tenant, f"resp_{number}").result()
            elif after == "erase":
                retention.erase(talk.journal, f"resp_{number}", retention.CAUSE_UNSTORED).result()
        with Journal.open(Path(folder) / "b") as other:
            for session in ("s_0", "s_1"):
                file = write(Path(folder) / session, talk.journal, session)
                import_file(other, ImportFile(file))
                if other.session(session) is not None:
                    # Each import adds behind what was there, so only their order may differ.
                    here, there = (
                        sorted(map(json.dumps, carried(lines_of(j, session)))) for j in (other, talk.journal)
                    )
                    assert here == there
                head = other.head
                assert import_file(other, ImportFile(file)).turns == 0
                assert other.head == head
        assert verify(Path(folder) / "b").fault is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    with Talk(tmp_path_factory.mktemp("whole") / "a") as talk:
        talk.open("s_1")
        talk.turn("resp_1", "one", "uno")
        talk.turn("resp_2", "two", "dos", previous="resp_1")
        return pieces_of(talk.journal)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Journal]]:
    folder = tmp_path_factory.mktemp("target")
    with Journal.open(folder / "b") as journal:
        yield folder, journal


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_only_faults_come_out_of_a_bad_file(
    data: st.DataObject, whole: list[bytes], target: tuple[Path, Journal]
) -> None:
    """Any value in any place of a sealed file, or any bytes in an unsealed one: a Fault, and not a fact more."""
    folder, journal = target
    lines = [json.loads(piece) for piece in whole[:-1]]
    if data.draw(st.booleans()):
        line = lines[data.draw(st.integers(0, len(lines) - 1))]
        place = line["body"] if line["kind"] == "fact" and data.draw(st.booleans()) else line
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(values)
        junk = sealed(lines)
    else:
        raw = bytearray(b"".join(whole))
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        junk = bytes(raw)
    path = folder / "f"
    path.write_bytes(junk)
    head = journal.head
    try:
        import_file(journal, ImportFile(str(path)))
    except Fault:
        assert journal.head == head
    else:
        for turn in [turn for name in ("resp_1", "resp_2") if (turn := journal.turn(name))]:
            Prompts(journal).of(turn)
    assert verify(folder / "b").fault is None


@example(b"\n")
@example(b"{}\n")
@example(b"[" * 100_000 + b"\n")
@given(st.binary(max_size=60))
def test_bytes_of_any_kind(junk: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(junk)
        file.flush()
        with pytest.raises(ImportFault):
            exported.Exported(Path(file.name))
