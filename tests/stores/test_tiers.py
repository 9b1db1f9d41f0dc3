"""Several stores as one: found in order, read from the first that has it, written to all that lack it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixcache import DiskStore
from radixcache.stores.block import Block
from radixcache.stores.block_store import WriteOn
from radixcache.stores.store import Store, Tiers, joined, moments
from tests.stores.made import chain, checkpoint, file_of, matched, opened, put_all, resumed


@pytest.fixture
def disks(tmp_path: Path) -> tuple[DiskStore, DiskStore]:
    return opened(tmp_path / "one"), opened(tmp_path / "other")


def read_files(*stores: DiskStore) -> list[int]:
    return [store.stats.read_files for store in stores]


def test_a_chain_begins_in_one_store_and_goes_on_in_the_other(disks: tuple[DiskStore, DiskStore]) -> None:
    first, second = disks
    put_all(first, chain(range(8)))
    put_all(second, chain(range(14)))
    both: Any = Tiers(disks)
    links = matched(both, range(14))
    assert [(link.end, link.tier) for link in links] == [(4, 0), (8, 0), (12, 1), (14, 1)]
    assert resumed(both, range(14)) == 14
    assert read_files(first, second) == [2, 2]
    assert resumed(both, range(8)) == 8
    assert read_files(first, second) == [4, 2]
    assert resumed(Tiers([second, first]), range(14)) == 14  # type: ignore[arg-type]
    assert read_files(first, second) == [4, 6]


def test_a_store_behind_one_that_has_all_is_not_asked(disks: tuple[DiskStore, DiskStore]) -> None:
    put_all(disks[0], chain(range(8)))
    disks[1].match = None  # type: ignore[assignment,method-assign]
    assert resumed(Tiers(disks), range(8)) == 8  # type: ignore[arg-type]


def test_a_block_is_read_where_its_checkpoint_is(disks: tuple[DiskStore, DiskStore]) -> None:
    first, second = disks
    blocks = chain(range(8))
    put_all(first, blocks)
    put_all(second, [*blocks, checkpoint(blocks[1])])
    links = matched(Tiers(disks), range(8), at_checkpoints=True)  # type: ignore[arg-type]
    assert [(link.tier, link.has_checkpoint) for link in links] == [(0, False), (1, True)]
    wanted: Any = [*((link.key, "block") for link in links), (links[-1].key, "checkpoint")]
    assert [None if each is None else each.head.kind for each in Tiers(disks).read(wanted)] == [
        "block", "block", "checkpoint",
    ]  # fmt: skip
    assert read_files(first, second) == [1, 2]


def test_what_is_damaged_in_one_store_is_read_from_the_other(
    disks: tuple[DiskStore, DiskStore], tmp_path: Path
) -> None:
    blocks = chain(range(8))
    for store in disks:
        put_all(store, blocks)
    file_of(tmp_path / "one", blocks[0]).write_bytes(b"damaged")
    both: Any = Tiers(disks)
    assert [resumed(both, range(8)) for _ in range(2)] == [0, 8]
    both.remove([blocks[1].head.key])
    assert resumed(both, range(8)) == 4
    assert not any(store.holds(blocks[1].head.key) for store in disks)


class Down:
    """A store that takes nothing now."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def accepts(self, _: int) -> bool:
        return False

    def put(self, _: Block) -> bool:
        return False


def test_a_store_that_takes_nothing_keeps_nobody_from_the_others(disks: tuple[DiskStore, DiskStore]) -> None:
    down: Store = Down(disks[1])  # type: ignore[assignment]
    both: Any = Tiers([disks[0], down])
    blocks = chain(range(8))
    assert not both.holds(blocks[0].head.key)
    assert both.accepts(1)
    put_all(both, blocks)
    assert both.holds(blocks[0].head.key)
    assert disks[0].stats.written_files == 2
    assert not Tiers([down]).accepts(1)


def test_stores_with_the_same_name_are_numbered(disks: tuple[DiskStore, DiskStore]) -> None:
    assert Tiers(disks).tiers == ("disk", "disk 2")


def test_stores_are_written_each_at_its_own_moment(tmp_path: Path) -> None:
    written: tuple[WriteOn, ...] = ("close", "eviction", "close")
    stores = [opened(tmp_path / str(number), write_on=moment) for number, moment in enumerate(written)]
    found = moments(joined(stores))
    assert found.keys() == {"close", "eviction"}
    assert found["close"].stores == (stores[0], stores[2])  # type: ignore[attr-defined]
    assert found["eviction"] is stores[1]
    assert joined(stores[0]) is joined(stores[:1]) is stores[0]
    with pytest.raises(ValueError, match="empty list"):
        joined([])
