"""Find out why prompts miss the cache: each prompt begins with the day, so nothing behind the day matches."""

from radixcache import PrefixCache
from runner.models.tiny import tiny_model, tiny_tokenizer

RULES = "You are the assistant of the city library. Answer in one short paragraph."
QUESTION = " When does the reading room close?"

model, tokenizer = tiny_model("llama"), tiny_tokenizer()


def ask(prompts: list[str]) -> None:
    """Serve the prompts, and explain the last one before it is served."""
    cache = PrefixCache(model, budget_bytes=64 << 20, tokenizer=tokenizer)  # the tokenizer lets `explain` show text
    for prompt in prompts:
        tokens = tokenizer.encode(prompt)
        explanation = cache.explain(tokens)
        with cache.begin(tokens) as session:
            session.prefill(model)
            session.step(model, tokens[-1:])
    print(explanation)


print("The day comes first:")
ask([f"It is {day}. {RULES}{QUESTION}" for day in ("Monday", "Tuesday", "Wednesday")])
print("\nThe day comes last:")
ask([f"{RULES}{QUESTION} It is {day}." for day in ("Monday", "Tuesday", "Wednesday")])
