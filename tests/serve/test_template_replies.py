"""A reply that comes back as it was received is reused, whatever the family of the model's chat template.

The templates are written in the manner of the most used families, with what they write around texts, reasoning and
calls. A reply is what such a model writes: reasoning, a sentence, white space, calls, streamed or not, on all APIs. Of
the next prompt, all of the reply is reused; if not, no white space at the end of the text would do, and the server
names the reply and says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_tokenizer

from radixcache.chat_template import common_rendering
from runner.serve import served_model
from runner.serve.ollama import CHAT as OLLAMA
from runner.serve.prompts import prompt_of
from runner.serve.request import ModelNames, Request, RequestRecord
from tests.serve.call_forms import in_form
from tests.serve.jobs import application, local_client
from tests.serve.scripted_app import CHAT, MESSAGES, RESPONSES
from tests.serve.talking_model import END, write_talking_model


@dataclass(frozen=True)
class Family:
    """A template: the parser of its calls, the pieces of an assistant's turn, and marks that are special tokens."""

    form: str
    turn: str  # of the assistant, between its header and its end
    names: tuple[str, ...] = ("<think>", "</think>")
    opens: str = ""  # what the generation prompt ends with
    reasoning: str = "<think>\n{}\n</think>\n\n"  # as the model writes it
    unreasoned: str = ""  # what it writes without reasoning


THINKS = (
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content.strip('\n') }}\n"
    "</think>\n\n{% endif %}"
)
TOOL_JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    "<tool_call>\n" + TOOL_JSON + "\n</tool_call>{% endfor %}{# tool_call.name #}"
)
PARAMETERS = (
    "{% for k, v in c.function.arguments | items %}"
    "{{ OPEN }}{{ v if v is string else v | tojson }}{{ CLOSE }}{% endfor %}"
)


def arguments(opening: str, closing: str) -> str:
    opening, closing = (text.replace("K", "' ~ k ~ '") for text in (opening, closing))
    return PARAMETERS.replace("OPEN", f"'{opening}'").replace("CLOSE", f"'{closing}'")


