"""Bodies of Anthropic's Messages API, checked field by field, and the Asked that they come to. Never imports MLX.

What would change a reply's meaning and cannot be honoured (documents, server tools, a forced tool, structured output,
a reply that goes on from a beginning) is refused. Of the body's fields `null` is the same as none, and unknown
ones are ignored. Marks on tools and on the whole body are for checkpoints that are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from runner.serve.anthropic_turns import CacheControl, Checked, Markable, SystemTurn, Texts, Turn, in_openai_form
from runner.serve.asked import DEFAULT, Asked
from runner.serve.errors import ApiError
from runner.serve.openai_bodies import MAX_MESSAGES, ChatBody, Count, Share, StopWord, Tokens
from runner.serve.options import ServeOptions

# How the first system block of a well-known client begins. It is no part of the prompt, and as it is another one in
# every request, prompts behind it would share but a few tokens.
_BILLING_HEADER = "x-anthropic-billing-header:"


class Tool(Markable):
    """A tool of the client's; tools that a server runs have another type."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    input_schema: dict[str, Any]

    def in_openai_form(self) -> dict[str, Any]:
        """As a function."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Checked):
    """A model cannot be made to call a tool, or to call one at most; it can be left without them."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: Literal[False] = False


class ThinkingChoice(Checked):
    """Whether the chat template asks for reasoning; adaptive leaves it to the template. A budget is not kept."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(Checked):
    """A form of the output cannot be promised."""

    format: None = None


class PromptBody(Checked):
    """The body of POST /v1/messages/count_tokens: what becomes the prompt."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingChoice = ThinkingChoice(type="adaptive")
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Check a request's body.

        Raises:
            ApiError: a field is missing, or is not what it may be.
        """
        try:
            checked = cls.model_validate({name: value for name, value in body.items() if value is not None})
        except ValidationError as error:
            raise ApiError.of_validation(error.errors()) from error
        if checked.messages[-1].role == "assistant":
            raise ApiError(400, "the last one is the assistant's; a reply cannot go on from it.", param="messages")
        return checked

    def asked(self, options: ServeOptions, namespace: str) -> Asked:
        """What the generation thread is asked for; what the body leaves open is as `options` have it."""
        messages, ends = zip(*self._messages(), strict=True)
        asked = ChatBody.read({"messages": [*messages], **self._openai_fields()}, options).asked(namespace)
        return replace(asked, marked_texts=[(index, end) for index, of in enumerate(ends) for end in of])

    def _openai_fields(self) -> dict[str, Any]:
        """The body in OpenAI's form, less its messages."""
        thinking = self.thinking.type
        return {
            # Clients often cannot be told other names than Anthropic's, which no weights here have.
            "model": DEFAULT if self.model.startswith("claude-") else self.model,
            "max_tokens": 1,
            "tools": [tool.in_openai_form() for tool in self.tools if self.tool_choice.type == "auto"],
            "chat_template_kwargs": {} if thinking == "adaptive" else {"enable_thinking": thinking == "enabled"},
        }

    def _messages(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Messages, and where in each a text ends that is marked."""
        system = [block for block in self.system if not block.text.startswith(_BILLING_HEADER)]
        turns = [SystemTurn(role="system", content=system)] if system else []
        return in_openai_form([*turns, *self.messages])


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Tokens
    stop_sequences: list[StopWord] = Field(default_factory=list, max_length=64)
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=10_000)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None

    def _openai_fields(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {
            **super()._openai_fields(),
            **sampling,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
        }
