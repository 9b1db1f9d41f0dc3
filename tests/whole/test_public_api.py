"""The public names: pinned, sorted, all there, and no more."""

from __future__ import annotations

import inspect
import typing

import pytest

import radixcache
from policies import EvictionPolicy

_PUBLIC_NAMES = """
POLICIES CacheBusyError CacheClosedError CacheFullError CacheStats CausalCache Change Chat CostModel DiskStore Entry
Event EventKind EvictionPolicy Explanation Gap Group Hint Ledger Mismatch NamedPin PolicyError PrefixCache
RadixCacheError RadixTree Reason RedisStore RequestTooLargeError Row Session SessionClosedError ShiftError ShortReason
SnapshotError StatsSnapshot StoreError TraceWriter TreeView UnsupportedCacheError find_marks register_adapter
render_chat stream_generate
"""
PUBLIC_NAMES = _PUBLIC_NAMES.split()

_METHODS = """
alone begin begin_many check clear clear_quarantine close drafting dump edges explain fetch flush insert insert_offsets
learn make_room mismatches names pin reclaim render snapshot_stats stats unpin view warm
"""
METHODS = _METHODS.split()


def test_the_public_names_are_these() -> None:
    assert radixcache.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_can_be_imported_and_is_documented(name: str) -> None:
    value = getattr(radixcache, name)
    namespace: dict[str, object] = {}
    exec(f"from radixcache import {name}", namespace)
    assert namespace[name] is value
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value)
        assert value.__name__ == {"ShortReason": "Reason"}.get(name, name)  # its other name


def test_every_public_name_is_listed_by_dir_and_a_wrong_one_is_an_attribute_error() -> None:
    assert set(PUBLIC_NAMES) <= set(dir(radixcache))
    with pytest.raises(AttributeError, match="module 'radixcache' has no attribute 'PrefixCash'"):
        radixcache.PrefixCash  # noqa: B018


def test_every_public_method_says_what_it_does() -> None:
    for owner in (radixcache.PrefixCache, radixcache.Session, radixcache.RadixTree, radixcache.Ledger):
        for name, member in inspect.getmembers(owner):
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{owner.__name__}.{name} has no docstring"


def test_errors_have_one_base_and_are_also_what_python_calls_them() -> None:
    for name in PUBLIC_NAMES:
        if name.endswith("Error"):
            assert issubclass(getattr(radixcache, name), radixcache.RadixCacheError)
    assert issubclass(radixcache.SnapshotError, ValueError)
    assert issubclass(radixcache.UnsupportedCacheError, TypeError)


def test_an_eviction_policy_has_these_hooks_and_no_others() -> None:
    hooks = [name for name, each in vars(EvictionPolicy).items() if inspect.isfunction(each) and name[0] != "_"]
    assert hooks == ["inserted", "touched", "split", "merged", "evicted", "evictable_changed", "victim"]


def test_an_entry_has_the_fields_that_policies_are_written_against() -> None:
    fields = typing.get_type_hints(radixcache.Entry)
    place, worth = "entry_id state start end parent children has_checkpoint", "weight_bytes cost created last_used uses"
    assert set(f"{place} {worth} priority turn kind".split()) <= set(fields)
    assert isinstance(radixcache.Entry.tokens, property)
    assert isinstance(radixcache.Entry.digest, property)


def test_the_arguments_of_the_public_calls_are_those_of_the_documentation() -> None:
    def parameters(function: object) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]

    cache, session = radixcache.PrefixCache, radixcache.Session
    made = parameters(cache)
    assert made[0] == "model"
    options = {"caches", "budget_bytes", "policy", "checkpoint_interval", "live_slots", "kv_bits", "kv_group_size"}
    assert options <= set(made)
    begun = parameters(cache.begin)
    assert begun[:6] == ["tokens", "keys", "namespace", "marks", "reserve", "priority"]
    assert {"model", "step_size", "on_progress"} <= set(parameters(session.prefill))
    assert parameters(session.step) == ["model", "tokens", "drafted"]
    assert parameters(session.extend) == ["tokens"]
    assert parameters(cache.fetch)[:1] == ["tokens"]
    assert parameters(cache.insert)[:2] == ["tokens", "caches"]
    assert parameters(session.rewind) == ["offset", "least"]
    assert parameters(cache.reclaim) == ["target_bytes", "namespace"]
    assert isinstance(cache.stats, property)
    after_the_model = list(inspect.signature(cache).parameters.values())[1:]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in after_the_model)


def test_what_users_may_ask_of_a_cache_is_this() -> None:
    assert [name for name in dir(radixcache.PrefixCache) if not name.startswith("_")] == METHODS
    assert radixcache.PrefixCache.__mro__ == (radixcache.PrefixCache, object)
