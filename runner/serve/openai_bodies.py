"""Bodies of OpenAI's requests: what each field may be, and the Asked that they come to. Never imports MLX.

Names, defaults and ranges are those of mlx_lm.server 0.32.2; narrower where a value would make logits infinite, fail
while a token is sampled, or cost memory or time without bound. `null` is the same as no field, and unknown fields are
ignored. docs/serve-differences.md lists what this comes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from runner.serve.asked import DEFAULT, Asked, ModelNames, Penalties, Sampling
from runner.serve.errors import ApiError
from runner.serve.options import ServeOptions

#: Under it, float16 cannot tell the likeliest token from the others.
LEAST_TEMPERATURE = 1e-3
#: Under it, logits become infinite in float16; 0 is no penalty.
LEAST_REPETITION_PENALTY = 0.01
#: Templates take their time for each.
MAX_MESSAGES = 10_000

# Arguments of tokenizer.apply_chat_template that are no variables of a template, and are not a request's to set.
NOT_OF_TEMPLATES = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools",
    "truncation",
))  # fmt: skip


def _temperature(temperature: float) -> float:
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _repetition_penalty(penalty: float) -> float:
    if 0 < penalty < LEAST_REPETITION_PENALTY:
        raise ValueError(f"wanted 0, which is none, or at least {LEAST_REPETITION_PENALTY}")
    return penalty


def _template_args(arguments: dict[str, Any]) -> dict[str, Any]:
    if refused := sorted(NOT_OF_TEMPLATES.intersection(arguments)):
        raise ValueError(f"{refused[0]} is not a request's to set")
    return arguments


def _words(stop: Any) -> Any:
    return [stop] * bool(stop) if isinstance(stop, str) else stop


Count = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1)]
#: Taken off a logit, as often as a token occurred.
Penalty = Annotated[float, Field(ge=-100, le=100)]
#: Added to a logit: at its ends a ban and a certainty, and finite in float16.
Bias = Annotated[float, Field(ge=-10_000, le=10_000)]
TokenId = Annotated[int, Field(strict=False, ge=0, lt=2**31)]
StopWord = Annotated[str, Field(min_length=1, max_length=1000)]

# Objects that stay what they are, fields for the chat template included; _check_message and _check_function check them.
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TEXT = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
TEXTS = {"type": "array", "items": {**TEXT, "required": ["type", "text"]}}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "null"}, TEXTS]}
MESSAGE = {"type": "object", "properties": {"role": {"type": "string"}, "content": CONTENT}, "required": ["role"]}
TOOL = {"type": "object", "properties": {"function": NAMED}, "required": ["function"]}
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]
Tool = Annotated[dict[str, Any], WithJsonSchema(TOOL)]

Part = TypeVar("Part", Sampling, Penalties)


class OpenAIBody(BaseModel):
    """What chats and text completions have in common."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str = DEFAULT
    adapters: str | None = None
    draft_model: str | None = DEFAULT
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] = 3
    stream: bool = False
    stream_options: dict[str, bool] = {}
    max_tokens: Tokens = 512
    max_completion_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=10_000), AfterValidator(_temperature)] = 0.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    xtc_probability: Share = 0.0
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    repetition_penalty: Annotated[float, Field(ge=0, le=100), AfterValidator(_repetition_penalty)] = 0.0
    repetition_context_size: Count = 20
    presence_penalty: Penalty = 0.0
    presence_context_size: Count = 20
    frequency_penalty: Penalty = 0.0
    frequency_context_size: Count = 20
    logit_bias: dict[TokenId, Bias] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=-1, le=11)] = -1
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[
        list[StopWord], Field(max_length=64), BeforeValidator(_words, json_schema_input_type=str | list[StopWord])
    ] = []
    n: Literal[1] = 1

    @classmethod
    def read(cls, body: Mapping[str, Any], options: ServeOptions) -> Self:
        """Check a request's body; what it leaves open is as the server's `options` have it.

        Raises:
            ApiError: a field is missing, or is not what it may be.
        """
        names = ("num_draft_tokens", "max_tokens", "top_p", "top_k", "min_p")
        defaults = {"temperature": options.temp, **{name: getattr(options, name) for name in names}}
        # Of a draft model alone null says something: that there is none.
        given = {name: value for name, value in body.items() if value is not None or name == "draft_model"}
        try:
            return cls.model_validate({**defaults, **given})
        except ValidationError as error:
            raise ApiError.of_validation(error.errors()) from error

    def asked(self, namespace: str) -> Asked:
        """What the generation thread is asked for.

        Raises:
            ApiError: a message or a tool is not what it may be.
        """
        return Asked(
            names=ModelNames(self.model, self.adapters, self.draft_model),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            sampling=self._part(Sampling),
            penalties=self._part(Penalties),
            stop_words=self.stop,
            num_draft_tokens=self.num_draft_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            seed=self.seed,
            namespace=namespace,
            **self._prompt(),
        )

    def _part(self, kind: type[Part]) -> Part:
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})

    def _prompt(self) -> dict[str, Any]:
        raise NotImplementedError


class CompletionBody(OpenAIBody):
    """The body of POST /v1/completions."""

    prompt: str
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    def _prompt(self) -> dict[str, Any]:
        return {"prompt": self.prompt}


class ChatBody(OpenAIBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[Tool] = []
    role_mapping: dict[str, Annotated[str, Field(max_length=1000)]] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_args)] = {}

    def _prompt(self) -> dict[str, Any]:
        for index, message in enumerate(self.messages):
            _check_message(message, f"messages.{index}")
        for index, tool in enumerate(self.tools):
            _check_function(tool, f"tools.{index}")
        return {
            "messages": self.messages,
            "tools": self.tools or None,
            "role_mapping": self.role_mapping,
            "template_args": self.chat_template_kwargs or None,
        }


def _check_message(message: dict[str, Any], at: str) -> None:
    _require(isinstance(message.get("role"), str), f"{at}.role", "a string")
    content, calls = message.get("content"), message.get("tool_calls")
    _require(content is None or isinstance(content, str | list), f"{at}.content", "a string or a list of parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        is_part = isinstance(part, dict) and isinstance(part.get("type"), str)
        _require(is_part, f"{at}.content.{index}", "an object with a type")
        has_text = part["type"] != "text" or isinstance(part.get("text"), str)
        _require(has_text, f"{at}.content.{index}.text", "a string")
    _require(calls is None or isinstance(calls, list), f"{at}.tool_calls", "a list")
    for index, call in enumerate(calls or ()):
        _check_function(call, f"{at}.tool_calls.{index}")


def _check_function(tool: Any, at: str) -> None:
    """Of a tool, or of a call of one."""
    function = tool.get("function") if isinstance(tool, dict) else None
    is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
    _require(is_named, f"{at}.function", "an object with a name")
    arguments = function.get("arguments", "") if function else ""
    _require(isinstance(arguments, str | dict), f"{at}.function.arguments", "a string of JSON")


def _require(holds: bool, param: str, wanted: str) -> None:
    if not holds:
        raise ApiError(400, f"{param} should be {wanted}.", param=param)
