"""No cache: every request prefills its whole prompt. The yardstick, for time and for answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from runner.replay.backends.plain_run import PlainRun, layers_bytes
from runner.script.script import Prompt


class NoCache:
    """Fresh caches for each request, dropped at its end."""

    shown = None
    evictions = 0
    paged_bytes = 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: list[Any] = []

    @property
    def live_bytes(self) -> int:
        """Bytes of the running request's caches."""
        return layers_bytes(self._caches)

    @contextmanager
    def begin(self, prompt: Prompt) -> Iterator[PlainRun]:
        """Begin at offset 0."""
        self._caches = make_prompt_cache(self._model)
        try:
            yield PlainRun(prompt.tokens, self._caches)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the running request's caches."""
        self._caches = []
