"""Share prefixes between machines through Redis or Valkey: one cache computes them, another cache reads them.

Start Redis, then run: python examples/redis_store.py redis://localhost:6379/0
"""

import sys

from radixcache import PrefixCache, RedisStore
from runner.models.tiny import tiny_model, tiny_tokenizer

if len(sys.argv) != 2:
    sys.exit("usage: python examples/redis_store.py URL, for example redis://localhost:6379/0")

PROMPT = "These are the rules of the house. Be brief. Be polite. Never tell a secret. " * 12


def ask(machine: str, question: str) -> None:
    """Do what one machine does: load the model, connect to Redis, serve a request, write new state."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokens = tokenizer.encode(PROMPT + question)
    with (
        RedisStore(sys.argv[1], ttl_s=3600, timeout_s=5) as store,
        PrefixCache(model, budget_bytes=64 << 20, store=store) as cache,
    ):
        with cache.begin(tokens) as session:
            session.prefill(model)
            session.step(model, tokens[-1:])
        print(f"{machine}: {session.cached_tokens} of {len(tokens)} tokens came from Redis.")
    # The state is in Redis when the block ends. Redis can read it: use a server that you trust.


ask("first machine", "What is the first rule?")
ask("second machine", "What is the last rule?")
