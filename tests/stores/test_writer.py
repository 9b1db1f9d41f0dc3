"""The queue of the writing thread is bounded and in order, and outlives what a block raises."""

from __future__ import annotations

import threading

from radixcache.stores.block import Block
from radixcache.stores.block_store import WriteQueue
from tests.stores.made import chain

BLOCKS = chain(range(12))
EACH = BLOCKS[0].nbytes


class Slow:
    """A write that waits until it may, and raises for the block in `bad`."""

    def __init__(self, bad: Block | None = None) -> None:
        self.may_write, self.begun, self.written = threading.Event(), threading.Event(), list[Block]()
        self._bad = bad

    def __call__(self, block: Block) -> None:
        self.begun.set()
        assert self.may_write.wait(60)
        if block is self._bad:
            raise ZeroDivisionError
        self.written.append(block)


def test_blocks_are_written_in_order_also_behind_one_that_raises() -> None:
    slow = Slow(bad=BLOCKS[1])
    writer = WriteQueue(slow, 9 * EACH)
    assert all(map(writer.offer, BLOCKS))
    slow.may_write.set()
    assert writer.flush(60)
    assert slow.written == [BLOCKS[0], BLOCKS[2]]
    assert writer.waiting_bytes == 0
    assert writer.close(60)


def test_a_block_that_waits_is_not_taken_again_and_no_more_wait_than_may() -> None:
    slow = Slow()
    writer = WriteQueue(slow, 2 * EACH)
    assert [writer.offer(block) for block in (BLOCKS[0], BLOCKS[0], BLOCKS[1], BLOCKS[2])] == [True, False, True, False]
    assert writer.waiting_bytes == 2 * EACH
    slow.may_write.set()
    assert writer.close(60)
    assert slow.written == BLOCKS[:2]


def test_a_block_that_is_larger_than_the_queue_is_taken_alone() -> None:
    slow = Slow()
    slow.may_write.set()
    writer = WriteQueue(slow, 1)
    assert writer.offer(BLOCKS[0])
    assert writer.close(60)
    assert slow.written == BLOCKS[:1]
    assert not writer.offer(BLOCKS[1])


def test_closing_in_a_hurry_drops_what_was_not_begun() -> None:
    slow = Slow()
    writer = WriteQueue(slow, 9 * EACH)
    assert all(map(writer.offer, BLOCKS))
    assert slow.begun.wait(60)
    assert not writer.close(0.0)
    assert writer.waiting_bytes == EACH
    slow.may_write.set()
    assert writer.close(60)
    assert slow.written == BLOCKS[:1]
