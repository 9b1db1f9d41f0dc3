"""The real demo model answers a question and says what it is. Skipped only where it cannot be fetched."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from runner.models.load import LoadedModel

REPLY_TOKENS = 12


def test_the_demo_model_knows_the_capital_of_france(demo: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = demo.tokenizer.apply_chat_template(question, add_generation_prompt=True)
    caches = make_prompt_cache(demo.model)
    reply: list[int] = []
    while len(reply) < REPLY_TOKENS and not demo.tokenizer.eos_token_ids & set(reply):
        logits = demo.model(mx.array([reply[-1:] or tokens]), cache=caches)
        reply.append(int(np.argmax(np.array(logits[0, -1]))))
    assert "Paris" in demo.tokenizer.decode(reply)
    assert demo.tokenizer.eos_token_ids & set(reply)


def test_the_demo_model_says_its_context_vocabulary_and_weights(demo: LoadedModel) -> None:
    assert (demo.context_length, demo.vocabulary_length) == (8192, 49152)
    parameters: dict[str, mx.array] = dict(tree_flatten(demo.model.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    assert demo.weight_bytes == 4 * sum(value.size for value in parameters.values()) == 4 * 134_515_008


def test_the_demo_tokenizer_splits_digits_and_keeps_control_tokens_whole(demo: LoadedModel) -> None:
    ids = demo.tokenizer.encode("In 2024<|im_end|> naïve")
    assert demo.tokenizer.decode(ids) == "In 2024<|im_end|> naïve"
    spelled = [demo.tokenizer.decode([index]) for index in ids]
    assert spelled[:7] == ["In", " ", "2", "0", "2", "4", "<|im_end|>"]
