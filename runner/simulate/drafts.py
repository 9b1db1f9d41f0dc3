"""Drafts: what drafting saves on recorded replies, in forward passes and tokens per pass, counted without a model.

The count assumes that the model gives each recorded reply. Requests run one after another, in one namespace. The first
token of a reply comes from prefill, and is not counted. The code that proposes tokens is that of the server
(radixcache/speculate/). Only the time of a pass is assumed: each further token costs `TOKEN_COST` of a pass over one
token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
from rich.table import Table

from radixcache.chat import chat_tokens
from radixcache.settings import SUFFIX_INDEX_BYTES
from radixcache.speculate.drafting import Drafted, Drafting, PromptSource, Source, TreeSource
from radixcache.speculate.pace import DraftPace
from radixcache.speculate.suffix_index import SuffixIndex
from radixcache.tokens import TokenIds
from radixcache.tree.radix_tree import RadixTree
from runner.files import InputError
from runner.script.conversation import Conversation, json_of
from runner.script.schedule import requests_of
from runner.script.script import recorded_reply
from runner.text import Column, cells, figures_table

#: The values of the server's option --speculate, with the sources of each.
SPECULATE = {"tree": ("tree", "prompt"), "prompt": ("prompt",)}
#: The assumed cost of a proposed token, as a share of a pass over one token.
TOKEN_COST = 0.15
NOTE = (
    "Drafting: the recorded replies are taken as what the model says, one request after another. Each proposed token is"
    " assumed to cost {:g} of a pass over one token. Speedup: decoding with drafts beside decoding without."
)
CALLS_NOTE = "The chat template leaves tool calls out. They are counted as <tool_call> JSON in the reply."


@dataclass
class DraftRow:
    """What drafting gave with one value of --speculate.

    Attributes:
        replies: recorded replies with two tokens or more.
        tokens: tokens of these replies, without the first of each.
        passes: forward passes for these tokens; without drafting, one for each token.
        sources: for each source, how many tokens were proposed and accepted.
    """

    speculate: str
    token_cost: float
    replies: int = 0
    tokens: int = 0
    passes: int = 0
    sources: dict[str, Drafted] = field(default_factory=dict)

    @property
    def proposed(self) -> int:
        return sum(each.proposed for each in self.sources.values())

    @property
    def accepted(self) -> int:
        return sum(each.accepted for each in self.sources.values())

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    @property
    def proposed_per_pass(self) -> float:
        return self.proposed / max(1, self.passes)

    @property
    def accepted_share(self) -> float:
        return self.accepted / max(1, self.proposed)

    @property
    def speedup(self) -> float:
        """Assumed time of decoding without drafts / with drafts."""
        return self.tokens / max(1.0, self.passes + self.token_cost * self.proposed)


COLUMNS = (
    Column("speculate", "speculate"),
    Column("replies", "replies", ","),
    Column("reply tokens", "tokens", ","),
    Column("passes", "passes", ","),
    Column("tokens per pass", "tokens_per_pass", ".2f"),
    Column("proposed per pass", "proposed_per_pass", ".2f"),
    Column("accepted", "accepted_share", ".1%"),
    Column("speedup", "speedup", ".2f"),
)


class DraftCount:
    """Counts what drafting gives on requests, in the order in which they are added."""

    def __init__(self, speculate: str) -> None:
        self.row = DraftRow(speculate, TOKEN_COST)
        self._pace = DraftPace(lambda rows, tokens_in_pass: 1 + TOKEN_COST * (tokens_in_pass - 1))
        self._tree: RadixTree[None] = RadixTree()
        self._index = SuffixIndex(SUFFIX_INDEX_BYTES)

    def add(self, prompt: TokenIds, reply: Sequence[int]) -> None:
        """Count a reply, with drafts from earlier requests; add this request to them."""
        made: dict[str, Source] = {"tree": TreeSource(self._index), "prompt": PromptSource(prompt, len(reply))}
        drafting = Drafting([made[name] for name in SPECULATE[self.row.speculate]], self._pace, prompt.tolist())
        row = self.row
        row.passes += passes_of(reply, drafting)
        row.replies += len(reply) > 1
        row.tokens += max(0, len(reply) - 1)
        for name, drafted in drafting.drafted.items():
            all_drafted = row.sources.setdefault(name, Drafted())
            all_drafted.proposed += drafted.proposed
            all_drafted.accepted += drafted.accepted
            all_drafted.passes += drafted.passes
        self._remember(np.concatenate([prompt, np.array(reply, np.int32)]), len(prompt))

    def _remember(self, tokens: TokenIds, prompt_tokens: int) -> None:
        """Add to tree and index what a cache that never evicts adds when a request closes."""
        keys = tokens.astype(np.int64)
        match = self._tree.match(keys)
        self._index.add(tokens, context=min(match.offset, prompt_tokens))
        node = match.node
        if match.offset < len(keys):
            if not node.is_root and match.offset < node.end:
                node = self._tree.split(node, match.offset)
            self._tree.append(node, keys[match.offset :])


def passes_of(reply: Sequence[int], drafting: Drafting) -> int:
    """Return the number of forward passes for the tokens of a reply after the first."""
    drafting.advance(reply[:1])
    at, passes = min(1, len(reply)), 0
    while at < len(reply):
        proposal = drafting.propose()
        proposed = () if proposal is None else proposal.tokens
        pairs = zip(proposed, reply[at:], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        said = reply[at : at + accepted + 1]
        drafting.advance(said, accepted)
        at, passes = at + len(said), passes + 1
    return passes


def recorded_turns(
    conversations: Iterable[Conversation], tokenizer: Any
) -> Iterator[tuple[Conversation, TokenIds, list[int]]]:
    """For each request with a recorded reply: the conversation, and prompt and reply in tokens.

    InputError: the template refuses a conversation.
    """
    for conversation in conversations:
        spelled = conversation
        if leaves_calls_out(conversation, tokenizer):
            spelled = replace(conversation, messages=tuple(map(_with_calls_as_text, conversation.messages)))
        for request in requests_of(spelled):
            try:
                prompt = chat_tokens(tokenizer, request.messages, conversation.tools, **conversation.arguments)
                reply = recorded_reply(tokenizer, request, prompt).tolist()
            except ValueError as error:
                where = f"{conversation.source}: conversation {conversation.conversation_id}"
                raise InputError(f"{where}: {error}") from error
            if reply:
                # The model does not write what the template adds after the end of a turn.
                ends = [index for index, token in enumerate(reply) if token in tokenizer.eos_token_ids]
                yield conversation, prompt, reply[: ends[0] + 1] if ends else reply


def leaves_calls_out(conversation: Conversation, tokenizer: Any) -> bool:
    """Whether the template drops the tool calls that the conversation has."""
    return not tokenizer.has_tool_calling and any(message.get("tool_calls") for message in conversation.messages)


def drafting_report(rows: Sequence[DraftRow], *, spells_calls: bool) -> tuple[list[str | Table], dict[str, Any]]:
    """Tables and notes to show, and the same figures as JSON."""
    notes = [NOTE.format(rows[0].token_cost), *([CALLS_NOTE] if spells_calls else [])]
    table = figures_table(cells(COLUMNS, rows), names=("speculate",))
    figures = [{**asdict(row), **{str(each.value): each.of(row) for each in COLUMNS}} for row in rows]
    return [table, *notes], {"drafting": figures}


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call["function"]
        arguments = json_of(function.get("arguments") or {})
        spelled = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{spelled}\n</tool_call>")
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(texts)}
