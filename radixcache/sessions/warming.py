"""pin and warm: prefixes that stay, and prefixes that are there before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from radixcache.core import Core
from radixcache.paging.resume import floor
from radixcache.sessions.session import Session, both_models
from radixcache.settings import require_one, require_pin
from radixcache.tokens import Keys, TokenIds


def pin(core: Core, keys: Keys, namespace: str, name: str | None, ttl_requests: int | None) -> int:
    """Pin a stored prefix; returns the bytes that all pins keep. The lock is held.

    Raises:
        ValueError: it is not stored whole, or is quarantined, or the pins would not fit.
    """
    require_pin(name, ttl_requests)
    kept = _whole_chunks(core, keys, len(keys))
    if core.settings.exact and core.states.match(kept, namespace).offset < len(kept):
        # A prefill of exactly these tokens stores only the chunks in front of the last of them.
        kept = _whole_chunks(core, keys, len(keys) - 1)
    _require_allowed(core, kept, namespace)
    core.pins.add(kept, namespace, name, ttl_requests, keys)
    core.keep_budget()
    return core.pins.nbytes


def unpin(core: Core, keys: Keys | None, namespace: str, name: str | None) -> None:
    """Take one pin of these keys, or (None) the one of that name, back. The lock is held."""
    require_one(keys, name)
    if keys is not None:
        core.pins.remove(keys, namespace)
    elif name is not None:
        core.pins.remove_named(name, namespace)
    core.keep_budget()


class Warming:
    """A prefix that is to be there, and pinned where it was given a name or a time.

    Raises:
        ValueError: in exact mode the prefix has no whole chunk.
    """

    def __init__(
        self, core: Core, prompt: TokenIds, keys: Keys, namespace: str, name: str | None, ttl_requests: int | None
    ) -> None:
        require_pin(name, ttl_requests)
        self._core = core
        self._prompt, self._keys = prompt, keys
        self._namespace = namespace
        self._name, self._ttl_requests = name, ttl_requests
        self._is_pinned = name is not None or ttl_requests is not None
        self._kept = _whole_chunks(core, keys, len(keys))

    def run(
        self,
        begin: Callable[..., Session],
        model: Any,
        draft_model: Any,
        step_size: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> int:
        """Evaluate what is missing, in a session of its own if anything is; returns the tokens evaluated.

        Raises:
            ValueError: it is quarantined or was found wrong just now, or cannot be kept.
        """
        if self._is_there():
            return 0
        # With any token behind it the prefix is prefilled to its very end.
        asked, keys = (np.append(values, values[-1]) for values in (self._prompt, self._keys))
        with begin(asked, keys) as session:
            self._prefill(session, model, draft_model, step_size, on_progress)
        return len(self._prompt) - session.cached_tokens

    def _is_there(self) -> bool:
        """Whether nothing has to be evaluated; then it is pinned."""
        core = self._core
        with core.lock:
            _require_allowed(core, self._kept, self._namespace)
            if core.is_resumable(self._keys, self._namespace):
                self._pin()
                core.tidy_unpinned()
                return True
            # As far as it is known before anything is evaluated: not the checkpoints, nor a model's first tokens.
            self._require_room(0, requests=1)
        return False

    def _prefill(
        self,
        session: Session,
        model: Any,
        draft_model: Any,
        step_size: int | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        """Evaluate it in a session on more than it, and close that."""
        core, length = self._core, len(self._keys)
        if draft_model is not None:
            model = both_models(model, draft_model, len(session.caches))
        session.prefill(model, step_size, None if on_progress is None else lambda done, _: on_progress(done, length))
        with core.lock:
            _require_allowed(core, self._kept, self._namespace)
            session.drop_checkpoints("tail")  # nothing rewrites the end of this prompt
            self._require_room(session.checkpoint_bytes(len(self._kept)))
            session.close()
            if not core.is_resumable(self._keys, self._namespace):
                stored = core.states.match(self._keys, self._namespace).offset
                raise ValueError(
                    f"{stored} of {length} tokens could be kept: open sessions and pins leave no room under"
                    f" the budget of {core.ledger.budget_bytes} bytes."
                )
            self._pin()
            core.tidy_unpinned()

    def _pin(self) -> None:
        if self._is_pinned:
            self._core.pins.add(self._kept, self._namespace, self._name, self._ttl_requests, self._keys)

    def _require_room(self, checkpoint_bytes: int, requests: int = 0) -> None:
        if self._is_pinned:
            self._core.pins.require_room(self._kept, self._namespace, self._name, checkpoint_bytes, requests)


def _whole_chunks(core: Core, keys: Keys, length: int) -> Keys:
    """The first `length` keys, in exact mode without what lies behind the last whole chunk of them."""
    end = floor(length, core.settings.grid_tokens)
    if end == 0:
        raise ValueError(f"{len(keys)} tokens: no whole chunk of {core.settings.step_size} to keep.")
    return keys[:end]


def _require_allowed(core: Core, keys: Keys, namespace: str) -> None:
    """Raise ValueError where these keys cannot be kept because they are quarantined."""
    start = core.quarantine.limit(keys, namespace)
    if start < len(keys):
        stored = core.states.match(keys, namespace).offset
        raise ValueError(
            f"only {stored} of {len(keys)} tokens are stored; from offset {start} on they are quarantined: what "
            "was stored there was found wrong. clear_quarantine() lets it be stored again."
        )
