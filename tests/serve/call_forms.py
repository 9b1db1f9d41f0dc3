"""Tool calls as the chat templates of each family write them."""

from __future__ import annotations

import json
from typing import Any


def in_gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_gemma(each, quote) for each in value) + "]"
    return json.dumps(value)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


#: What stands around the arguments of a call, and around the key and the value of an argument.
TAGS = {
    "qwen3_coder": ("<tool_call>\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"),
    "glm47": ("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "longcat": (
        "<longcat_tool_call>{}\n",
        "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n",
        "</longcat_tool_call>",
    ),
    "minimax_m2": ('<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>\n"),
    "minicpm5": ('<function name="{}">', '<param name="{}">{}</param>', "</function>"),
    "muse_spark": ('<atem:invoke name="{}">\n', '<atem:parameter name="{}">{}</atem:parameter>\n', "</atem:invoke>\n"),
}
#: What stands around all calls, and between two.
AROUND = {
    "mistral": ("[TOOL_CALLS][", ", ", "]"), "pythonic": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "gemma4": ("", "", ""),
    "minimax_m2": ("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    "muse_spark": ("<atem:function_calls>\n", "", "</atem:function_calls>"),
}  # fmt: skip


def one_in_form(form: str, name: str, arguments: dict[str, Any], at: int) -> str:
    if form in TAGS:
        opening, argument, closing = TAGS[form]
        pairs = [(key, each if isinstance(each, str) else as_json(each)) for key, each in arguments.items()]
        if form == "minicpm5":
            pairs = [(key, f"<![CDATA[{each}]]>" if set("<&\n") & set(each) else each) for key, each in pairs]
        return opening.format(name) + "".join(argument.format(*pair) for pair in pairs) + closing
    if form == "kimi_k2":
        named = f"functions.{name}:{at}<|tool_call_argument_begin|>"
        return f"<|tool_call_begin|>{named}{as_json(arguments)}<|tool_call_end|>"
    if form == "pythonic":
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if form == "function_gemma":
        return f"<start_function_call>call:{name}{in_gemma(arguments, '<escape>')}<end_function_call>"
    if form == "gemma4":
        return f"<|tool_call>call:{name}" + in_gemma(arguments, '<|"|>') + "<tool_call|>"
    call = as_json({"name": name, "arguments": arguments})
    return call if form == "mistral" else f"<tool_call>\n{call}\n</tool_call>"


def in_form(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as the chat templates of a form write them."""
    begin, between, end = AROUND.get(form, ("", "\n", ""))
    written = (one_in_form(form, name, arguments, at) for at, (name, arguments) in enumerate(calls))
    return begin + between.join(written) + end


FORMS = (
    "json_tools", "mistral", "kimi_k2", "qwen3_coder", "glm47", "longcat", "minimax_m2", "minicpm5", "muse_spark",
    "pythonic", "function_gemma", "gemma4",
)  # fmt: skip
