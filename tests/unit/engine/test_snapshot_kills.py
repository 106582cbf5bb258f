"""kill -9 at each call to the system that a snapshot's life makes: afterwards no fact names a file that is not whole.

A child process does the work and ends itself at the n-th such call, without a last word; what its journal had committed
is in a file. Then a new engine starts on both, serves, and everything it restores is right.
"""

import os
import pickle

import pytest

from tests.unit.engine.tiers import FILE_BYTES, Journal, Tiered, tokens
from zjournal.link import wire

CALLS = ("fsync", "rename", "unlink", "pwritev", "mkdir")
KILLED = 9
CALLS_MAX = 400


class Kept(Journal):
    """A journal that outlives its process."""

    def __init__(self, path):
        super().__init__()
        self.path_ = path

    def commit(self, event):
        stands = super().commit(event)
        part = self.path_.with_suffix(".part")
        part.write_bytes(pickle.dumps((self.chunks, self.ends, self.sessions)))
        os.replace(part, self.path_)
        return stands

    @classmethod
    def load(cls, path):
        journal = cls(path)
        if path.exists():
            journal.chunks, journal.ends, journal.sessions = pickle.loads(path.read_bytes())
        return journal


class Bounded(Tiered):
    """Looks at the folder after each step: what is left over and put aside counts as well."""

    def step(self):
        worked = super().step()
        assert self.file_bytes() <= self.options["limit"]
        return worked


def life(folder, journal):
    """Turns, branches, an eviction from disk, an erased turn: everything that writes and unlinks."""
    engine = Bounded(folder, journal=journal, blocks=512, limit=7 * FILE_BYTES)
    engine.serve("a", tokens(520, 1), session="s")
    engine.serve("b", [*tokens(520, 1), 10, 11, 12, 13, *tokens(30, 2)], session="s")
    for number in range(3):
        engine.serve(f"c{number}", tokens(520, 10 + number))
    return engine


def die_at(number, folder, path):
    """Lives in a child until the `number`-th call; its exit status."""
    pid = os.fork()
    if pid == 0:
        left = [number]

        def count(call):
            def counted(*arguments, **options):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)
                return call(*arguments, **options)

            return counted

        try:
            for name in CALLS:
                setattr(os, name, count(getattr(os, name)))
            life(folder, Kept.load(path))
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("part", range(3))
def test_a_kill_at_any_call(tmp_path, part):
    for number in range(2 * part, CALLS_MAX, 5):  # odd and even calls by turns
        folder, path = tmp_path / f"s{number}", tmp_path / f"journal{number}"
        status = die_at(number, folder, path)
        if status == 0:
            assert number > 50, "nothing was done"
            return
        assert status == KILLED, "the child failed by itself"
        again = Bounded(folder, journal=Kept.load(path), blocks=512, limit=7 * FILE_BYTES)
        assert again.journal.chunks.keys() <= again.files().keys(), "a fact names a file that is not there"
        for request, prompt in (("x", tokens(520, 1)), ("y", tokens(520, 11))):
            again.serve(request, [*prompt, 7])
        assert not again.told(wire.Quarantined)
        assert len(again.told(wire.Finished)) == 2
    raise AssertionError("it did not come to its end")
