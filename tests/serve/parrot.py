"""Servers whose random model says what a prompt asks for, so that real clients call real tools.

    python -m tests.serve.parrot FOLDER PORT     a server for each template below, at PORT and the ports behind it

A user's text `<<NAME {"argument": ...}>>` is answered with that tool call, in the form of the template. A tool's result
with `[[a word]]` is answered with the word, so whoever reads it knows that the tool ran. The model has the demo model's
tokenizer. Only the sampler differs from `radixcache serve`: it picks the tokens of the reply.

The templates, each as strict as the models that have its like:

    chatml    no tools in the prompt; a role that it does not know is left out
    hermes    tools in a system turn of their own in front; results are turns of role tool
    qwen3     tools behind the system prompt; results are user turns; reasoning before the last question is left out
    strict    tools before the system prompt; a later system turn or an unknown role is an error; XML tool calls
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.harness.model_folder import write_model
from runner import cli
from runner.models.demo import demo_model_folder
from runner.models.tiny import TINY_KINDS
from runner.serve import served_model
from runner.serve.request import Request

TITLE = "A title"
ASKED, FOUND = re.compile(r"<<(\w+) (\{.*?\})>>", re.DOTALL), re.compile(r"\[\[(\w+)\]\]")
#: Reserved tokens of the demo model's tokenizer, and what they mean here.
RENAMED = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}

#: An agent's first prompt has 10,000 tokens and more, whose attention a CPU computes in a second or two.
SMALLEST = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}

_CALLS = (
    "{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}"
    "\n<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>"
    "{%- endfor %}"
)
_TOOLS = "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
_OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN = "<|im_start|>{{ message.role }}\n{{ message.content or '' }}" + _CALLS + "<|im_end|>\n"

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if message.role in ('system', 'user', 'assistant', 'tool') %}"
        + _TURN + "{% endif %}{% endfor %}" + _OPENING
    ),
    "hermes": (
        "{% if tools %}<|im_start|>system\nFunctions: <tools>" + _TOOLS + "</tools><|im_end|>\n{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "<|im_start|>tool\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
        "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _OPENING
    ),
    "qwen3": (
        "{% set ns = namespace(last=0) %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% if messages[0].role == 'system' or tools %}<|im_start|>system\n"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
        "{% if tools %}# Tools\n<tools>" + _TOOLS + "\n</tools>{% endif %}<|im_end|>\n{% endif %}"
        "{% for message in messages %}{% if message.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
        "{% elif message.role == 'assistant' %}<|im_start|>assistant\n"
        "{% if message.reasoning_content and loop.index0 > ns.last %}<think>\n{{ message.reasoning_content }}\n"
        "</think>\n\n{% endif %}{{ message.content or '' }}" + _CALLS + "<|im_end|>\n"
        "{% elif message.role == 'user' or (message.role == 'system' and not loop.first) %}" + _TURN
        + "{% endif %}{% endfor %}" + _OPENING
        + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    ),
    "strict": (
        "{% if tools %}<|im_start|>system\n# Tools\n<tools>" + _TOOLS + "\n</tools>\nA call: <tool_call>\n<function="
        "name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
        "{% if messages[0].role == 'system' %}\n\n{{ messages[0].content }}{% endif %}<|im_end|>\n"
        "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
        "{% for message in messages %}{% if message.role == 'system' %}"
        "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{% elif message.role == 'tool' %}"
        "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
        "{% elif message.role in ('user', 'assistant') %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>"
        "{% for name, value in call.function.arguments.items() %}\n<parameter={{ name }}>\n"
        "{{ value if value is string else value | tojson }}\n</parameter>{% endfor %}\n</function>\n</tool_call>"
        "{% endfor %}<|im_end|>\n"
        "{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}" + _OPENING
    ),
}  # fmt: skip


def write_parrot(folder: Path, template: str) -> Path:
    """Write a random llama with the demo model's tokenizer and this template; return the folder."""
    demo = demo_model_folder()
    tokenizer = (demo / "tokenizer.json").read_text(encoding="utf-8")
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    shape = {**SMALLEST, "vocab_size": config["vocab_size"], "max_position_embeddings": 1 << 18}
    tiny = TINY_KINDS["llama"]
    write_model(folder, replace(tiny, overrides={**tiny.overrides, **shape}), eos_token_id=config["eos_token_id"])
    for name, meaning in RENAMED.items():
        tokenizer = tokenizer.replace(json.dumps(name), json.dumps(meaning))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    shutil.copy(demo / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8")
    return folder


def reply_to(request: Request, is_xml: bool) -> str:
    """What the model is to say: the tool call that the last user turn asks for, or what the tool found."""
    if not request.tools:
        return TITLE
    # Clients put turns of role system behind a question.
    last = next(each for each in reversed(request.messages) if each["role"] in ("user", "assistant", "tool"))
    asked = ASKED.search(_text(last)) if last["role"] == "user" else None
    if asked is None:
        found = FOUND.search(_text(last))
        return f"It says {found[1]}." if found else "There is nothing to say."
    name, arguments = asked[1], json.loads(asked[2].replace('\\"', '"'))  # some clients quote the question
    if not is_xml:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    lines = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content or ())


def speak(request: Request, tokenizer: Any, *_: Any) -> Callable[[mx.array], mx.array]:
    """A sampler for one request, which ends the reply behind its last token."""
    text = reply_to(request, "<function=" in tokenizer.chat_template)
    tokens = iter(tokenizer.encode(text, add_special_tokens=False))
    return lambda logprobs: mx.array([next(tokens, tokenizer.eos_token_id)])


def main(folder: str, port: str) -> None:
    served_model.sampler_of = speak  # type: ignore[assignment]
    for number, template in enumerate(TEMPLATES):
        # All have the imports behind them, and MLX has made no thread yet.
        if os.fork() == 0:
            model = write_parrot(Path(folder) / template, template)
            cli.main(["serve", "--model", str(model), "--port", str(int(port) + number)])
    for _ in TEMPLATES:
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
