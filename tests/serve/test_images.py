"""Images are served one request at a time: the reply is mlx-lm's, what was seen is reused, and only that."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from mlx_lm import stream_generate
from PIL import Image

from runner.models.load import LoadedModel, load_model
from runner.serve import prompts
from runner.serve.request import ModelNames, OpenRequest, PrefillProgress, ReplyEvent
from runner.serve.scheduler import Scheduler
from tests.serve.jobs import Waiting, application, local_client, running
from tests.serve.seeing_model import PATCH, open_eyes, picture, shown, write_seeing_model

ONE, TWO, THREE = picture(1), picture(2), picture(3)
SYSTEM = {"role": "system", "content": "You describe what you see. " * 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_seeing_model(tmp_path_factory.mktemp("models") / "seeing"))


@pytest.fixture(scope="module")
def looked() -> Iterator[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        yield open_eyes(patch)


@pytest.fixture(scope="module")
def loaded(folder: str, looked: list[int]) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def shared(folder: str, looked: list[int]) -> Iterator[Scheduler]:
    with running(model=folder, prefill_step_size=24) as thread:
        yield thread


def asking(*files: bytes, text: str = "What is it?") -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": [*shown(*files), {"type": "text", "text": text}]}]


def rendered(loaded: LoadedModel, messages: list[dict[str, Any]], *files: bytes) -> tuple[list[int], list[mx.array]]:
    text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    arrays = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    text, pixel_values = loaded.processor(text, images=arrays)
    return loaded.tokenizer.encode(text, add_special_tokens=False), pixel_values


def expected(loaded: LoadedModel, messages: list[dict[str, Any]], *files: bytes) -> list[int]:
    tokens, pixel_values = rendered(loaded, messages, *files)
    model: Any = loaded.model
    rows = model.embed_inputs(mx.array(tokens), pixel_values=pixel_values or None)
    said = stream_generate(model, loaded.tokenizer, mx.array(tokens), 12, input_embeddings=rows)
    return [each.token for each in said]


@pytest.mark.parametrize("options", [{"prefill_step_size": 8}, {"exact": True}])
def test_a_reply_is_that_of_mlx_lm_with_the_images_embeddings(loaded, folder, options):
    with running(model=folder, **options) as thread:
        for files in ((TWO,), (ONE, TWO), (ONE, ONE)):
            assert Waiting(thread, messages=asking(*files)).tokens == expected(loaded, asking(*files), *files)
    assert expected(loaded, asking(ONE), ONE) != expected(loaded, asking(TWO), TWO)


@pytest.mark.parametrize("speculate", ["tree", "prompt"])
def test_nothing_is_drafted_for_images_though_the_server_drafts(loaded, folder, speculate):
    with running(model=folder, speculate=speculate) as thread:
        for prediction in ("", "as before"):
            found = Waiting(thread, messages=asking(ONE), prediction=prediction)
            assert found.tokens == expected(loaded, asking(ONE), ONE)
            assert not found.record.drafted


def test_a_second_turn_reuses_the_first_and_does_not_look_at_its_images_again(loaded, shared, looked):
    messages = asking(ONE, TWO)
    first = Waiting(shared, messages=messages, namespace="turns")
    more = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": shown(THREE)}]
    assert first.record.cached_tokens == 0
    looked.clear()
    second = Waiting(shared, messages=more, namespace="turns")
    assert second.record.cached_tokens >= first.record.prompt_tokens - 1
    assert second.record.matched_tokens == second.record.cached_tokens
    assert looked == [1]
    assert second.tokens == expected(loaded, more, ONE, TWO, THREE)
    # What begins with another image of that size shares the text before it alone.
    for files in ((TWO, ONE), (ONE, THREE)):
        other = Waiting(shared, messages=asking(*files), namespace="turns")
        tokens, _ = rendered(loaded, asking(*files), *files)
        starts = [place for place, token in enumerate(tokens) if token == PATCH and tokens[place - 1] != PATCH]
        assert other.record.cached_tokens == starts[1 if files[0] == ONE else 0]
        assert other.tokens == expected(loaded, asking(*files), *files)
    assert Waiting(shared, messages=messages, namespace="others").record.cached_tokens == 0


def test_an_image_that_was_evaluated_in_part_is_looked_at_again(loaded, shared, looked):
    messages, files = asking(ONE, TWO, THREE), (ONE, TWO, THREE)
    tokens, _ = rendered(loaded, messages, *files)
    inside = [place for place in range(24, len(tokens), 24) if tokens[place - 1] == tokens[place] == PATCH]
    for count, offset in enumerate(inside):

        def cancel(opened: OpenRequest, answer: ReplyEvent, at: int = offset) -> None:
            if isinstance(answer, PrefillProgress) and answer.done_tokens >= at:
                opened.cancel()

        asked: dict[str, Any] = {"messages": messages, "namespace": f"parts-{count}"}
        assert Waiting(shared, on_answer=cancel, **asked).record.outcome == "cancelled"
        looked.clear()
        again = Waiting(shared, **asked)
        assert again.record.cached_tokens == offset
        assert looked == [
            len({place for place in range(offset, len(tokens)) if tokens[place : place + 2] == [PATCH, 5]})
        ]
        assert again.tokens == expected(loaded, messages, *files)
    assert len(inside) >= 3


@pytest.fixture
def client(folder: str, looked: list[int]) -> Iterator[TestClient]:
    with application(model=folder) as (app, _), local_client(app) as client:
        yield client


def test_all_apis_take_images_and_say_what_was_reused(client: TestClient, loaded: LoadedModel) -> None:
    body = {"messages": asking(ONE), "max_tokens": 12}
    whole = client.post("/v1/chat/completions", json=body).json()
    wanted = loaded.tokenizer.decode(expected(loaded, asking(ONE), ONE))
    assert whole["choices"][0]["message"]["content"] == wanted
    prompt_tokens = whole["usage"]["prompt_tokens"]
    streamed = client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert f'"cached_tokens": {prompt_tokens - 1}' in streamed.text
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(ONE).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    asked = {"model": "claude-x", "system": SYSTEM["content"], "messages": [{"role": "user", "content": blocks}]}
    message = client.post("/v1/messages", json={**asked, "max_tokens": 12}).json()
    assert message["content"] == [{"type": "text", "text": wanted}]
    assert message["usage"]["cache_read_input_tokens"] == prompt_tokens - 1
    assert client.post("/v1/messages/count_tokens", json=asked).json() == {"input_tokens": prompt_tokens}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{source['data']}"}
    content = [image, {"type": "input_text", "text": "What is it?"}]
    body = {"instructions": SYSTEM["content"], "input": [{"role": "user", "content": content}]}
    response = client.post("/v1/responses", json={**body, "max_output_tokens": 12}).json()
    assert response["output"][0]["content"][0]["text"] == wanted
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == prompt_tokens - 1
    explained = client.post("/cache/explain", json={"messages": asking(ONE)}).json()
    assert explained["resumable_tokens"] == prompt_tokens - 1
    warmed = client.post("/cache/warm", json={"messages": asking(ONE)})
    assert (warmed.status_code, warmed.json()["error"]["message"]) == (
        400,
        "messages: a prompt with images cannot be warmed.",
    )


def bomb(width: int, height: int) -> bytes:
    size = b"IHDR" + struct.pack(">II", width, height) + ONE[24:29]
    return ONE[:12] + size + struct.pack(">I", zlib.crc32(size)) + ONE[33:]


def at(url: Any) -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        (
            at("http://127.0.0.1:1/a.png"),
            "an image has to be a data URL (data:image/png;base64,...); addresses are not",
        ),
        (at("file:///etc/passwd"), "addresses are not fetched"),
        (at("data:image/png;base64,abcde"), "Invalid base64"),
        (at("data:image/png;base64,"), "an image is none of GIF, JPEG, PNG, WEBP."),
        (asking(picture(1, file_format="BMP")), "an image is none of GIF, JPEG, PNG, WEBP."),
        (asking(ONE[:-200]), "the prompt cannot be made: OSError"),
        (asking(bomb(20_000, 20_000)), "DecompressionBombError"),
        (asking(*[bomb(9_000, 9_000)] * 2), "the images have more than 134217728 pixels in total."),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_with_the_reason(shared, messages, found):
    failure = Waiting(shared, messages=messages).failure
    assert (failure.status, found in failure.message) == (400, True), failure.message


def test_the_token_of_an_image_in_a_text_is_text(shared: Scheduler, folder: str) -> None:
    assert Waiting(shared, messages=asking(ONE, text="<|patch|>")).record.outcome == "length"
    with running(model=folder, special_tokens_in_text=True) as thread:
        failure = Waiting(thread, messages=asking(ONE, text="<|patch|>")).failure
    assert "The text has 2 <|patch|> for 1 images." in failure.message


def test_images_beyond_the_models_context_are_refused_also_where_text_would_be_shifted(folder: str) -> None:
    with running(model=folder, context=64) as thread:
        failure = Waiting(thread, messages=asking(*[picture(1, 512, 256)] * 9)).failure
    assert (failure.status, "maximum context length is 32768 tokens." in failure.message) == (400, True)


def test_images_of_every_known_format_are_taken(loaded: LoadedModel, shared: Scheduler) -> None:
    for file in (picture(4, file_format=each) for each in prompts.FORMATS):
        assert Waiting(shared, messages=asking(file)).tokens == expected(loaded, asking(file), file)


def test_images_need_a_model_that_sees_and_no_draft_model(folder: str, looked: list[int]) -> None:
    with running(model=folder) as thread:
        blind = Waiting(thread, messages=asking(ONE), names=ModelNames("tiny")).failure
        assert (blind.status, "no image processor is loaded for this model" in blind.message) == (400, True)
        drafted = Waiting(thread, messages=asking(ONE), names=ModelNames(draft="tiny")).failure
        assert (drafted.status, "a draft model cannot draft replies to images" in drafted.message) == (400, True)
