"""Wear: what is written to a store, by what of it is distinct, on the built-in conversations."""

from __future__ import annotations

from functools import cache

import pytest

from radixcache import render_chat
from radixcache.layers.sizes import SizedLayout, SizedModel
from radixcache.paging.tier import Disk
from radixcache.sized_cache import sized_cache
from radixcache.stores.block import Identity
from radixcache.stores.sized_store import SizedStore
from radixcache.stores.store import WriteOn
from radixcache.tokens import TokenIds
from runner.commands.inputs import scheduled_requests
from runner.models.load import load_model
from runner.script.conversation_reader import builtin_conversations
from runner.script.script import recorded_reply

#: What SmolLM2 takes of a token, in float32.
TOKEN_BYTES = 46_080
#: Of the longest conversations that go on at the same time, four of them.
ROOM_TOKENS = 20_000


@cache
def requests(model: str) -> list[tuple[TokenIds, list[int], TokenIds]]:
    """Prompt, marks and reply of each request, four users at a time."""
    tokenizer = load_model(model).tokenizer
    found = []
    for request in scheduled_requests(builtin_conversations(), users=4, seed=0, max_requests=None):
        prompt, marks = render_chat(tokenizer, request.messages, request.tools)
        found.append((prompt, marks, recorded_reply(tokenizer, request, prompt)))
    return found


@pytest.mark.parametrize(
    ("tokenizer", "write_on", "budget_bytes"),
    [("tiny", "close", 1 << 50), ("tiny", "eviction", ROOM_TOKENS * TOKEN_BYTES),
     pytest.param("demo", "close", ROOM_TOKENS * TOKEN_BYTES, marks=pytest.mark.slow)],
)  # fmt: skip
def test_what_is_written_is_hardly_more_than_what_is_distinct(
    tokenizer: str, write_on: WriteOn, budget_bytes: int
) -> None:
    seconds = [0.0]

    class Timed(SizedModel):
        """Takes a millisecond for each token."""

        def __call__(self, keys: TokenIds, cache: object) -> None:
            super().__call__(keys, cache)
            seconds[0] += keys.shape[-1] / 1000

    store = SizedStore(budget_bytes=1 << 50, write_on=write_on, on_read=lambda _: None)
    disk = Disk(store, Identity(b"made"), clock=lambda: seconds[0])
    sized, model = sized_cache(SizedLayout(TOKEN_BYTES), budget_bytes=budget_bytes, disk=disk), Timed()
    prefixes = set()
    for prompt, marks, reply in requests(tokenizer):
        with sized.begin(prompt, marks=marks, reserve=max(len(reply), 1)) as session:
            session.prefill(model)
            session.step(model, prompt[-1:])
            if len(reply):
                session.step(model, reply)
        so_far = 0
        for token in [*prompt.tolist(), *reply.tolist()]:
            so_far = hash((so_far, token))
            prefixes.add(so_far)
    sized.close()
    written = store.stats.written_bytes / (len(prefixes) * TOKEN_BYTES)
    assert 1 <= written < 1.05
