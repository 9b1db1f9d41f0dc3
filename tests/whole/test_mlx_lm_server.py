"""mlx_lm.server runs on RadixPromptCache, and answers as on its own cache."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.model_folder import write_model
from benchmarks.harness.server_process import mlx_lm_server

ROUNDING = 1e-4
OURS = "import radixcache.mlx_server; mlx_lm.server.LRUPromptCache = radixcache.mlx_server.RadixPromptCache"
SYSTEM = "You answer questions about trains, politely and briefly. " * 3


def asked(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    body = json.dumps({"messages": messages, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        found: dict[str, Any] = json.load(response)
    return found


def conversations(url: str, model: Path) -> list[tuple[int, list[int], list[float]]]:
    """Of two users, three turns each: cached tokens, and the reply's ids and log-probabilities."""
    found = []
    for user in ("Ada", "Bob"):
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"{user} asks for the {turn}. time when the train leaves."})
            # With a seed requests are served one at a time, else in a batch.
            reply = asked(url, messages, model=str(model), seed=1 if turn == 2 else None)
            said = reply["choices"][0]["logprobs"]["content"]
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            found.append((cached, [each["id"] for each in said], [each["logprob"] for each in said]))
            # What a random model says need not come back from a tokenizer as it was: this is the test's own.
            messages.append({"role": "assistant", "content": "At noon."})
    return found


@pytest.mark.slow
def test_mlx_lm_server_answers_on_it_as_on_its_own_and_finds_at_least_as_much(tmp_path: Path) -> None:
    models = [write_model(tmp_path / kind, kind) for kind in ("llama", "gemma3_text", "lfm2")]
    size = ("--prompt-cache-size", "100")
    with (
        mlx_lm_server(models[0], tmp_path / "theirs.log", *size) as theirs,
        mlx_lm_server(models[0], tmp_path / "ours.log", *size, change=OURS) as ours,
    ):
        firsts = []
        for model in (*models, models[0]):
            expected, found = (conversations(server.url, model) for server in (theirs, ours))
            for (their_cached, their_ids, their_logprobs), (cached, ids, logprobs) in zip(expected, found, strict=True):
                assert ids == their_ids
                assert logprobs == pytest.approx(their_logprobs, abs=ROUNDING)
                assert cached >= their_cached
            # The second user begins with the same system prompt.
            assert found[3][0] > len(SYSTEM)
            firsts.append(found[0][0])
        assert "Traceback" not in ours.printed
    # Nothing is found of another model's, and all is when the first one comes again.
    assert firsts[:3] == [0, 0, 0]
    assert firsts[3] > len(SYSTEM)
