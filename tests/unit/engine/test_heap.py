"""The heap against a sorted list: any order of adding, taking out, and popping."""

from hypothesis import given
from hypothesis import strategies as st

from zjournal.engine.cache.heap import Heap


class Item:
    def __init__(self):
        self.place = -1


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "pop"]), st.integers(0, 30)), max_size=200))
def test_it_gives_the_least_and_lets_any_go(operations):
    heap: Heap[Item] = Heap()
    known: dict[tuple[float, int], Item] = {}
    for number, (operation, value) in enumerate(operations):
        if operation == "add":
            known[float(value), number] = item = Item()
            heap.add((float(value), number), item)
        elif operation == "remove" and known:
            item = known.pop(sorted(known)[value % len(known)])
            heap.remove(item)
            heap.remove(item)  # once more is nothing
            assert item.place == -1
        elif operation == "pop" and known:
            least = min(known)
            assert heap.pop() == (least, known.pop(least))
        heap.check()
        assert len(heap) == len(known)
        assert dict(heap) == known
