"""A policy of the user's that fails: the call that met it is done and says so, the tree is sound, LRU takes over."""

from __future__ import annotations

import pickle
import random
import re
from typing import Any

import pytest

from policies import FIFO, LRU, Entry
from radixcache import PolicyError, PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache

HOOKS = ["inserted", "touched", "split", "merged", "evicted", "evictable_changed", "victim"]


class Failing:
    """FIFO until `hook` was called so many times; then that raises."""

    def __init__(self, hook: str, after: int) -> None:
        self._fifo, self._hook, self._left = FIFO(), hook, after
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._fifo, name)

        def hook(*arguments: Any) -> Any:
            assert not self.failed, "a policy that failed is not asked again"
            self._left -= name == self._hook
            if self._left < 0:
                self.failed = True
                raise KeyError("no such\nthing")
            return right(*arguments)

        return hook if name in HOOKS else right


def serve(cache: PrefixCache, draw: random.Random) -> None:
    prompt = [draw.randrange(3) for _ in range(draw.randrange(5, 60))]
    with cache.begin(prompt) as session:
        session.prefill(SizedModel())
        session.step(SizedModel(), prompt[-1:])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("points", [0, 100], ids=["spans", "checkpoints"])
def test_the_call_is_done_and_raises_and_lru_takes_over(hook: str, points: int) -> None:
    failed = 0
    for after in range(3):
        policy, draw = Failing(hook, after), random.Random(1)
        cache = sized_cache(SizedLayout(1, points), budget_bytes=400, policy=policy)
        raised = []
        for _ in range(25):
            try:
                serve(cache, draw)
            except PolicyError as error:
                raised.append(error)
            cache.check()
        assert len(raised) == policy.failed
        failed += policy.failed
        for error in raised:
            assert (error.policy, error.hook) == ("Failing", hook)
            assert str(error).startswith(f"policy Failing: {hook}() raised KeyError('no such\\nthing') (")
            assert str(error).endswith("The cache evicts by LRU from now on.")
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
            assert isinstance(error.__cause__, KeyError)
        assert cache.stats.evictions > 0
    assert failed


@pytest.mark.parametrize("given", ["an entry that may not go", "something else"])
def test_a_victim_that_may_not_go_is_a_failure_too(given: str) -> None:
    class Wrong(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.first: Entry | None = None

        def inserted(self, entry: Entry) -> None:
            super().inserted(entry)
            self.first = self.first or entry

        def victim(self) -> Any:
            return self.first if given == "an entry that may not go" else ["something"]

    cache, draw = sized_cache(SizedLayout(1), budget_bytes=100, policy=Wrong()), random.Random(3)
    raised = []
    for _ in range(20):
        try:
            serve(cache, draw)
        except PolicyError as error:
            raised.append(str(error))
        cache.check()
    (text,) = raised
    assert re.match(r"policy Wrong: victim\(\) gave .*, which must not be evicted", text)
