"""RoutedPrompts: prompts in digests, before it is known who will answer them. A tokenizer and no weights.

What a replica makes of the same request, it makes by the same code; it makes it anew, and says itself what is wrong
with it. So nothing here refuses a request: what has no digests goes where there is least to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from runner.models.load import ModelError
from runner.routing.digests import chain_digests, root_digest
from runner.routing.routers import Ask
from runner.serve.asked import Asked, ModelNames
from runner.serve.errors import ApiError
from runner.serve.models import Models
from runner.serve.options import ServeOptions
from runner.serve.prompts import prompt_of
from runner.serve.warming import read_warm_file

T = TypeVar("T")

NOTHING = Ask((), 0)


class RoutedPrompts:
    """Works on a thread of its own, one prompt after the other.

    Args:
        secret: what digests are made with.

    Raises:
        ModelError: there is no such model.
        WarmFileError: what is to be warm cannot be.
    """

    def __init__(self, options: ServeOptions, secret: bytes) -> None:
        assert options.model is not None
        self._options, self._secret, self._model = options, secret, options.model
        # Of it only what needs no weights is used, and its files are the replicas'.
        self._models = Models(replace(options, disk=None, redis=None, trace=None, warm=None))
        self._tokenizer = self._models.outlined(options.model)
        for entry in read_warm_file(options.warm) if options.warm else ():
            entry.tokens(self._tokenizer, options)  # before several processes find out that it cannot be warmed
        self._thread = ThreadPoolExecutor(1, "tokens")

    async def ask_of(self, asked: Asked) -> Ask:
        """What the decision goes by."""
        return await self._on_thread(self._ask_of, asked)

    async def count_tokens(self, asked: Asked) -> int:
        """How many tokens a prompt has. ApiError: it cannot be made, or there is no such model."""
        return await self._on_thread(self._count, asked)

    def close(self) -> None:
        """Take nothing in any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, function: Callable[[Asked], T], asked: Asked) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, asked)

    def _ask_of(self, asked: Asked) -> Ask:
        if not self._is_default(asked):
            return NOTHING
        try:
            tokens = prompt_of(asked, self._tokenizer, self._options.chat_template_args).tokens
        except ApiError:
            return NOTHING
        root = root_digest(self._model, asked.namespace, self._secret)
        return Ask(chain_digests(np.asarray(tokens), root), len(tokens))

    def _count(self, asked: Asked) -> int:
        try:
            if not self._is_default(asked):
                return self._models.count_tokens(asked)
        except ModelError as error:
            raise ApiError(404, str(error), param="model") from error
        return len(prompt_of(asked, self._tokenizer, self._options.chat_template_args).tokens)

    def _is_default(self, asked: Asked) -> bool:
        return self._models.key_of(asked.names) == self._models.key_of(ModelNames())
