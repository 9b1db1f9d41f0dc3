"""The white space that a chat template writes itself around the texts of a past reply.

A model writes a sentence, a line break, then a call. If the client sends the sentence back with this break, and the
template writes one of its own in front of a call, the prompt has two: the path of the reply ends there, and the
arguments of the call are prefilled again. So a reply leaves out the white space that the template will write.

What a template does is learnt from renderings of short conversations, once for each loaded model:

    behind reasoning      whether the reply can go without line breaks there
    in front of a call    for each white space at the end of the text, what the prompt has there
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from radixcache.chat import RenderedChat
from radixcache.chat_template import ChatTemplate, common_rendering
from runner.serve.prompts import last_at

_TEXT = "So."
_CALL = {"id": "callVq001", "type": "function", "function": {"name": "f", "arguments": {"at": "x"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "?", "parameters": {"type": "object"}}}
_RESULT = {"role": "tool", "tool_call_id": "callVq001", "name": "f", "content": "2"}
_USER = {"role": "user", "content": "Why?"}
#: Ends of a text, the shortest first.
_ENDS = ("", "\n", " ", "\n\n", "\n\n\n")


@dataclass(frozen=True)
class TemplateBreaks:
    """What a template writes itself.

    Attributes:
        drops_behind_reasoning: line breaks behind the reasoning go.
        behind_text, behind_nothing: the white space in the prompt in front of a call, and the end of a text, or the
            text, for which the template writes it; empty: not known.
    """

    drops_behind_reasoning: bool = False
    behind_text: Mapping[str, str] = field(default_factory=dict)
    behind_nothing: Mapping[str, str] = field(default_factory=dict)

    def before_call(self, white: str, *, has_text: bool) -> str:
        """The end of a text for which the prompt has the white space that the model wrote in front of a call.

        If the template never writes it so, the white space itself without what the template adds.
        """
        known = self.behind_text if has_text else self.behind_nothing
        if white in known:
            return known[white]
        added = next((written for written, end in known.items() if not end), "")
        return white.removesuffix(added) if has_text else ""

    @classmethod
    def of(cls, tokenizer: Any, template_args: Mapping[str, Any]) -> TemplateBreaks:
        if not tokenizer.has_chat_template:
            return cls()
        drops = tokenizer.has_thinking and _drops_behind_reasoning(tokenizer, template_args)
        if not tokenizer.has_tool_calling:
            return cls(drops)
        ends = {text: dict(_ends(tokenizer, template_args, text)) for text in (_TEXT, "")}
        return cls(drops, ends[_TEXT], ends[""])


def _ends(tokenizer: Any, template_args: Mapping[str, Any], text: str) -> Iterator[tuple[str, str]]:
    """For each end of a text: the white space that the prompt has before a call, and that end. The shortest is last."""
    template = ChatTemplate(tokenizer, [_TOOL], dict(template_args))
    for end in reversed(_ENDS):
        with suppress(Exception):  # Templates are foreign code.
            reply = {"role": "assistant", "content": text + end, "tool_calls": [_CALL]}
            rendered, empty = (
                _text(RenderedChat(template, [_USER, each, _RESULT], "reply"), tokenizer)
                for each in (reply, {**reply, "content": "Vq."})
            )
            start = common_rendering(rendered, empty) if not text else rendered.rindex(text) + len(text)
            written = rendered[start : rendered.index(tokenizer.tool_call_start, start)]
            if not written.strip():
                yield written, end


def _text(chat: RenderedChat, tokenizer: Any) -> str:
    return chat.rendering if isinstance(chat.rendering, str) else str(tokenizer.decode(chat.rendering))


def _drops_behind_reasoning(tokenizer: Any, template_args: Mapping[str, Any]) -> bool:
    """Whether replies can go without the line breaks behind their reasoning: most templates write their own.

    They can if the next prompt, with a turn of the user or of a tool, shares no fewer tokens with what the model wrote.
    """
    template = ChatTemplate(tokenizer, None, dict(template_args))

    def prompt(*later: dict[str, Any]) -> list[int]:
        tokens: list[int] = RenderedChat(template, [_USER, *later], "reply").tokens.tolist()
        return tokens

    def shared(content: str, turn: Mapping[str, Any], after: dict[str, Any]) -> int:
        return common_rendering(written, prompt({**turn, "content": content}, after))

    try:
        begun = prompt()
        is_begun = last_at(begun, tokenizer.think_start_tokens) > last_at(begun, tokenizer.think_end_tokens)
        opening = "" if is_begun else tokenizer.think_start
        reply = f"{opening}\nHm.\n{tokenizer.think_end}\n\n{_TEXT}"
        written = begun + tokenizer.encode(reply.removeprefix("\n") if is_begun else reply, add_special_tokens=False)
        turn: dict[str, Any] = {"role": "assistant", "reasoning_content": "Hm.\n" if is_begun else "\nHm.\n"}
        pairs = [(turn, {"role": "user", "content": "And?"})]
        if tokenizer.has_tool_calling:
            pairs.append(({**turn, "tool_calls": [_CALL]}, _RESULT))
        return all(shared(_TEXT, *pair) >= shared(f"\n\n{_TEXT}", *pair) for pair in pairs)
    except Exception:  # Templates are foreign code.
        return False
