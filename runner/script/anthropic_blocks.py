"""Bodies of Anthropic's Messages API, and the chat messages that they become. Never imports MLX.

The server and the reader of recorded conversations share this file. `messages_of` turns blocks into messages in
OpenAI's form, which chat templates take:

    text, text    ->  content, a line each
    thinking      ->  reasoning_content
    tool_use      ->  tool_calls
    tool_result   ->  a message of its own, role "tool", the tool's answer as content
    image         ->  content is a list: texts, and images as data URLs
    document, search_result, tool_reference, compaction  ->  text

Successive turns of one role become one turn, as in Anthropic's API. Tools that Anthropic's servers run, what they did
in past turns, and all blocks of other types are left out.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, WithJsonSchema

from runner.script.conversation import (
    ByType,
    Checked,
    Many,
    as_tool,
    content_of,
    dicts_in,
    null_as,
    or_text,
    reply_of,
    with_texts,
    without_billing,
)

#: Fields and blocks that only Anthropic's API has.
_FIELDS = frozenset(("anthropic_version", "cache_control", "stop_sequences", "system"))
_BLOCKS = frozenset((
    "compaction", "document", "image", "redacted_thinking", "server_tool_use", "thinking", "tool_result", "tool_use",
))  # fmt: skip
# Roles and fields of messages that only OpenAI's API has.
_OPENAI_ROLES, _OPENAI_FIELDS = ("developer", "function", "tool"), frozenset(("function_call", "tool_calls"))


class CacheControl(Checked):
    """A mark. Its `ttl` is ignored: the eviction policy decides how long state stays."""

    type: Literal["ephemeral"]


class Markable(Checked):
    cache_control: CacheControl | None = None


class Text(Markable):
    type: Literal["text"]
    text: str


Texts: TypeAlias = Annotated[Many[Text], or_text(list[Text])]


class TextSource(Checked):
    type: Literal["text"]
    text: Annotated[str, Field(alias="data")]


class BlocksSource(Checked):
    type: Literal["content"]
    content: Texts

    @property
    def text(self) -> str:
        return "\n".join(block.text for block in self.content)


class Document(Markable):
    type: Literal["document"]
    source: Annotated[TextSource | BlocksSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResult(Markable):
    type: Literal["search_result"]
    source: str
    title: str
    content: Many[Text]

    @property
    def text(self) -> str:
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class ToolReference(Markable):
    """A tool that a search for tools has found."""

    type: Literal["tool_reference"]
    text: Annotated[str, Field(alias="tool_name")]


class ImageSource(Checked):
    type: Literal["base64"]
    media_type: Literal["image/gif", "image/jpeg", "image/png", "image/webp"]
    data: str


class Image(Markable):
    type: Literal["image"]
    source: ImageSource

    @property
    def image_url(self) -> str:
        return f"data:{self.source.media_type};base64,{self.source.data}"


class Thinking(Checked):
    type: Literal["thinking"]
    thought: Annotated[str, Field(alias="thinking")]


class Compaction(Markable):
    """The summary that took the place of what was said before."""

    type: Literal["compaction"]
    text: Annotated[str, Field(alias="content"), null_as("")]


#: Types of the blocks of this file. All others are left out.
BLOCK_KINDS = (
    "compaction", "document", "image", "search_result", "text", "thinking", "tool_reference", "tool_result", "tool_use",
)  # fmt: skip


class ServerBlock(Checked):
    """What a tool of Anthropic's servers was asked or found, reasoning that they encrypted, and what comes next."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"enum": [*BLOCK_KINDS]}})]


class ToolUse(Markable):
    type: Literal["tool_use"]
    call_id: Annotated[str, Field(alias="id")]
    name: str
    input: Annotated[dict[str, Any], null_as({})]

    @property
    def arguments(self) -> str:
        return json.dumps(self.input)


Shown: TypeAlias = Annotated[Text | Image | Document | SearchResult | ToolReference | ServerBlock, ByType(BLOCK_KINDS)]


class ToolResult(Markable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Many[Shown], or_text(list[Shown])] = Field(default_factory=list)
    is_error: bool = False


UserBlock: TypeAlias = Annotated[
    Text | Image | Document | SearchResult | ToolResult | Compaction | ServerBlock, ByType(BLOCK_KINDS)
]
AssistantBlock: TypeAlias = Annotated[Text | Thinking | ToolUse | Compaction | ServerBlock, ByType(BLOCK_KINDS)]
SystemTexts: TypeAlias = Annotated[Texts, BeforeValidator(without_billing)]


class SystemTurn(Checked):
    role: Literal["system"]
    content: SystemTexts


class UserTurn(Checked):
    role: Literal["user"]
    content: Annotated[Many[UserBlock], or_text(list[UserBlock])]


class AssistantTurn(Checked):
    role: Literal["assistant"]
    content: Annotated[Many[AssistantBlock], or_text(list[AssistantBlock])]


Turn: TypeAlias = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]