XML = arguments("<parameter=K>\\n", "\\n</parameter>\\n")
FAMILIES = {
    "qwen2.5": Family("json_tools", "{{ m.content }}" + HERMES_CALLS, ()),
    "qwen3": Family("json_tools", THINKS + "{{ m.content.lstrip('\n') }}" + HERMES_CALLS),
    "qwen3-thinking": Family("json_tools", THINKS + "{{ m.content.lstrip('\n') }}" + HERMES_CALLS, opens="<think>\n"),
    "qwen3-coder": Family(
        "qwen3_coder",
        "{% if m.content is string and m.content | trim %}{{ m.content | trim + '\n' }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% endif %}"
        "<tool_call>\n<function={{ c.function.name }}>\n" + XML + "</function>\n</tool_call>{% endfor %}",
        (),
    ),
    "qwen3.5": Family(
        "qwen3_coder",
        THINKS + "{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
        "{{ '\n\n' if loop.first and m.content | trim else '' if loop.first else '\n' }}"
        "<tool_call>\n<function={{ c.function.name }}>\n" + XML + "</function>\n</tool_call>{% endfor %}",
    ),
    "hermes": Family(
        "json_tools",
        "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n" + TOOL_JSON + "\n</tool_call>{% endfor %}"
        "{# tool_call.name #}",
        (),
    ),
    "glm": Family(
        "glm47",
        "{% if m.reasoning_content and loop.index0 > ns.last %}\n<think>{{ m.reasoning_content.strip() }}</think>"
        "{% else %}\n<think></think>{% endif %}{% if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name + '\n' }}"
        + arguments("<arg_key>K</arg_key>\\n<arg_value>", "</arg_value>\\n") + "</tool_call>{% endfor %}",
        reasoning="\n<think>{}</think>\n",
        unreasoned="\n<think></think>\n",
    ),
    "deepseek": Family(
        "json_tools",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n" + TOOL_JSON + "\n</tool_call>{% endfor %}{# tool_call.name #}",
    ),
    "mistral": Family(
        "mistral",
        "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}" + TOOL_JSON
        + "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
        ("[TOOL_CALLS]",),
    ),
    "gemma": Family(
        "gemma4",
        "{{ m.content | trim }}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}"
        "{at:<|\"|>{{ c.function.arguments.at }}<|\"|>}<tool_call|>{% endfor %}",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "kimi": Family(
        "kimi_k2",
        "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>"
        "functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}",
        (),
    ),
    "minimax": Family(
        "minimax_m2",
        THINKS.replace("\n\n{%", "\n{%") + "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
        "{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
        "<invoke name=\"{{ c.function.name }}\">\n" + arguments('<parameter name="K">', "</parameter>\\n")
        + "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
    ),
    "longcat": Family(
        "longcat",
        "{{ m.content }}{% for c in m.tool_calls or [] %}\n<longcat_tool_call>{{ c.function.name + '\n' }}"
        + arguments("<longcat_arg_key>K</longcat_arg_key>\\n<longcat_arg_value>", "</longcat_arg_value>\\n")
        + "</longcat_tool_call>{% endfor %}",
        (),
    ),
    "lfm2": Family(
        "pythonic",
        "{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}"
        "(at={{ c.function.arguments.at | tojson | replace('\"', \"'\") }}){{ ', ' if not loop.last }}{% endfor %}]"
        "<|tool_call_end|>{% endif %}",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "granite": Family(
        "json_tools",
        "{{ m.content.strip() }}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n" + TOOL_JSON
        + "\n</tool_call>{% endfor %}{# tool_call.name #}",
        (),
    ),
    "phi": Family("none", "{{ m.content }}", ()),
}  # fmt: skip
BEFORE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>assistant\n"
)
AFTER = "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"


def template_of(family: Family) -> str:
    # Behind a block, a line break of the template itself is left out.
    return f"{BEFORE}{family.turn}{AFTER}{family.opens}{{% endif %}}".replace("%}\n", "%}{{ '\n' }}")


PARAMETERS_OF_F = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "?", "parameters": PARAMETERS_OF_F}
TOOLS = {
    CHAT: [{"type": "function", "function": FUNCTION}], OLLAMA: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", **FUNCTION}],
    MESSAGES: [{"name": "f", "description": "?", "input_schema": PARAMETERS_OF_F}],
}  # fmt: skip


def ask(client: Any, path: str, turns: list[Any], *, stream: bool) -> tuple[list[Any], list[str], dict[str, Any]]:
    """The turns that a client adds of the reply, the ids of the calls in it, and the whole answer."""
    more = {MESSAGES: {"max_tokens": 900, "model": "m"}, CHAT: {"max_tokens": 900}}.get(
        path, {"model": "default_model"}
    )
    body = {"input" if path == RESPONSES else "messages": turns, "tools": TOOLS[path], "stream": stream, **more}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if path == OLLAMA:
        parts = [json.loads(line)["message"] for line in answer.text.splitlines()]
        made: dict[str, Any] = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
        if thinking := "".join(part.get("thinking", "") for part in parts):
            made["thinking"] = thinking
        calls = [call for part in parts for call in part.get("tool_calls", ())]
        return [{**made, **({"tool_calls": calls} if calls else {})}], [call["id"] for call in calls], {}
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if path == CHAT:
        deltas = (
            [each["choices"][0]["delta"] for each in events] if stream else [answer.json()["choices"][0]["message"]]
        )
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        made = {"role": "assistant", "content": "".join(delta.get("content") or "" for delta in deltas)}
        if reasoning := "".join(delta.get("reasoning_content", "") for delta in deltas):
            made["reasoning_content"] = reasoning
        return [{**made, **({"tool_calls": calls} if calls else {})}], [call["id"] for call in calls], {}
    if path == RESPONSES:
        items = events[-1]["response"]["output"] if stream else answer.json()["output"]
        return items, [item["call_id"] for item in items if item["type"] == "function_call"], {}
    blocks = [*blocks_of(events)] if stream else answer.json()["content"]
    return [{"role": "assistant", "content": blocks}], [each["id"] for each in blocks if each["type"] == "tool_use"], {}


def blocks_of(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event["type"] == "content_block_start":
            block, written = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            written += delta.get("partial_json", "")
            for kind in ("text", "thinking"):
                if kind in delta:
                    block[kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            yield {**block, "input": json.loads(written)} if block["type"] == "tool_use" else block


def results(path: str, ids: list[str]) -> list[Any]:
    if not ids:
        return [{"role": "user", "content": "And?"}]
    if path == MESSAGES:
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "2"} for id in ids]}]
    if path == RESPONSES:
        return [{"type": "function_call_output", "call_id": id, "output": "2"} for id in ids]
    return [{"role": "tool", "tool_call_id": id, "content": "2"} for id in ids]


