"""Slow and obvious: a set of blocks, one list for each queue, every block handled by itself.

What the queue policies must do on a tree, written down with nothing but lists. A block is its whole prefix. Keys that
one request added stand in a queue with the deepest first, the end that goes.
"""

from __future__ import annotations

from collections.abc import Sequence

Block = tuple[int, ...]


class BlockWorld:
    """Blocks under a capacity; room is made before a request's blocks are added, and what matched is held."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.blocks: set[Block] = set()
        self.held: set[Block] = set()
        self.gone: list[Block] = []
        self.learnt_capacity = 0

    def request(self, keys: Sequence[int]) -> int:
        path = [tuple(keys[:length]) for length in range(1, len(keys) + 1)]
        used = [block for block in path if block in self.blocks]
        new = path[len(used) : self.capacity_blocks]
        self.use(used)
        self.held = set(used)
        is_first = True
        while len(self.blocks) + len(new) > self.capacity_blocks:
            if is_first:
                self.learnt_capacity = len(self.blocks)
                is_first = False
            block = self.evict()
            self.gone.append(block)
            self.blocks.remove(block)
        self.blocks.update(new)
        self.add(new)
        return len(used)

    def is_free(self, block: Block) -> bool:
        has_child = any(other[:-1] == block for other in self.blocks)
        return block not in self.held and not has_child

    def use(self, blocks: list[Block]) -> None:
        raise NotImplementedError

    def add(self, blocks: list[Block]) -> None:
        raise NotImplementedError

    def evict(self) -> Block:
        raise NotImplementedError


class SieveWorld(BlockWorld):
    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.queue: list[Block] = []
        self.visited: set[Block] = set()
        self.hand: Block | None = None

    def use(self, blocks: list[Block]) -> None:
        self.visited.update(blocks)

    def add(self, blocks: list[Block]) -> None:
        self.queue += reversed(blocks)

    def evict(self) -> Block:
        index = 0 if self.hand is None else self.queue.index(self.hand)
        while True:
            block = self.queue[index]
            if self.is_free(block):
                if block not in self.visited:
                    self.hand = self.queue[index + 1] if index + 1 < len(self.queue) else None
                    self.queue.remove(block)
                    return block
                self.visited.discard(block)
            index = (index + 1) % len(self.queue)


class S3FIFOWorld(BlockWorld):
    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.arrived: list[Block] = []
        self.small: list[Block] = []
        self.main: list[Block] = []
        self.ghosts: list[Block] = []
        self.uses: dict[Block, int] = {}
        self.is_warm = False

    def use(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.uses[block] = min(3, self.uses[block] + 1)

    def add(self, blocks: list[Block]) -> None:
        self.arrived += blocks
        known = [block for block in blocks if block in self.ghosts]
        self.small += [block for block in reversed(blocks) if block not in known]
        self.main += reversed(known)
        self.ghosts = [block for block in self.ghosts if block not in known]
        self.uses.update(dict.fromkeys(blocks, 0))

    def evict(self) -> Block:
        small_blocks = self.learnt_capacity // 10
        if not self.is_warm:
            self.is_warm = True
            stay = set(self.arrived[:small_blocks])
            self.main = [block for block in self.small if block not in stay]
            self.small = [block for block in self.small if block in stay]
        main_is_free = any(self.is_free(block) for block in self.main)
        if len(self.small) >= small_blocks or not main_is_free:
            for block in [block for block in self.small if self.is_free(block)]:
                self.small.remove(block)
                if self.uses[block] < 2:
                    self.ghosts.append(block)
                    del self.ghosts[: max(0, len(self.ghosts) - self.learnt_capacity * 9 // 10)]
                    return block
                self.uses[block] = 0
                self.main.append(block)
        while True:
            block = next(block for block in self.main if self.is_free(block))
            self.main.remove(block)
            if self.uses[block] == 0:
                return block
            self.uses[block] -= 1
            self.main.append(block)


class ARCWorld(BlockWorld):
    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.target = 0.0
        self.once: list[Block] = []
        self.again: list[Block] = []
        self.once_ghosts: list[Block] = []
        self.again_ghosts: list[Block] = []

    def use(self, blocks: list[Block]) -> None:
        self._trim()
        self.once = [block for block in self.once if block not in blocks]
        self.again = [block for block in self.again if block not in blocks] + list(reversed(blocks))

    def add(self, blocks: list[Block]) -> None:
        known = [block for block in blocks if block in self.once_ghosts or block in self.again_ghosts]
        for block in known:
            once, again = len(self.once_ghosts), len(self.again_ghosts)
            if block in self.once_ghosts:
                self.target = min(self.target + max(1.0, again / once), self.learnt_capacity)
                self.once_ghosts.remove(block)
            else:
                self.target = max(self.target - max(1.0, once / again), 0.0)
                self.again_ghosts.remove(block)
        self.once += [block for block in reversed(blocks) if block not in known]
        self.again += reversed(known)

    def evict(self) -> Block:
        once = [block for block in self.once if self.is_free(block)]
        again = [block for block in self.again if self.is_free(block)]
        from_once = not again or (bool(once) and len(self.once) >= 1 and len(self.once) > self.target)
        block = (once if from_once else again)[0]
        (self.once if from_once else self.again).remove(block)
        (self.once_ghosts if from_once else self.again_ghosts).append(block)
        self._trim()
        return block

    def _trim(self) -> None:
        capacity = self.learnt_capacity
        if capacity:
            del self.once_ghosts[: max(0, len(self.once) + len(self.once_ghosts) - capacity)]
            total = len(self.once) + len(self.again) + len(self.once_ghosts) + len(self.again_ghosts)
            del self.again_ghosts[: max(0, total - 2 * capacity)]
