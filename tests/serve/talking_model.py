"""A tiny random model as a folder in mlx-lm's format that thinks and calls a tool when a request makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.model_folder import write_model
from runner.models.tiny import SPECIAL_TOKENS

END, THINK, THOUGHT, CALL, CALLED, TOOL_F, TOOL_G = 1, 3, 4, 5, 6, 7, 8
NAMES = {
    THINK: "<think>", THOUGHT: "</think>", CALL: "<tool_call>", CALLED: "</tool_call>",
    TOOL_F: '{"name":"f","arguments":{"x":1}}', TOOL_G: '{"name":"g","arguments":{}}',
}  # fmt: skip
#: It makes mlx-lm read what stands between the marks of a tool call as JSON.
HINT = "{# <tool_call> tool_call.name #}"


def write_talking_model(folder: Path, kind: str, names: Mapping[int, str] = NAMES, hint: str = HINT) -> Path:
    """Write the tiny model of a kind, with reserved tokens named as here; returns the folder, made anew."""
    write_model(folder, kind)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text(encoding="utf-8")
        for token, name in names.items():
            text = text.replace(json.dumps(SPECIAL_TOKENS[token]), json.dumps(name))
        file.write_text(text, encoding="utf-8")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8") + hint, encoding="utf-8")
    return folder


def saying(*parts: int | str) -> dict[str, Any]:
    """Fields of a request that make the reply these tokens, each once, each less likely than the one before."""
    from runner.models.tiny import tiny_tokenizer

    encode = tiny_tokenizer().encode
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else encode(part))]
    assert len(tokens) == len(set(tokens)) <= 12, tokens
    bias = {str(token): 5000 - 8 * place for place, token in enumerate(tokens)}
    # Of the prompt the last tokens say "assistant" alone: what the template puts before them is not counted.
    return {"logit_bias": bias, "frequency_penalty": 100, "frequency_context_size": 12, "max_tokens": len(tokens)}
