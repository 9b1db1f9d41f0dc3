"""render() and view(): what they show is what the tree holds, and nothing of another namespace."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from radixcache import PrefixCache
from runner.models.tiny import tiny_model, tiny_tokenizer

SYSTEM = "You are kind and brief. "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("nemotron_h")


def serve(cache: PrefixCache, model: Any, prompt: list[int], namespace: str = "") -> None:
    with cache.begin(prompt, namespace=namespace) as session:
        session.prefill(model)
        session.step(model, prompt[-1:])


def test_a_view_has_every_node_with_what_it_holds(model: Any, tokenizer: Any) -> None:
    cache = PrefixCache(model, live_slots=2)
    texts = [SYSTEM + "What is the capital of France?", SYSTEM + "What is bread made of?", "Something else altogether"]
    for text in texts:
        serve(cache, model, tokenizer.encode(text))
    cache.warm(model, tokenizer.encode(SYSTEM), name="system")
    view, stats = cache.view(tokenizer=tokenizer), cache.stats
    assert (len(view.nodes), view.tokens) == (stats.nodes, stats.tokens)
    assert sum(node.checkpoint_bytes for node in view.nodes) == stats.checkpoint_bytes
    assert sum(node.span_bytes for node in view.nodes if node.is_paged) + stats.checkpoint_bytes == stats.paged_bytes
    assert sum(node.span_bytes for node in view.nodes if node.residency == "both") == stats.duplicate_bytes
    assert [node.pin_names for node in view.nodes if node.is_pinned] == [("system",)]
    assert {slot for node in view.nodes for slot in node.slots} == {0, 1}
    assert [node.is_live for node in view.nodes] == [bool(node.slots) for node in view.nodes]
    paths = set()
    for index, node in enumerate(view.nodes):
        if node.below == 0:
            path, at = "", index
            while at >= 0:
                path, at = (view.nodes[at].text or "") + path, view.nodes[at].parent
            paths.add(path)
    assert paths == set(texts)


def test_an_open_session_and_what_is_left_out_are_shown(model: Any, tokenizer: Any) -> None:
    cache = PrefixCache(model)
    for text in ("red apples", "red berries", "green beans"):
        serve(cache, model, tokenizer.encode(SYSTEM + text))
    with cache.begin(tokenizer.encode(SYSTEM + "red apples, please")) as session:
        session.prefill(model)
        held = [node for node in cache.view().nodes if node.is_open]
        assert max(node.end for node in held) == session.matched_tokens
        assert "in use" in cache.render()
    assert "more node" in cache.render(max_nodes=1)
    assert "in use" not in cache.render()


def test_nothing_of_another_namespace_is_shown(model: Any, tokenizer: Any) -> None:
    cache = PrefixCache(model, budget_bytes=1 << 30)
    serve(cache, model, tokenizer.encode("hello there"), "ours")
    before = cache.view(namespace="ours", tokenizer=tokenizer)
    secret = "planted-secret"
    serve(cache, model, tokenizer.encode(f"the {secret} text"), f"{secret}-name")
    cache.pin(tokenizer.encode(f"the {secret}"), f"{secret}-name", name=f"{secret}-pin")
    after = cache.view(namespace="ours", tokenizer=tokenizer)
    assert after.namespaces == before.namespaces == ("ours",)
    assert [(node.start, node.end, node.uses, node.last_used) for node in after.nodes] == [
        (node.start, node.end, node.uses, node.last_used) for node in before.nodes
    ]
    assert after.about == ()
    for format_name in ("text", "svg", "html", "json"):
        assert secret in cache.render(format_name, tokenizer=tokenizer)
        shown = cache.render(format_name, namespace="ours", tokenizer=tokenizer)
        assert "hello" in shown
        assert "hello" not in cache.render(format_name)
        assert secret not in shown
        assert secret not in cache.render(format_name, namespace="nobody's", tokenizer=tokenizer)
    assert cache.view(namespace="nobody's").nodes == ()


def test_text_is_decoded_and_drawn_outside_of_the_lock(tokenizer: Any) -> None:
    llama = tiny_model("llama")
    cache = PrefixCache(llama)
    serve(cache, llama, tokenizer.encode("hello there"))
    seen: list[int] = []

    class Asks:
        def decode(self, ids: list[int]) -> str:
            other = threading.Thread(target=lambda: seen.append(cache.stats.nodes))
            other.start()
            other.join(60)
            return str(tokenizer.decode(ids))

    assert "hello there" in cache.render(tokenizer=Asks())
    assert seen == [1], "another thread could look while text was decoded"


def stored(cache: PrefixCache) -> set[tuple[str, tuple[int, ...]]]:
    """The whole sequences to the end of each edge, by namespace."""
    ends: list[tuple[str, tuple[int, ...]]] = []
    for edge in cache.edges():
        before = ends[edge.parent][1] if edge.parent >= 0 else ()
        assert edge.parent < len(ends)
        ends.append((edge.namespace, (*before, *edge.keys.tolist())))
    return set(ends)


def test_edges_spell_what_was_stored_in_each_namespace_and_nothing_else() -> None:
    model = tiny_model("llama")
    with PrefixCache(model, budget_bytes=64 << 20) as cache:
        assert cache.edges() == []
        one, other = np.arange(10, 50), np.array([*range(10, 30), *range(60, 90)])
        cache.warm(model, one)
        cache.warm(model, other)
        cache.warm(model, one, "ann")
        assert stored(cache) == {
            ("", tuple(range(10, 30))), ("", tuple(one)), ("", tuple(other)), ("ann", tuple(one)),
        }  # fmt: skip
        cache.clear()
        assert cache.edges() == []
