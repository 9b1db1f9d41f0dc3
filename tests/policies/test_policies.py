"""The order of LRU and FIFO, entries and their digests, the registry, the cost model."""

from __future__ import annotations

import re
import sys
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from policies import LRU, OFFLINE_POLICIES, POLICIES, CostModel, Entry, OrderedPolicy, make_policy
from radixcache import PolicyError, PrefixCache
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.sized_cache import sized_cache
from tests.policies.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]

# LRU and FIFO


def _eviction_order(traffic: Traffic) -> list[tuple[int, ...]]:
    """Prefixes in the order they go, whole leaves at a time."""
    order = []
    while (found := traffic.states.victim()) is not None:
        node, what = found
        assert what == "span"
        order.append(tuple(node.prefix().tolist()))
        traffic.states.remove(node)
    return order


def test_lru_is_refreshed_by_a_hit_and_fifo_is_not() -> None:
    for name, order in (("lru", [(2,), (3,), (1,)]), ("fifo", [(1,), (2,), (3,)])):
        traffic = Traffic(make_policy(name))
        for key in (1, 2, 3, 1):
            traffic.request([key])
        assert _eviction_order(traffic) == order, name


def test_a_path_that_one_request_made_or_used_goes_from_its_leaf_upwards() -> None:
    for name in ("lru", "fifo"):
        traffic = Traffic(make_policy(name))
        leaf = traffic.request([1, 2, 3, 4, 5, 6])
        traffic.states.split(traffic.states.split(leaf, 4), 2)
        assert _eviction_order(traffic) == [(1, 2, 3, 4, 5, 6), (1, 2, 3, 4), (1, 2)], name


# Entries


def test_a_digest_is_that_of_the_whole_prefix_before_and_after_any_restructuring() -> None:
    traffic = Traffic(make_policy("lru"))
    leaf = traffic.request([1, 2, 3, 4, 5, 6])
    other = traffic.request([1, 2, 3, 4, 5, 6], namespace="tenant")
    shorter = traffic.request([1, 2, 3, 4], namespace="short")
    entry = leaf.payload.entry
    whole = entry.digest
    assert len(whole) == 16
    assert other.payload.entry.digest != whole
    upper = traffic.states.split(leaf, 4)
    part = upper.payload.entry.digest
    assert part not in (whole, shorter.payload.entry.digest)
    assert entry.digest == whole
    gone = upper.payload.entry
    traffic.states.coalesce(upper)
    assert (entry.digest, gone.digest) == (whole, part)
    traffic.states.remove(leaf)
    again = traffic.request([1, 2, 3, 4])
    assert again.payload.entry.digest == part
    assert traffic.request([1, 2, 3, 4, 5, 6]).payload.entry.digest == whole


def test_a_policy_can_read_the_digest_of_an_entry_while_it_is_told_that_it_goes() -> None:
    traffic = Traffic(make_policy("slru"))
    leaf = traffic.request([1, 2, 3, 4], checkpoint=True)
    digests = {entry.entry_id: entry.digest for entry in traffic.witness.known.values()}
    assert len(set(digests.values())) == 1
    traffic.states.remove(leaf)
    assert traffic.witness.left == digests
    leaf = traffic.request([1, 2, 3, 4])
    number, whole = leaf.payload.entry.entry_id, leaf.payload.entry.digest
    traffic.states.truncate(leaf, 2)
    assert traffic.witness.left[number + 1] == whole, "what is cut off ends where the whole did"
    assert leaf.payload.entry.digest == traffic.request([1, 2]).payload.entry.digest != whole


def test_a_policy_that_gives_up_what_may_not_go_is_named() -> None:
    class Stubborn(LRU):
        held: Entry | None = None

        def inserted(self, entry: Entry) -> None:
            super().inserted(entry)
            self.held = self.held or entry

        def victim(self) -> Entry | None:
            return self.held

    cache = sized_cache(SizedLayout(1), budget_bytes=4, policy=Stubborn())

    def serve(prompt: list[int]) -> None:
        with cache.begin(prompt, reserve=0) as session:
            session.prefill(SizedModel())

    serve([1, 2, 3])
    with pytest.raises(PolicyError, match=r"policy Stubborn: victim\(\) gave Entry\(entry_id=1.*must not be evicted"):
        serve([9, 8, 7, 6, 5, 4])


# The registry and the cost model


