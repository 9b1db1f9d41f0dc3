"""What test_disk_store.py runs in processes of their own, half of which kill themselves.

python -m tests.stores.apart PATH COUNT SEED      COUNT operations on a folder; an odd SEED then dies in a call
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radixcache.stores.block import Block
from radixcache.stores.disk_store import DiskStore
from tests.stores.made import CALLERS, chain, checkpoint, put_all, resumed

#: Three or four sequences of each of four beginnings.
SEQUENCES = [[first] * 6 + list(range(end)) for first in range(4) for end in (3, 7, 12)]
BUDGET_BYTES = 20_000
#: A process that is to die does so in one of these.
DEADLY = ("write", "fsync", "rename")


class Deadly:
    """Stands for `os`: the process dies before, half way through or after the chosen one of these calls."""

    def __init__(self, call: str, number: int, chance: random.Random) -> None:
        self._call, self._number, self._chance = call, number, chance

    def __getattr__(self, name: str) -> Any:
        return self._last if name == self._call else getattr(os, name)

    def _last(self, *given: Any) -> Any:
        self._number -= 1
        if self._number < 0:
            moment = self._chance.choice(["before", "within", "after"])
            if moment == "within" and self._call == "write":
                os.write(given[0], memoryview(given[1]).cast("B")[: self._chance.randrange(20)])
            elif moment != "before":
                getattr(os, self._call)(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, self._call)(*given)


def _opened(path: Path) -> DiskStore:
    return DiskStore(path, budget_bytes=BUDGET_BYTES, min_free_bytes=0)


def _blocks(chance: random.Random) -> Iterator[Block]:
    for block in chain(chance.choice(SEQUENCES)):
        yield block
        if chance.random() < 0.3:
            yield checkpoint(block)


def main(path: Path, times: int, seed: int) -> None:
    """Use a folder that others use; where `seed` is odd, die in a system call."""
    chance = random.Random(seed)
    store = _opened(path)
    for _ in range(times):
        do = chance.randrange(12)
        if do < 5:
            put_all(store, _blocks(chance))
        elif do < 11:
            tokens = chance.choice(SEQUENCES)
            assert resumed(store, tokens) in range(len(tokens) + 1)
        else:
            store.close()
            store = _opened(path)
        store.check()
        files = [each for each in path.glob("??/*") if each.suffix in (".block", ".checkpoint")]
        # Each of the processes may be a block beyond the budget.
        assert len(files) < 40, len(files)
    if seed % 2:
        call = DEADLY[seed // 2 % len(DEADLY)]
        for module in CALLERS:
            module.os = Deadly(call, chance.randrange(9), chance)  # type: ignore[attr-defined]
        while not store.stats.stopped:
            put_all(store, chain([chance.randrange(1 << 20)] * 4))
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
