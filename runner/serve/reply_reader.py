"""Reading: tokens' text told apart into text, reasoning and tool calls, as mlx_lm.server does. Never imports MLX.

mlx-lm's text state machine strips control sequences and stop words, and says which state each piece of text is of. What
mlx_lm.server's APIHandler.handle_completion makes of that, mlx-lm 0.32.2, is done here step by step: while a tool call
is being written everything is held back, and a call is through once the state is normal again, or at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from runner.serve.request import Token
from runner.serve.service import Delta

logger = logging.getLogger(__name__)


class ReplyReader:
    """Reads one reply. Made by the generation thread, used on the event loop; holds no array.

    Args:
        machine: mlx_lm.generate.TextStateMachine.
        initial_state: one of its states, "normal" or "reasoning".
        format_tool_calls: mlx_lm.server.ToolCallFormatter; texts of tool calls to calls in OpenAI's form.
    """

    def __init__(
        self, machine: Any, initial_state: str, format_tool_calls: Callable[[Sequence[str]], list[dict[str, Any]]]
    ) -> None:
        self._machine, self._format_tool_calls = machine, format_tool_calls
        self._state = machine.make_state(initial_state)
        self._current = initial_state
        self._is_over = False
        self._text = self._reasoning = self._tool_text = ""
        self._tool_texts: list[str] = []

    def add(self, step: Token) -> Delta:
        """Read one token's text. What it adds is empty while a tool call is written."""
        self._is_over = step.finish_reason is not None
        if step.finish_reason == "stop":
            self._state, current = self._machine.discard(self._state)
            self._collect(current, "")
        else:
            self._state, segments = self._machine.split(self._state, step.text)
            for current, text in segments:
                self._collect(current, text)
        if step.finish_reason == "length":
            self._flush()
        return Delta("", "", (), (step,)) if self._current == "tool" else self._take(step)

    def finish(self) -> Delta:
        """Return what was held back, a tool call that nothing closed included."""
        if not self._is_over:  # ended from outside, in the middle
            self._flush()
        if self._current == "tool" and self._tool_text:
            self._tool_texts.append(self._tool_text)
        return self._take()

    def _flush(self) -> None:
        self._state, held_back, current = self._machine.flush(self._state)
        self._collect(current, held_back)

    def _collect(self, current: str, text: str) -> None:
        if current == "reasoning":
            self._reasoning += text
        elif current == "tool":
            self._tool_text += text
        elif current == "normal":
            if self._current == "tool":
                self._tool_texts.append(self._tool_text)
                self._tool_text = ""
            self._text += text
        self._current = current

    def _take(self, *steps: Token) -> Delta:
        calls = tuple(call for tool_text in self._tool_texts for call in self._tool_calls(tool_text))
        delta = Delta(self._text, self._reasoning, calls, steps)
        self._text = self._reasoning = ""
        self._tool_texts = []
        return delta

    def _tool_calls(self, tool_text: str) -> list[dict[str, str]]:
        try:
            return [
                {
                    "id": str(call["id"]),
                    "name": str(call["function"]["name"]),
                    "arguments": call["function"]["arguments"],
                }
                for call in self._format_tool_calls([tool_text])
            ]
        except Exception as error:  # parsers fail in many ways at what a model may write
            logger.warning("a tool call that cannot be read was left out: %s: %r", type(error).__name__, str(error))
            return []
