"""Decode the replies to many requests together: the system prompt that they share is computed and stored once."""

from radixcache import PrefixCache, render_chat
from runner.models.tiny import tiny_model, tiny_tokenizer
from runner.parallel import ParallelGenerator

SYSTEM = "You are the assistant of the city library. Answer in one short paragraph. " * 4
QUESTIONS = ("Is the library open?", "How much is a card?", "Where can I park?", "Can I bring my dog?")

# Random weights, so the replies are noise. For a real model: model, tokenizer = mlx_lm.load("OWNER/NAME")
model, tokenizer = tiny_model("llama"), tiny_tokenizer()
cache = PrefixCache(model, budget_bytes=64 << 20)

prompt_tokens = cached_tokens = 0
with ParallelGenerator(cache, model, tokenizer, capacity=4096) as generator:  # 4,096 tokens of all requests together
    asked = {}
    for question in QUESTIONS:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt, marks = render_chat(tokenizer, messages)
        asked[generator.submit(prompt, marks=marks, max_tokens=8).number] = question
    for ticket, piece in generator:  # the text of all replies, token by token
        done = piece.completion
        if done is not None:
            prompt_tokens += done.prompt_tokens
            cached_tokens += done.cached_tokens
            print(f"{asked[ticket.number]} {done.completion_tokens} tokens; {done.cached_tokens} from the cache.")

print(f"{cached_tokens} of {prompt_tokens} prompt tokens were computed by an earlier request.")
