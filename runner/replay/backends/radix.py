"""The cache this project is about. A Session already is a run, so there is nothing to add but the names."""

from typing import Any

from radixcache import DiskStore, PrefixCache, Session
from runner.replies.pipeline import DEFAULT_STEP_SIZE
from runner.script.script import Prompt


class RadixPrefixes:
    """A PrefixCache under the byte budget; an exact one where a chunk size is given.

    StoreError: the folder of the store cannot be used.
    """

    def __init__(
        self,
        model: Any,
        *,
        budget_bytes: int,
        policy: str,
        exact_step_size: int | None = None,
        disk: str | None = None,
        disk_bytes: int = 0,
    ) -> None:
        self._store = None if disk is None else DiskStore(disk, budget_bytes=disk_bytes, write_on="close")
        self.shown = PrefixCache(
            model,
            budget_bytes=budget_bytes,
            policy=policy,
            exact=exact_step_size is not None,
            step_size=exact_step_size or DEFAULT_STEP_SIZE,
            store=self._store,
        )

    @property
    def live_bytes(self) -> int:
        """Bytes of the live buffers, spare capacity included."""
        return self.shown.stats.live_bytes

    @property
    def paged_bytes(self) -> int:
        """Bytes of the snapshots, checkpoints among them."""
        return self.shown.stats.paged_bytes

    @property
    def evictions(self) -> int:
        """How many times the policy gave something up."""
        return self.shown.stats.evictions

    def begin(self, prompt: Prompt) -> Session:
        """Open a session with room for the reply."""
        return self.shown.begin(prompt.tokens, marks=prompt.marks, reserve=prompt.reply_tokens)

    def close(self) -> None:
        """Let go of the tree and the live buffers, once what is to be stored is written."""
        self.shown.close()
        if self._store is not None:
            self._store.close()
