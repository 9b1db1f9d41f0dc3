"""What test_disk_store.py runs in processes of their own, which kill themselves at a moment that chance picks.

    python -m tests.stores.apart kills PATH COUNT SEED      prints how many children died, and in which calls
    python -m tests.stores.apart share PATH COUNT SEED      prints how many of its operations it has done

Without MLX or threads of its own, so that it may fork.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from radixcache.stores.block import Block
from radixcache.stores.disk_store import DiskStore
from radixcache.stores.files import verify
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


def kills(path: Path, times: int, chance: random.Random) -> None:
    """Fork a writer that dies, as often as asked, and look at what it left after each."""
    died: Counter[str] = Counter()
    while died.total() < times:
        call, number = chance.choice(DEADLY), chance.randrange(6)
        seed = chance.random()
        if (child := os.fork()) == 0:
            for module in CALLERS:
                module.os = Deadly(call, number, random.Random(seed))  # type: ignore[attr-defined]
            with _opened(path) as store:
                put_all(store, (block for _ in range(9) for block in _blocks(chance)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            died[call] += 1
        else:
            assert os.WEXITSTATUS(status) == 0, status
        with _opened(path) as store:
            assert [found for found in verify(path) if found[1]] == []
            assert not list(path.glob("tmp-*"))
            for tokens in SEQUENCES:
                assert resumed(store, tokens) in range(len(tokens) + 1)
            assert store.stats.stored_bytes <= BUDGET_BYTES
            assert store.stats.damaged_files == 0
            store.check()
        chance = random.Random(chance.random())
    print(*(f"{call}={died[call]}" for call in DEADLY))


def share(path: Path, times: int, chance: random.Random) -> None:
    """Use a folder that others use; die after so many operations where SEED is odd."""
    store = _opened(path)
    for _ in range(times):
        do = chance.randrange(12)
        tokens = chance.choice(SEQUENCES)
        if do < 5:
            put_all(store, _blocks(chance))
        elif do < 11:
            assert resumed(store, tokens) in range(len(tokens) + 1)
        else:
            store.close()
            store = _opened(path)
        store.check()
        files = [each for each in path.glob("??/*") if each.suffix in (".block", ".checkpoint")]
        # Each of the processes may be a block beyond the budget.
        assert len(files) < 40, len(files)
    if chance.random() < 0.5:
        call = chance.choice(DEADLY)
        for module in CALLERS:
            module.os = Deadly(call, chance.randrange(9), chance)  # type: ignore[attr-defined]
        while not store.stats.stopped:
            put_all(store, _blocks(chance))
            put_all(store, chain([chance.randrange(1 << 20)] * 4))
    store.close()


if __name__ == "__main__":
    run: Callable[[Path, int, random.Random], None] = {"kills": kills, "share": share}[sys.argv[1]]
    run(Path(sys.argv[2]), int(sys.argv[3]), random.Random(int(sys.argv[4])))
