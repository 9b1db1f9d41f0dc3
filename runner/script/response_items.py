"""Bodies of OpenAI's Responses API, and the chat messages that they become. Never imports MLX.

The server and the reader of recorded conversations share this file. `messages_of` turns items into messages in the form
of chats, which chat templates take:

    message                           ->  a message of its role
    reasoning                         ->  reasoning_content of the assistant's message
    function_call, custom_tool_call   ->  tool_calls of the assistant's message
    their outputs                     ->  a message of its own, role "tool"

Successive items of the assistant become one message, because one reply wrote them. The prompt of the next turn then
begins with the tokens of this turn and its reply. A tool in a namespace has the namespace in front of its name. Tools
and items that only OpenAI's own servers can run or read are left out of the prompt.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, groupby
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from runner.script.conversation import (
    ByType,
    Checked,
    Many,
    as_tool,
    content_of,
    null_as,
    or_text,
    reply_of,
    with_texts,
)

#: What `encrypted_content` begins with if this server wrote it: the reasoning, which only this server reads.
SEAL = "radixcache:"
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "refusal", "summary_text", "text")


class TextPart(Checked):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class Refusal(Checked):
    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ImagePart(Checked):
    type: Literal["input_image"]
    image_url: str


Part: TypeAlias = Annotated[TextPart | Refusal | ImagePart, Field(discriminator="type")]
Parts: TypeAlias = Annotated[Many[Part], or_text(list[Part])]


class MessageItem(Checked):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class ReasoningItem(Checked):
    """Reasoning as this server or another one wrote it. What another one has encrypted is left out."""

    type: Literal["reasoning"]
    summary: Many[TextPart] | None = None
    content: Many[TextPart] | None = None
    encrypted_content: str | None = None

    @property
    def thought(self) -> str:
        sealed = self.encrypted_content or ""
        if not self.content and sealed.startswith(SEAL):
            return sealed.removeprefix(SEAL)
        return "\n".join(part.text for part in self.content or self.summary or ())


class FunctionCall(Checked):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[str, null_as("{}")]


class CustomToolCall(Checked):
    """A call of a custom tool, which takes text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def arguments(self) -> str:
        return json.dumps({"input": self.input})


class CallOutput(Checked):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


#: Types of the items and tools below.
ITEM_KINDS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip
_TOOL_KINDS = ("function", "custom", "namespace")


class Foreign(Checked):
    """An item or a tool that only OpenAI's own servers have, such as a web search."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"enum": [*ITEM_KINDS]}})]
    name: Any = None

    def __str__(self) -> str:
        return f"{self.type} {self.name}" if isinstance(self.name, str) else self.type


class ForeignTool(Foreign):
    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"enum": [*_TOOL_KINDS]}})]


Item: TypeAlias = Annotated[
    MessageItem | ReasoningItem | FunctionCall | CallOutput | CustomToolCall | Foreign, ByType(ITEM_KINDS, "message")
]


def as_items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def messages_of(items: Iterable[Item]) -> Iterator[dict[str, Any]]:
    """Messages in the form of chats, without foreign items."""
    for role, run in groupby((item for item in items if not isinstance(item, Foreign)), key=_role_of):
        if role == "assistant":
            own = ([*item.content] if isinstance(item, MessageItem) else [item] for item in run)
            yield reply_of([*chain.from_iterable(own)])
            continue
        for item in run:
            if isinstance(item, CallOutput):
                yield {"role": role, "tool_call_id": item.call_id, "content": content_of(item.output)}
            elif isinstance(item, MessageItem):
                yield {"role": role, "content": content_of(item.content)}


def _role_of(item: Item) -> str:
    if isinstance(item, MessageItem):
        return item.role
    return "tool" if isinstance(item, CallOutput) else "assistant"


class FunctionTool(Checked):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_function(self) -> dict[str, Any]:
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"name": self.name, "description": self.description or "", "parameters": parameters}


class CustomFormat(Checked):
    type: Literal["text", "grammar"]
    syntax: str = ""
    definition: str = ""


class CustomTool(Checked):
    """A tool that takes text. The model sees a function with one string argument."""

    type: Literal["custom"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: CustomFormat | None = None

    def as_function(self) -> dict[str, Any]:
        text: dict[str, Any] = {"type": "string"}
        if self.format is not None and self.format.type == "grammar":
            text["description"] = f"Text of this {self.format.syntax} grammar:\n{self.format.definition}"
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return {"name": self.name, "description": self.description or "", "parameters": parameters}


class NamespaceTool(Checked):
    """Tools under one name, such as those of an MCP server. Codex has them."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Many[Annotated[FunctionTool | CustomTool | ForeignTool, ByType(("function", "custom"))]]