def messages_of(turns: Iterable[Turn]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Messages in OpenAI's form, each with the ends of its marked texts, in characters of its content."""
    for role, run in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in run for block in turn.content if not isinstance(block, ServerBlock)]
        if role == "assistant":
            yield reply_of(blocks), _mark_ends(blocks)
            continue
        for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResult)):
            if is_result:
                yield from ((_tool_message(result), []) for result in group)
            else:
                shown = list(group)
                content = content_of(shown)
                yield {"role": role, "content": content}, _mark_ends(shown) if isinstance(content, str) else []
        if not blocks:
            yield {"role": role, "content": ""}, []


def left_out(turns: Iterable[Turn]) -> list[str]:
    """The types of blocks that only Anthropic's servers have, sorted."""
    blocks = [block for turn in turns for block in turn.content]
    inner = [each for block in blocks if isinstance(block, ToolResult) for each in block.content]
    return sorted({block.type for block in (*blocks, *inner) if isinstance(block, ServerBlock)})


def _tool_message(result: Any) -> dict[str, Any]:
    content = content_of([block for block in result.content if not isinstance(block, ServerBlock)])
    if result.is_error:  # OpenAI's form has no field for a failure, only the text
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": content}


def _mark_ends(blocks: Iterable[Any]) -> list[int]:
    texts = [block for block in blocks if hasattr(block, "text")]
    ends = accumulate((len(text.text) for text in texts), lambda end, length: end + 1 + length)  # 1: the line's end
    return [end for end, text in zip(ends, texts[:-1], strict=False) if text.cache_control]


class Tool(Markable):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: Annotated[dict[str, Any], Field(alias="input_schema")]


class ServerTool(Checked):
    """A tool that only Anthropic's servers run; it is left out."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]


def foreign_tools(tools: Any) -> list[str]:
    """The types of tools that only Anthropic's models know by their type, such as web_search_20250305."""
    return [kind for tool in dicts_in(tools) if isinstance(kind := tool.get("type"), str) and kind != "custom"]


def _own_tools(tools: Any) -> Any:
    if not (foreign := foreign_tools(tools)):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") not in foreign]


class ThinkingChoice(Checked):
    """Whether the chat template asks for reasoning; adaptive leaves it to the template. A budget is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Checked):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Checked):
    effort: Annotated[str, Field(max_length=100)] | None = None
    format: OutputFormat | None = None


class AnthropicChat(Checked):
    """What becomes the prompt."""

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: SystemTexts = Field(default_factory=list)
    tools: Annotated[Many[Tool], BeforeValidator(_own_tools, json_schema_input_type=list[Tool | ServerTool])] = Field(
        default_factory=list
    )
    thinking: ThinkingChoice = ThinkingChoice(type="adaptive")
    output_config: OutputConfig = OutputConfig()

    def marked_messages(self) -> list[tuple[dict[str, Any], list[int]]]:
        """As `messages_of`, with the system prompt. System turns that are empty without billing lines are left out."""
        turns = [SystemTurn(role="system", content=self.system), *self.messages]
        return [*messages_of(turn for turn in turns if turn.content or turn.role != "system")]

    def functions(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form."""
        return [as_tool(tool.model_dump(include={"name", "description", "parameters"})) for tool in self.tools]


def chat_of_log(body: Mapping[str, Any]) -> dict[str, Any]:
    """Messages, tools and the wanted reasoning of a body from a log. ValidationError: a field is wrong.

    `left_out` counts the parts that no template has text for, by type. The server gives images to models that take
    them, and refuses files.
    """
    left_out = Counter(f"tool {kind}" for kind in foreign_tools(body.get("tools")))
    turns = with_texts(body.get("messages"), _has_text, left_out)
    chat = AnthropicChat.model_validate({**body, "messages": turns})
    return {
        "messages": [message for message, _ in chat.marked_messages()],
        "tools": chat.functions(),
        "reasoning_effort": chat.output_config.effort,
        "thinking": chat.thinking.model_dump(),
        "left_out": left_out,
    }


def _has_text(block: Mapping[str, Any]) -> bool:
    kind, source = block.get("type", "text"), block.get("source")
    is_file = kind == "document" and isinstance(source, dict) and source.get("type") not in ("text", "content")
    return kind in BLOCK_KINDS and kind != "image" and not is_file and block.get("thinking") != ""


def is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether a body has what only Anthropic's API has, or asks for one of its models as its clients do."""
    turns = dicts_in(body["messages"])
    if any(turn.get("role") in _OPENAI_ROLES or not _OPENAI_FIELDS.isdisjoint(turn) for turn in turns):
        return False
    kinds = {str(block.get("type")) for turn in turns for block in dicts_in(turn.get("content"))}
    tools = [tool for tool in dicts_in(body.get("tools")) if "function" not in tool and "custom" not in tool]
    has_tools = any("input_schema" in tool or tool.get("type", "function") != "function" for tool in tools)
    if has_tools or not _FIELDS.isdisjoint(body) or not _BLOCKS.isdisjoint(kinds):
        return True
    # Its clients must send `max_tokens`. What else is here is the same in both APIs, but texts are joined otherwise.
    is_claude = "max_tokens" in body and str(body.get("model")).startswith("claude") and not body.get("tools")
    return is_claude and kinds <= {"text"} and not any(turn.get("role") == "system" for turn in turns)
