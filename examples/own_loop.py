"""Decode in your own loop: the second turn of a conversation reuses the state of the first turn."""

import mlx.core as mx

from radixcache import PrefixCache, render_chat
from runner.models.tiny import tiny_model, tiny_tokenizer

# Random weights, so the replies are noise. For a real model: model, tokenizer = mlx_lm.load("OWNER/NAME")
model, tokenizer = tiny_model("llama"), tiny_tokenizer()
cache = PrefixCache(model, budget_bytes=64 << 20)

messages = [{"role": "system", "content": "You answer questions about rivers, briefly and politely."}]
for question in ("Which river runs through Rome?", "And which one runs through Paris?"):
    messages.append({"role": "user", "content": question})
    tokens, marks = render_chat(tokenizer, messages)
    with cache.begin(tokens, marks=marks) as session:
        session.prefill(model)  # what the cache lacks of the prompt, except for the last token
        token, reply = tokens[-1], []
        for _ in range(12):
            logits = session.step(model, [token])
            token = int(mx.argmax(logits[0, -1]))
            reply.append(token)
    # The prompt and the reply are stored when the block ends.
    print(f"{question} {session.cached_tokens} of {len(tokens)} prompt tokens came from the cache.")
    messages.append({"role": "assistant", "content": tokenizer.decode(reply)})

print(cache.dump(tokenizer))