Tool: TypeAlias = Annotated[FunctionTool | CustomTool | NamespaceTool | ForeignTool, ByType(_TOOL_KINDS)]


class OwnTool(NamedTuple):
    """A tool as the client knows it."""

    namespace: str | None
    tool: FunctionTool | CustomTool


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a tool in the prompt, where no namespaces are."""
    between = "" if not namespace or namespace.endswith("__") else "__"
    return f"{namespace or ''}{between}{name}"


class Reasoning(Checked):
    effort: Annotated[str, Field(max_length=100)] | None = None
    summary: str | None = None


class ResponseChat(Checked):
    """What becomes the prompt."""

    input: Annotated[Many[Item], BeforeValidator(as_items, json_schema_input_type=str | list[Item])]
    instructions: str | None = None
    tools: Many[Tool] = Field(default_factory=list)
    reasoning: Reasoning = Reasoning()

    def messages(self, past: Sequence[Item] = ()) -> list[dict[str, Any]]:
        """As `messages_of`, with the instructions before the items of `past` and of this body."""
        names = {(own.namespace, own.tool.name): name for name, own in self.own_tools().items()}
        turns: list[Item] = []
        if self.instructions:
            turns.append(MessageItem(role="system", content=[TextPart(type="text", text=self.instructions)]))
        for item in (*past, *self.input):
            if isinstance(item, FunctionCall | CustomToolCall) and item.namespace:
                name = names.get((item.namespace, item.name), flat_name(item.namespace, item.name))
                item = item.model_copy(update={"name": name})
            turns.append(item)
        return [*messages_of(turns)]

    def functions(self) -> list[dict[str, Any]]:
        """The tools in the form of chats."""
        return [as_tool({**own.tool.as_function(), "name": name}) for name, own in self.own_tools().items()]

    def own_tools(self) -> dict[str, OwnTool]:
        """The tools that the client runs, by their names in the prompt. A name that is taken gets a number."""
        found: dict[str, OwnTool] = {}
        for tool in self.tools:
            namespace = tool.name if isinstance(tool, NamespaceTool) else None
            for each in tool.tools if isinstance(tool, NamespaceTool) else [tool]:
                if not isinstance(each, Foreign | NamespaceTool):
                    name = flat_name(namespace, each.name)
                    if name in found and found[name].namespace != namespace:
                        name = next(free for n in count(2) if (free := f"{name}_{n}") not in found)
                    found[name] = OwnTool(namespace, each)
        return found

    def foreign(self) -> list[str]:
        """The tools and items that only OpenAI's servers have."""
        inner = [each for tool in self.tools if isinstance(tool, NamespaceTool) for each in tool.tools]
        return [str(part) for part in (*self.tools, *inner, *self.input) if isinstance(part, Foreign)]


def chat_of_log(body: Mapping[str, Any]) -> dict[str, Any]:
    """Messages, tools and the wanted reasoning of a body from a log. ValidationError: a field is wrong.

    `left_out` counts the parts that no template has text for, by type, and earlier turns that the body only names.
    """
    left_out = Counter(name for name in ("previous_response_id", "conversation", "prompt") if body.get(name))
    items = with_texts(as_items(body.get("input")), lambda part: part.get("type", "text") in _TEXT_PARTS, left_out)
    chat = ResponseChat.model_validate({**body, "input": items})
    left_out.update(chat.foreign())
    left_out.update("reasoning" for item in chat.input if isinstance(item, ReasoningItem) and not item.thought)
    return {
        "messages": chat.messages(),
        "tools": chat.functions(),
        "reasoning_effort": chat.reasoning.effort,
        **{name: body.get(name) for name in ("chat_template_kwargs", "enable_thinking", "thinking")},
        "left_out": left_out,
    }
