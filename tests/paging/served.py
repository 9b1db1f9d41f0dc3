"""What the tests of paging share: a system prompt, and models with windows of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.prompts import tokens
from tests.walks.spelling import SpellingModel

LLAMA_TOKEN_BYTES = 3 * 2 * 2 * 64 * 4
SYSTEM = tokens(0, 40)
PROMPT = [*SYSTEM, *tokens(1, 30)]


class WindowModel(SpellingModel):
    """Layers made by these functions, the last of them with a window."""

    def __init__(self, *makers: Callable[[], Any]) -> None:
        super().__init__(["layer"] * len(makers))
        self.makers = makers

    def make_cache(self) -> list[Any]:
        return [make() for make in self.makers]
