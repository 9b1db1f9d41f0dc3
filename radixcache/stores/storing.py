"""Storing: what becomes of a block that is to be written. Only the writing thread runs it.

W1  A block is written only if it is not there, and only behind a block that is: all that is stored can be reached.
W2  Nothing is evicted for a block that is then not written, unless the disk fails.
W3  After an error of the disk nothing is written any more; that is logged once, and `stopped` says why.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any

from radixcache.stores.block import Block, Head
from radixcache.stores.codec import encoded
from radixcache.stores.contents import Contents
from radixcache.stores.daily_writes import DailyWrites
from radixcache.stores.folder import Folder, file_name
from radixcache.stores.keys import root_key
from radixcache.stores.stats import Tally

logger = logging.getLogger(__name__)

#: Why blocks are dropped after an error of the disk.
STOPPED = "writing has stopped"
#: What is wrong with a name and not with the disk: something else has it.
_TAKEN = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY}


class Storing:
    """Writes blocks into a folder, within what budgets allow.

    Attributes:
        stopped: the error after which nothing is written; empty: there was none.
    """

    def __init__(
        self,
        folder: Folder,
        contents: Contents,
        daily: DailyWrites,
        tally: Tally,
        *,
        budget_bytes: int,
        min_free_bytes: int,
        secret: bytes | None,
    ) -> None:
        self._folder, self._contents, self._daily, self._tally = folder, contents, daily, tally
        self._budget_bytes, self._min_free_bytes, self._secret = budget_bytes, min_free_bytes, secret
        self.stopped = ""

    def keep_budget(self) -> None:
        """Evict what a folder has beyond the budget."""
        try:
            self._contents.make_room(0, self._budget_bytes, b"")
        except OSError as error:
            self._stop(error)

    def store(self, block: Block) -> None:
        """Write a block, or count why not."""
        try:
            why_not = STOPPED if self.stopped else self._written_or_why_not(block)
        except OSError as error:
            why_not = "something else has its place" if error.errno in _TAKEN else self._stop(error)
        if why_not:
            self._tally.drop(why_not)

    def _written_or_why_not(self, block: Block) -> str:
        try:
            parts = encoded(block, self._secret)
        except ValueError:
            return "its head is too long"
        return self.place(block.head, parts, sum(memoryview(part).nbytes for part in parts))

    def place(self, head: Head, parts: Sequence[Any], nbytes: int) -> str:
        """Make a file of so many bytes of these parts, if it is to be and there is room; else say why not."""
        contents = self._contents
        contents.refresh()
        if contents.file_bytes(head.key, head.kind):
            return "it is there"
        before = head.parent if head.kind == "block" else head.key
        if before != root_key(head.identity, head.namespace) and not contents.file_bytes(before, "block"):
            return "what comes before it is not stored"
        if self._folder.free_bytes() < self._min_free_bytes + nbytes:
            return "the disk is nearly full"
        self._daily.look()
        if self._daily.left_bytes() < nbytes:
            return "the budget of the day is spent"
        if nbytes > self._budget_bytes:
            return "it is larger than the budget"
        contents.touch([before])
        if not contents.make_room(nbytes, self._budget_bytes, before):
            return "the budget is full of what comes before it"
        self._daily.spend(nbytes)
        self._folder.write(file_name(head.key, head.kind), parts)
        contents.add(head, nbytes)
        self._tally.add(written_files=1, written_bytes=nbytes)
        return ""

    def _stop(self, error: OSError) -> str:
        self.stopped = str(error)
        logger.warning("%s: %s. Nothing more is written; what is stored is used.", self._folder.path, error)
        return STOPPED
