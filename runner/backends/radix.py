"""The cache this project is about. A Session already is a run, so there is nothing to add but the names."""

from typing import Any

from radixcache import PrefixCache, Session, TreeView
from runner.backends.backend import Prompt
from runner.pipeline import DEFAULT_STEP_SIZE


class RadixPrefixes:
    """A PrefixCache under the byte budget; an exact one where a chunk size is given."""

    def __init__(self, model: Any, *, budget_bytes: int, policy: str, exact_step_size: int | None = None) -> None:
        self._cache = PrefixCache(
            model,
            budget_bytes=budget_bytes,
            policy=policy,
            exact=exact_step_size is not None,
            step_size=exact_step_size or DEFAULT_STEP_SIZE,
        )

    @property
    def live_bytes(self) -> int:
        """Bytes of the live buffers, spare capacity included."""
        return self._cache.stats.live_bytes

    @property
    def paged_bytes(self) -> int:
        """Bytes of the snapshots, checkpoints among them."""
        return self._cache.stats.paged_bytes

    @property
    def evictions(self) -> int:
        """How many times the policy gave something up."""
        return self._cache.stats.evictions

    def begin(self, prompt: Prompt) -> Session:
        """Open a session with room for the reply."""
        return self._cache.begin(prompt.tokens, marks=prompt.marks, reserve=prompt.reply_tokens)

    def dump(self, tokenizer: Any) -> str | None:
        """Return the tree as text, with the beginning of each edge decoded."""
        return self._cache.dump(tokenizer)

    def view(self, tokenizer: Any) -> TreeView | None:
        """Return a description of the tree, with the beginning and the end of each edge decoded."""
        return self._cache.view(tokenizer=tokenizer)

    def close(self) -> None:
        """Let go of the tree and the live buffers."""
        self._cache.clear()
