"""render_node: one line of text for a node of the tree."""

from __future__ import annotations

from typing import Any

from radixcache.tokens.text import token_text
from radixcache.tree.state_tree import StateNode, state_of

#: Tokens of an edge that are decoded to show how it begins.
SHOWN_TOKENS = 16


def render_node(node: StateNode, token_bytes: int, tokenizer: Any = None, slot_count: int = 1) -> str:
    """Span, tokens, bytes, residency (in which of several slots), checkpoint, pins; with a tokenizer its text."""
    state = state_of(node)
    slots = [str(slot) for slot in range(slot_count) if state.live_mask >> slot & 1]
    live = "LIVE" if slot_count == 1 else " ".join(["LIVE", *slots])
    spans = token_bytes * (node.end - node.start) if state.spans is None else state.spans.nbytes
    places = [name for name, holds in ((live, state.live), ("PAGED", state.spans is not None)) if holds]
    parts = [f"[{node.start}, {node.end})", f"{node.end - node.start} tokens", f"{spans} bytes", "+".join(places)]
    if state.checkpoint is not None:
        parts.append(f"checkpoint {state.checkpoint.kind} {state.checkpoint.nbytes} bytes")
    if state.pins:
        parts.append("pinned")
    if tokenizer is not None:
        parts.append(repr(_text(node, tokenizer)))
    return "  ".join(parts)


def _text(node: StateNode, tokenizer: Any) -> str:
    return token_text(node.edge[:SHOWN_TOKENS], tokenizer) + (" .." if len(node.edge) > SHOWN_TOKENS else "")
