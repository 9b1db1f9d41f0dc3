"""The text of a reply: it ends before a stop word, keeps its first space, and is that of its tokens byte for byte."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from runner.engine.generation import Generation, StopWords
from runner.models.tiny import tiny_tokenizer
from runner.serve import served_model
from runner.serve.scheduler import Scheduler
from runner.serve.served_model import keep_first_space, token_bytes
from tests.chat.templates import QWEN3
from tests.serve.jobs import Waiting, application, local_client
from tests.serve.scripted_app import CHAT, MESSAGES, USER
from tests.serve.talking_model import END, saying, write_talking_model

WORDS = st.text("ab", min_size=1, max_size=4)


def expected(text: str, words: list[str]) -> tuple[str, str | None]:
    """What is to be shown, found by reading character by character, and the stop word."""
    for end in range(1, len(text) + 1):
        ending = [word for word in words if text[:end].endswith(word)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=st.text("abc", max_size=30), words=st.lists(WORDS, max_size=4), cuts=st.lists(st.integers(0, 30)))
def test_what_is_shown_does_not_depend_on_how_the_text_was_cut(text: str, words: list[str], cuts: list[int]) -> None:
    wanted, word = expected(text, words)
    ends = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    found, shown = StopWords(words), ""
    for index, piece in enumerate([*pieces, ""]):
        more, said = found.add(piece, is_last=index == len(pieces))
        shown += more
        assert wanted.startswith(shown), "a part of a stop word was shown"
        if said is not None:
            break
    assert (shown, said) == (wanted, word)


@given(text=st.text("abc", max_size=20), words=st.lists(WORDS, max_size=4))
def test_only_text_that_may_be_the_beginning_of_a_stop_word_is_held_back(text: str, words: list[str]) -> None:
    wanted, word = expected(text, words)
    if word is None:
        shown, _ = StopWords(words).add(text)
        held = wanted.removeprefix(shown)
        assert not held or any(each.startswith(held) and each != held for each in words)


def say(thread: Scheduler, text: str, **asked: Any) -> Waiting:
    """A reply that is the text, a token for each character."""
    fields = saying(text)
    bias = {int(token): each for token, each in fields.pop("logit_bias").items()}
    return Waiting(thread, prompt="0", logit_bias=bias, **fields, **asked)


@pytest.mark.parametrize(
    ("words", "text", "word"),
    [
        (["cd"], "ab", "cd"),
        (["x", "cdef", "cd"], "ab", "cd"),
        (["d", "bcd"], "a", "bcd"),
        (["defg"], "abcdef", None),
        (["a"], "", "a"),
    ],
)
def test_a_reply_ends_before_a_stop_word(either: Scheduler, words: list[str], text: str, word: str | None) -> None:
    reply = say(either, "abcdef", stop_words=words)
    last = reply.sampled[-1]
    assert (reply.text, last.stop_word, last.finish_reason) == (text, word, "stop" if word else "length")
    assert len(reply.tokens) == reply.record.completion_tokens == len(text) + len(word or "")
    assert all(text.startswith("".join(token.text for token in reply.sampled[:end])) for end in range(7))


def test_a_reply_that_begins_with_a_space_keeps_it(either: Scheduler) -> None:
    assert say(either, " ab").text == " ab"


def sentencepiece(detokenizer: type) -> TokenizerWrapper:
    """A tokenizer whose tokens are pieces of text with a mark for each space, and single bytes."""
    vocabulary = {"<0xC3>": 0, "<0xA9>": 1, "\u2581a": 2, "b": 3, "<s>": 4}
    own = Tokenizer(BPE(vocabulary, []))
    own.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=own), detokenizer, eos_token_ids=[4])


def test_the_bytes_of_each_token_are_its_part_of_the_text() -> None:
    spm, naive, byte_level = (
        sentencepiece(SPMStreamingDetokenizer),
        sentencepiece(NaiveStreamingDetokenizer),
        tiny_tokenizer(),
    )
    assert [token_bytes(spm, id) for id in (2, 3, 0, 1)] == [b" a", b"b", b"\xc3", b"\xa9"]
    assert [token_bytes(naive, id) for id in (2, 3)] == [b" a", b"b"]
    text = " caf\u00e9 \U0001f642"
    assert b"".join(token_bytes(byte_level, id) for id in byte_level.encode(text)) == text.encode()


@pytest.mark.parametrize("detokenizer", [SPMStreamingDetokenizer, NaiveStreamingDetokenizer])
def test_whatever_the_tokenizer_the_first_space_stays(detokenizer: type) -> None:
    tokenizer = sentencepiece(detokenizer)
    keep_first_space(tokenizer)
    reply = Generation(tokenizer=tokenizer, tokens=[1], max_tokens=3)
    assert "".join(reply.add(token).text for token in (2, 3, 2)) == " ab a"


VERBATIM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "said", "text"),
    [(QWEN3, "Hm.\n</think>\n\nSo.", "So."), (VERBATIM, "Hm.</think>\n\nSo.", "\n\nSo.")],
    ids=["written by the template", "kept by the template"],
)
def test_line_breaks_behind_reasoning_go_where_the_reply_is_reused_without_them(
    template: str, said: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_talking_model(tmp_path, "llama")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    spoken = load_tokenizer(folder).encode(said, add_special_tokens=False)

    def speak(*_: Any) -> Any:
        tokens = iter(spoken)
        return lambda logprobs: mx.array([next(tokens, END)])

    monkeypatch.setattr(served_model, "sampler_of", speak)
    with application(model=str(folder)) as (app, _), local_client(app) as client:
        first = client.post(CHAT, json={"messages": [USER]}).json()
        message = first["choices"][0]["message"]
        assert message["content"] == text
        result = {"role": "tool", "tool_call_id": "1", "content": "2"}
        second = client.post(CHAT, json={"messages": [USER, message, result]}).json()["usage"]
        used = first["usage"]["prompt_tokens"] + len(spoken)
        assert second["prompt_tokens_details"]["cached_tokens"] >= used
        stream = client.post(CHAT, json={"messages": [USER], "stream": True}).text
        chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == text
        blocks = client.post(MESSAGES, json={"model": "m", "max_tokens": 50, "messages": [USER]}).json()["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert blocks[1]["text"] == text
