"""The block pool: taking, holding, releasing, and that its check finds what is wrong."""

import pytest

from zjournal.engine.cache.blocks import BlockPool, blocks_for


def test_a_block_is_free_again_when_its_last_holder_leaves():
    pool = BlockPool(2)
    block = pool.take()
    pool.hold(block)
    pool.release(block)
    assert pool.free == 1
    pool.check({block: 1})
    pool.release(block)
    assert pool.free == 2
    pool.check({})


def test_bugs_of_the_caller_are_noticed():
    pool = BlockPool(1)
    block = pool.take()
    with pytest.raises(AssertionError):
        pool.take()
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)
    with pytest.raises(AssertionError):
        pool.hold(block)


@pytest.mark.parametrize("expected", [{}, {0: 2}, {1: 1}, {0: 1, 1: 1}])
def test_check_finds_a_leak_and_a_wrong_count(expected):
    pool = BlockPool(2)
    assert pool.take() == 0
    with pytest.raises(AssertionError):
        pool.check(expected)


def test_blocks_for():
    assert [blocks_for(tokens) for tokens in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]
