"""Long random walks: what a policy keeps is bounded by what is stored, and no hash of a string decides anything.

On the real tree without arrays: several sessions and namespaces, prompts that are stored already,
many checkpoints, weights of 0 bytes, cuts and joins, entries that go without the policy's choice. Ticks are
milliseconds since 1970, a priority may pin for ever, turns are any numbers, each request has its own kind.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sortedcontainers import SortedDict, SortedList

from policies import POLICIES, CostModel, Entry, EvictionPolicy, Marconi, Turn, make_policy
from policies.conversations import FIRST_TURNS
from policies.reuse import _Learnt
from policies.turn import MAX_KINDS, PRIOR
from radixcache.adapters.contract import Checkpoint
from radixcache.layers.layout import Layout
from radixcache.ledger import Ledger
from radixcache.tree.entries import StateNode, Use
from radixcache.tree.state_tree import StateTree

ROOT = Path(__file__).resolve().parents[2]
MOST_NODES = 12
NOW_MS = 1_700_000_000_000
REQUESTS = 500


class Walk:
    """Random requests that never end, on a tree that never holds more than MOST_NODES nodes."""

    def __init__(self, policy: EvictionPolicy, seed: int, asks: bool) -> None:
        account = Ledger(1 << 40).open_account(lambda amount_bytes: 0)
        self.policy = policy
        self.states = StateTree(Layout(list, None, 64), policy, account, CostModel())
        self.tick = NOW_MS
        self._random = random.Random(seed)
        self._asks = asks
        #: Start and end of what went.
        self.gone: list[tuple[int, int]] = []
        #: Sessions that have looked their prompt up and not yet stored what they added.
        self._open: list[tuple[Use, NDArray[np.int64], str]] = []

    def step(self) -> None:
        """A request, and at times the tree is cut or joined somewhere; then room is made."""
        draw = self._random
        self.tick += draw.choice([1, 1, 50, 60_000])
        turn = draw.choice([None, 0, -3, 1, 2, 7, 10**12])
        use = Use(self.tick, draw.choice([0, 0, -5, 10**15]), turn, f"user {self.tick}")
        nodes = list(self.states.tree.nodes())
        if nodes and draw.random() < 0.5:
            node = draw.choice(nodes)
            self.states.touch(node.path(), draw.choice([None, *node.path()]), use)
        else:
            keys = np.array([draw.randrange(3) for _ in range(draw.randrange(1, 20))], dtype=np.int64)
            self._open.append((use, keys, draw.choice(["", "tenant", f"salt {draw.randrange(5)}"])))
            self.states.touch(self._cut(keys, self._open[-1][2]).path(), None, use)
        while len(self._open) > draw.randrange(3):
            self._close(*self._open.pop(draw.randrange(len(self._open))))
        for node in draw.sample(nodes, min(2, len(nodes))):
            if node.payload is not None and draw.random() < 0.3:
                self.states.coalesce(node)
            elif node.payload is not None and node.end - node.start > 1:
                self.states.split(node, draw.randrange(node.start + 1, node.end))
        while self.states.tree.node_count > MOST_NODES:
            self._evict()

    def _cut(self, keys: NDArray[np.int64], namespace: str) -> StateNode:
        """The node at which the longest stored prefix ends, cut there."""
        match = self.states.match(keys, namespace)
        is_inside = 0 < match.offset < match.node.end
        return self.states.split(match.node, match.offset) if is_inside else match.node

    def _close(self, use: Use, keys: NDArray[np.int64], namespace: str) -> None:
        draw = self._random
        node = self._cut(keys, namespace)
        rest = keys[node.end :]
        for piece in rest.reshape(-1, 1) if draw.random() < 0.2 else [rest] if len(rest) else []:
            node = self.states.add_leaf(node, piece, use)
            self.states.set_leaving(node, draw.choice([0, 10]) * len(piece))
            self.states.set_checkpoint(node, Checkpoint(node.end, [], draw.choice([0, 100]), "interval"), use)

    def _evict(self) -> None:
        if self._asks:
            found = self.states.victim()
            assert found is not None
            node, what = found
            self.gone.append((node.start, node.end))
            if what == "checkpoint":
                self.states.set_checkpoint(node, None)
                self.states.coalesce(node)
                return
            if node.end - node.start > 2 and self._random.random() < 0.3:
                self.states.truncate(node, node.end - 1)
                return
        else:
            node = self._random.choice([node for node in self.states.tree.nodes() if node.is_leaf])
        self.states.coalesce_all([self.states.remove(node)])


def kept(thing: object) -> Counter[str]:
    """Lengths of all containers that can be reached from an object, by where they are; equal places are added up."""
    lengths: Counter[str] = Counter()
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", thing)]
    while stack:
        where, each = stack.pop()
        if id(each) in seen or isinstance(each, Entry | _Learnt | str | bytes):
            continue
        seen.add(id(each))
        if isinstance(each, dict | list | set | deque | SortedList | SortedDict):
            lengths[where] += len(each)
        stack += [(f"{where}.{name}"[:200], part) for name, part in _parts(each)]
    return lengths


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, dict):
        yield from (("[]", each) for each in [*thing.keys(), *thing.values()])
    elif isinstance(thing, list | tuple | set | deque | SortedList):
        yield from (("[]", each) for each in thing)
    elif not isinstance(thing, random.Random | type):
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        yield from ((name, getattr(thing, name)) for name in names)


def policy_of(name: str) -> EvictionPolicy:
    # Marconi's window remembers its decisions, so here it is a short one.
    return Marconi(bootstrap=50) if name == "marconi" else make_policy(name)


# What remembers first turns needs a walk of thousands of requests, and is asked.
@pytest.mark.parametrize(
    ("name", "asks"),
    [
        pytest.param(name, asks, id=f"{name}-{'asked' if asks else 'never-asked'}")
        for name in sorted(POLICIES)
        for asks in (True, False)
        if asks or not isinstance(make_policy(name), Turn)
    ],
)
def test_what_a_policy_keeps_is_bounded_by_what_is_stored(name: str, asks: bool) -> None:
    walk = Walk(policy_of(name), seed=1, asks=asks)
    # Beside ghosts Turn remembers first turns and classes: what grows without end shows only behind those.
    remembered = FIRST_TURNS + 3 * MAX_KINDS * len(PRIOR) if isinstance(walk.policy, Turn) else 50
    requests = REQUESTS + remembered
    most_held = 0
    for _ in range(requests):
        walk.step()
        most_held = max(most_held, 2 * walk.states.tree.node_count + walk.states.tree.key_count)  # entries and keys
    walk.states.check()
    # Ghosts stand for no more keys than two capacities.
    most = 3 * most_held + remembered
    assert most < requests
    assert {where: count for where, count in kept(walk.policy).items() if count > most} == {}


def victims() -> str:
    """A digest of what each policy gave up on a walk."""
    walks = [Walk(policy_of(name), seed=2, asks=True) for name in sorted(POLICIES)]
    for walk in walks:
        for _ in range(100):
            walk.step()
        assert len(walk.gone) > 50
    return hashlib.sha256(repr([walk.gone for walk in walks]).encode()).hexdigest()


def test_another_process_under_another_hash_seed_gives_up_the_same() -> None:
    # This process has a seed of its own, drawn when it started.
    program = "from tests.policies.test_policy_walks import victims; print(victims())"
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == victims()
