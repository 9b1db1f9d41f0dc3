"""Use RadixPromptCache in place of mlx-lm's LRUPromptCache in a server: it stores a shared prefix once.

In mlx_lm.server itself, these two lines are enough:
    import mlx_lm.server, radixcache.mlx_server
    mlx_lm.server.LRUPromptCache = radixcache.mlx_server.RadixPromptCache
"""

from typing import Any

from mlx_lm import stream_generate
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from radixcache.mlx_server import RadixPromptCache
from runner.models.tiny import tiny_model, tiny_tokenizer

SYSTEM = "You are the assistant of the city library. Answer in one short paragraph. " * 4
USERS = ("Ann asks: is it open?", "Ben asks: how much is a card?", "Eve asks: where can I park?")

model, tokenizer = tiny_model("llama"), tiny_tokenizer()


def reply(cache: Any, prompt: str) -> int:
    """Serve one request as mlx_lm.server does, and return how many prompt tokens came from the cache."""
    tokens = tokenizer.encode(prompt)
    layers, rest = cache.fetch_nearest_cache("tiny", tokens)
    if layers is None:
        layers = make_prompt_cache(model)
    said = [step.token for step in stream_generate(model, tokenizer, rest, max_tokens=4, prompt_cache=layers)]
    cache.insert_cache("tiny", [*tokens, *said], layers)
    return len(tokens) - len(rest)


for prompt_cache in (LRUPromptCache(), RadixPromptCache()):
    found = [reply(prompt_cache, SYSTEM + question) for question in USERS]
    name = type(prompt_cache).__name__
    print(f"{name}: {found} prompt tokens came from the cache, which holds {prompt_cache.nbytes:,} bytes.")
