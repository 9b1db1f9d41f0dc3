"""What test_redis.py runs in a process of its own: a cache that shares state through a server.

    python -m tests.whole.redis_apart URL PROMPT...     each prompt a JSON list of tokens

Prints a line of JSON for each prompt: how many of its tokens were cached, and the logits behind its last token.
"""

from __future__ import annotations

import json
import sys

from radixcache import PrefixCache, RedisStore
from radixcache.paging.rates import StoreRates
from runner.models.tiny import tiny_model
from tests.restarts import serve

if __name__ == "__main__":
    url, *prompts = sys.argv[1:]
    StoreRates.is_worth_reading = lambda *_: True  # type: ignore[method-assign]  # a tiny model is faster than any server
    model = tiny_model("llama")
    with RedisStore(url, timeout_s=60) as store, PrefixCache(model, store=store) as cache:
        for prompt in map(json.loads, prompts):
            cached, logits = serve(cache, model, prompt)
            cache.flush()
            print(json.dumps({"cached": cached, "logits": logits[0].tolist()}), flush=True)