def test_policies_are_made_anew_by_name_or_by_module_and_class() -> None:
    for name in [*POLICIES, "policies.static:LRU"]:
        assert make_policy(name) is not make_policy(name)
    own = make_policy("policies.static:LRU")
    assert type(own) is LRU
    assert make_policy(own) is own
    assert list(POLICIES) == sorted(POLICIES)
    assert list(OFFLINE_POLICIES) == ["belady", "belady-bypass"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("lru2", r"is not known\. Known: .*fifo.*lru.*"),
        ("LRU", r"is not known\. Known: .*fifo.*lru.*"),
        ("policies.static:", "is not of the form my.module:Class"),
        (":LRU", "is not of the form my.module:Class"),
        ("a b:LRU", "is not of the form my.module:Class"),
        ("policies.static:LRU()", "is not of the form my.module:Class"),
        ("no.such.module:LRU", "cannot be made: ModuleNotFoundError: No module named 'no'"),
        ("policies.static:Lru", "cannot be made: AttributeError: module 'policies.static' has no attribute 'Lru'"),
        ("policies.belady:Belady", "cannot be made: TypeError: .*next_use.*"),
        (
            "policies.cost:CostModel",
            "does not follow the EvictionPolicy protocol: it has no inserted, touched, split, .*victim",
        ),
        ("math:pi", "cannot be made: TypeError: 'float' object is not callable"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_on_one_line(wrong: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^policy '.*' {reason}\.?$") as refused:
        make_policy(wrong)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("wrong", [None, 7, object(), POLICIES["lru"]])
def test_what_is_no_policy_object_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="wanted a name in POLICIES or an EvictionPolicy object"):
        make_policy(wrong)


class Unfinished(OrderedPolicy):
    """Has no key."""


class Forgetful:
    """Has some of the hooks."""

    victim = None

    def inserted(self, entry: Entry) -> None: ...
    def touched(self, entry: Entry) -> None: ...
    def split(self, upper: Entry, lower: Entry) -> None: ...
    def merged(self, gone: Entry, into: Entry) -> None: ...


@pytest.mark.parametrize(("wrong", "lacks"), [(Unfinished, "key"), (Forgetful, "evicted, evictable_changed, victim")])
def test_a_policy_that_lacks_a_method_is_refused_before_the_first_request(wrong: Any, lacks: str) -> None:
    for policy in (wrong(), f"{wrong.__module__}:{wrong.__name__}"):
        with pytest.raises(
            ValueError, match=rf"^policy .* does not follow the EvictionPolicy protocol: it has no {lacks}\.$"
        ):
            make_policy(policy)
        with pytest.raises(ValueError, match=f"no {lacks}"):
            PrefixCache(caches=list, policy=policy)


def test_the_policy_of_the_docs_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    (block,) = re.findall(r"```python\n(from policies import .*?)```", page, re.DOTALL)
    (name,) = re.findall(r"--policy (my_policies:\w+)", page)
    (tmp_path / "my_policies.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    # As for an installed program: Python does not search the working directory by itself.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    traffic = Traffic(make_policy(name))
    for _ in range(300):
        traffic.step()
        traffic.witness.victim()
    assert type(traffic.witness.policy).__name__ == name.partition(":")[2]
    del sys.modules["my_policies"]


def test_the_cost_of_a_span_is_the_sum_of_its_parts() -> None:
    cost = CostModel(per_token=3.0, per_pair=0.5)
    assert cost.cost(0, 10) == 3.0 * 10 + 0.5 * 50
    assert cost.cost(0, 4) + cost.cost(4, 10) == cost.cost(0, 10)
    assert cost.cost(7, 7) == 0
    assert cost.cost(90, 100) > cost.cost(0, 10)
    assert CostModel().cost(5, 12) == 7
    dense = CostModel.analytic(parameters=1000, layers=3, hidden_size=8)
    assert (dense.per_token, dense.per_pair, dense.unit) == (2000.0, 96.0, "flops")


@pytest.mark.parametrize("wrong", [{"per_token": -1.0}, {"per_pair": -0.1}, {"per_token": inf}, {"per_pair": nan}])
def test_a_cost_that_is_negative_or_no_number_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="wanted 0 or more"):
        CostModel(**wrong)  # type: ignore[arg-type]


# Structure of a policy with a static key


def test_a_policy_may_have_a_method_named_cut() -> None:
    class Mine(OrderedPolicy):
        def key(self, entry: Entry) -> tuple[float, ...]:
            return (self.cut(entry.last_used, 2),)

        def cut(self, value: int, by: int) -> float:  # type: ignore[override]
            return value / by

    assert Mine().cut(4, 2) == 2


def test_a_hook_computes_a_bounded_number_of_keys_however_many_entries_there_are() -> None:
    computed = []

    class Counting(OrderedPolicy):
        def key(self, entry: Entry) -> tuple[float, ...]:
            computed.append(entry.entry_id)
            return (entry.last_used,)

    for entries in (10, 3000):
        policy = Counting()
        for number in range(1, entries + 1):
            policy.inserted(_entry(number, last_used=number))
            policy.evictable_changed(_entry(number, last_used=number), True)
        computed.clear()
        upper, lower = _entry(entries + 1), _entry(1)
        policy.touched(_entry(2, last_used=entries))
        policy.split(upper, lower)
        policy.merged(upper, lower)
        policy.evicted(_entry(3))
        assert policy.victim() is not None
        assert len(computed) == 4


def _entry(number: int, *, end: int = 10, last_used: int = 1) -> Entry:
    return Entry(number, "span", 0, end, weight_bytes=1, cost=1.0, created=1, last_used=last_used)