def spoken(family: Family, thought: str, text: str, white: str, call_count: int) -> str:
    """What the model writes behind the generation prompt."""
    calls = in_form(family.form, [("f", {"at": f"x {at}"}) for at in range(call_count)]) if call_count else ""
    reasoning = family.reasoning.format(thought) if thought else family.unreasoned
    return (reasoning + text + (white if calls else "") + calls).removeprefix(family.opens)


def best_reuse(
    tokenizer: Any, path: str, messages: Sequence[dict[str, Any]], index: int, path_tokens: list[int]
) -> int:
    """The most tokens of the path that any white space at the end of the reply's text would reuse.

    Two of the APIs have no text that is white space alone.
    """
    reply = messages[index]
    content = reply["content"]
    texts = {content, *(content.rstrip() + white for white in ("", "\n", "\n\n", " ", "\n\n\n", " \n"))}
    if path in (MESSAGES, RESPONSES) and not content.strip():
        texts = {""}
    found = []
    for text in texts:
        turns = [*messages[:index], {**reply, "content": text}, *messages[index + 1 :]]
        asked = Request(ModelNames(), 1, messages=turns, tools=TOOLS[CHAT])
        found.append(common_rendering(path_tokens, prompt_of(asked, tokenizer, {}).tokens))
    return max(found)


CASES = [*itertools.product(("", "Hm."), ("", "Let me look."), ("", "\n", "\n\n"), (0, 1, 2, 3))]
APIS = [*itertools.product((CHAT, MESSAGES, RESPONSES, OLLAMA), (False, True))]


def require_reuse(family: Family, folder: Path, monkeypatch: pytest.MonkeyPatch, asked: Sequence[Any]) -> float:
    """Returns the share of replies of which everything is reused; of each other one, a reason is named."""
    write_talking_model(folder, "llama", dict(enumerate(family.names, 3)), "")
    (folder / "chat_template.jinja").write_text(template_of(family), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.tool_parser.__module__ if tokenizer.tool_parser else "none").endswith(family.form)
    reply: list[int] = []

    requests: list[Request] = []

    def speak(request: Request, *_: Any) -> Any:
        requests.append(request)
        tokens = iter([*reply])
        return lambda logprobs: mx.array([next(tokens, END)])

    monkeypatch.setattr(served_model, "sampler_of", speak)
    records: list[RequestRecord] = []
    whole = 0
    with application(records, model=str(folder)) as (app, _), local_client(app) as client:
        for (thought, text, white, call_count), (path, stream) in asked:
            said = spoken(family, thought, text, white, call_count)
            reply[:] = tokenizer.encode(said, add_special_tokens=False)
            records.clear()
            question = {"role": "user", "content": f"{said!r} {path} {stream}"}
            turns, ids, _ = ask(client, path, [question], stream=stream)
            assert len(ids) == call_count
            reply[:] = []
            ask(client, path, [question, *turns, *results(path, ids)], stream=False)
            first, second = records
            used = tokenizer.encode(said, add_special_tokens=False)
            stored = first.prompt_tokens + len(used)
            if second.cached_tokens >= stored - 1:
                whole += 1
                continue
            messages = requests[-1].messages
            index = next(at for at, each in enumerate(messages) if each["role"] == "assistant")
            tokens = [*first.keys.tolist(), *used]
            best = best_reuse(tokenizer, path, messages, index, tokens)
            assert second.cached_tokens >= best - 1, (said, turns)
            second.naming.result()
            assert second.fork_part.startswith("assistant message"), second.fork_part
            assert "differs from what the model wrote" in second.fork_part
    return whole / max(1, len(asked))


def asked_of(name: str) -> list[Any]:
    cases = [case for case in CASES if fits(FAMILIES[name], *case)]
    return [*zip(cases, itertools.cycle(APIS), strict=False)]


def fits(family: Family, thought: str, text: str, white: str, call_count: int) -> bool:
    """Whether a model of the family may write this."""
    if (thought and "<think>" not in family.names) or (call_count and family.form == "none"):
        return False
    return bool(call_count and (text or not (thought and white))) or bool((thought or text) and not white)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "mistral", "gemma"])
def test_a_reply_that_comes_back_as_received_is_reused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_reuse(FAMILIES[name], tmp_path, monkeypatch, asked_of(name)[[*FAMILIES].index(name) % 7 :: 7])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_each_reply_that_comes_back_as_received_is_reused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert require_reuse(FAMILIES[name], tmp_path, monkeypatch, asked_of(name)) >= 1 / 8
