"""What test_redis.py and test_two_machines.py run in a process of its own: a cache that shares state through a server.

    python -m tests.whole.redis_apart URL always|measured PROMPT...     each prompt a JSON list of tokens

Prints a line of JSON for each prompt: how many of its tokens were cached, what became of asking the store so far, and
the logits behind its last token. `always`: what is stored is read; else where that is measured to be faster.
"""

from __future__ import annotations

import json
import sys

from radixcache import PrefixCache, RedisStore
from radixcache.paging.rates import StoreRates
from runner.models.tiny import tiny_model
from tests.restarts import serve

if __name__ == "__main__":
    url, reads, *prompts = sys.argv[1:]
    if reads == "always":
        StoreRates.is_worth_reading = lambda *_: True  # type: ignore[method-assign]  # a tiny model is faster than any server
    model = tiny_model("llama")
    with RedisStore(url, timeout_s=60) as store, PrefixCache(model, store=store) as cache:
        for prompt in map(json.loads, prompts):
            cached, logits = serve(cache, model, prompt)
            cache.flush()
            decisions = cache.stats.store_decisions
            print(json.dumps({"cached": cached, "decisions": decisions, "logits": logits[0].tolist()}), flush=True)
