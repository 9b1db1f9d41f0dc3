"""One model's weights at a time, a cache for each, all on one budget; what is named is loaded, or is missing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.harness.model_folder import write_model
from radixcache import CacheClosedError, UnsupportedCacheError
from radixcache.groups import passes
from radixcache.observe.trace import FORMAT
from runner.engine.generator import ParallelGenerator
from runner.models.load import ModelError, load_model
from runner.serve import served_model
from runner.serve.models import Models, read_warm_file
from runner.serve.openai import ChatBody
from runner.serve.options import ServeOptions
from runner.serve.prompts import prompt_of
from runner.serve.request import ApiError, ModelNames, Request
from tests import inside
from tests.serve.jobs import Waiting, alone, noting, running

SYSTEM = "You are a careful assistant, and you answer in rhyme. "
LONG = "All work and no play. " * 10
LLAMA, MAMBA = ModelNames("tiny", None, None), ModelNames("tiny:mamba2", None, None)


@pytest.fixture
def models() -> Iterator[Models]:
    opened = Models(ServeOptions(model="tiny", budget_bytes=64 << 20))
    yield opened
    opened.close()


def save_adapter(folder: Path) -> Path:
    folder.mkdir()
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    layers = load_model("tiny").model.layers
    for number in range(len(layers) - 2, len(layers)):
        for part in ("q_proj", "v_proj"):
            rows, columns = layers[number].self_attn[part].weight.shape
            at = f"model.layers.{number}.self_attn.{part}"
            weights[f"{at}.lora_a"], weights[f"{at}.lora_b"] = mx.ones((columns, 2)), mx.ones((2, rows))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def test_names_stand_for_what_they_stand_for_in_mlx_lm_server() -> None:
    options = ServeOptions(model="m", adapter_path="a", draft_model="d")
    assert options.key_of(ModelNames()) == ModelNames("m", "a", "d")
    assert options.key_of(ModelNames(adapter="other", draft=None)) == ModelNames("m", "a", None)
    assert options.key_of(ModelNames("o/n", "b", "e")) == ModelNames("o/n", "b", "e")
    assert options.key_of(ModelNames("m")) == ModelNames("m", None, "d")


def key_of(name: str, **options: Any) -> ModelNames:
    return ServeOptions(**{"model": "tiny", "adapter_path": "a", **options}).key_of(ModelNames(name, draft=None))


@pytest.mark.parametrize("name", ["gpt-5", "claude-opus-9", "", "model", "qwen3:8b", "mine", "x" * 9999, "nul\0"])
def test_a_name_that_is_no_model_here_means_the_served_one(name: str, tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model"))
    assert key_of(name, model=folder, served_model_names=("mine",)) == ModelNames(folder, "a", None)


def test_strict_names_are_those_of_the_served_model_and_of_models_that_can_be_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    strict: dict[str, Any] = {"model": str(folder), "served_model_names": ("mine", "ours"), "strict_model_names": True}
    for name in ("mine", "ours", "model", str(folder / ".." / "model"), "default_model"):
        assert key_of(name, **strict).model in (str(folder), name)
    assert key_of("some/other", **strict).model == "some/other"
    for name in ("gpt-5", ""):
        with pytest.raises(ApiError, match="is not served here; wanted mine or ours") as refused:
            key_of(name, **strict)
        assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")


@pytest.mark.parametrize("options", [{"only_model": True}, {"api_keys": Path("keys")}])
def test_only_the_served_model_is_loaded_where_that_is_asked_for_and_by_default_with_keys(options):
    for name in ("tiny", "gpt-5", "default_model"):
        assert key_of(name, **options) == ModelNames("tiny", "a", None)
    for name in ("some/other", "tiny:mamba2", "/etc", "./tiny", "~/model"):
        with pytest.raises(ApiError, match="is not served here; wanted tiny"):
            key_of(name, **options)
        assert key_of(name, **{**options, "only_model": False}) == ModelNames(name, None, None)
    served = ServeOptions(model="tiny", **options)
    for names in (ModelNames(adapter="/x"), ModelNames(draft="tiny:llama")):
        with pytest.raises(ApiError, match="is not served here"):
            served.key_of(names)


def test_all_spellings_of_a_model_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link = write_model(tmp_path / "model"), tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    paths = [str(folder), f"{folder}/", str(folder / ".." / "model"), str(link), "./model", "./link", "model"]
    for spellings in (["tiny", "tiny:", "tiny:llama"], paths):
        assert len({key_of(each, model="demo") for each in spellings}) == 1, spellings
        for served in spellings:
            assert {key_of(each, model=served, strict_model_names=True).model for each in spellings} == {served}
            found = {key_of(each, model=served, only_model=True) for each in spellings}
            assert found == {ModelNames(served, "a", None)}
    options = ServeOptions(model="demo", adapter_path="model", draft_model="tiny:")
    found = {options.key_of(ModelNames("o/n", path, draft)) for path in paths for draft in ("tiny", "tiny:llama")}
    assert found == {ModelNames("o/n", "model", "tiny:")}


def test_with_keys_no_answer_tells_which_paths_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file, broken = tmp_path / "folder", tmp_path / "file", write_model(tmp_path / "broken")
    folder.mkdir()
    file.write_text("no model")
    (broken / "model.safetensors").write_bytes(b"no weights")
    monkeypatch.chdir(tmp_path)
    asked = [ModelNames(name, None, None) for name in ("/nowhere", str(folder), str(file), "./broken", "tiny:nothing")]
    asked += [ModelNames("tiny", str(folder), None), ModelNames("tiny", "/nowhere", None)]
    asked += [ModelNames("tiny", None, "/nowhere"), ModelNames("tiny", None, str(folder))]
    with running(api_keys=Path("keys"), only_model=False) as thread:
        failures = {(found.status, found.message) for names in asked if (found := Waiting(thread, names=names).failure)}
        assert failures == {(404, "the model cannot be loaded here.")}
        for names in asked[:3]:
            with pytest.raises(ApiError, match="the model cannot be loaded here"):
                asyncio.run(thread.count_tokens(Request(names, 1, prompt="a")))
    options: dict[str, Any] = {"api_keys": Path("keys"), "only_model": False}
    assert key_of("broken", **options) == key_of("nothing", **options) == ModelNames("tiny", "a", None)
    assert key_of("broken").model == str(broken)


def test_of_other_models_those_asked_last_keep_what_they_have_and_the_served_one_does(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.serve.models.MOST_OTHER_CACHES", 2)
    gone = []
    for kind in ("llama", "mamba2", "gemma3_text", "llama_sliding", "gemma3_text", "mamba2"):
        served = models.open(ServeOptions(model="tiny").key_of(ModelNames(f"tiny:{kind}", None, None)))
        served.warm(served.tokenizer.encode(LONG))
        gone.append(served.cache)
    kept = [names.model for names, _ in models.caches()]
    assert kept == ["tiny", "tiny:gemma3_text", "tiny:mamba2"]
    with pytest.raises(CacheClosedError):
        gone[1].check()
    assert gone[2] is gone[4]
    assert models.ledger is not None
    models.ledger.check()


def test_without_a_model_of_its_own_the_server_answers_those_who_name_one() -> None:
    with running(model=None) as thread:
        failure = Waiting(thread).failure
        assert (failure.status, "started without --model" in failure.message) == (404, True)
        assert Waiting(thread, names=LLAMA).record.completion_tokens > 0
        assert thread.is_healthy


def test_coming_back_to_a_model_finds_its_prefixes_and_those_of_no_other() -> None:
    with running() as thread:
        for names, cached in ((LLAMA, False), (MAMBA, False), (LLAMA, True), (MAMBA, True)):
            waiting = Waiting(thread, names=names, prompt=LONG)
            assert (waiting.record.cached_tokens > 0) == cached
            assert waiting.tokens == alone(load_model(names.model), LONG)[0]
        assert [names for names, _ in thread.caches()] == [LLAMA, MAMBA]


def test_a_model_that_goes_takes_its_weights_along(models: Models) -> None:
    served = models.open(LLAMA)
    gone, layer = weakref.ref(served.model), weakref.ref(served.model.layers[0])
    del served
    models.open(MAMBA)
    assert (gone(), layer()) == (None, None)


def test_who_waits_for_another_model_is_not_overtaken_for_ever() -> None:
    order: list[str] = []

    with running() as thread:
        held = threading.Event()
        thread.call(lambda _: held.wait())
        asked = [
            Waiting(thread, names=names, max_tokens=count, prompt=LONG, on_answer=noting(order, name))
            for name, names, count in (
                ("first", LLAMA, 9), ("mamba", MAMBA, 3), ("second", LLAMA, 3), ("mamba too", MAMBA, 9)
            )
        ]  # fmt: skip
        held.set()
        assert all(waiting.record.completion_tokens for waiting in asked)
    assert order == ["first", "mamba", "mamba too", "second"]


def test_what_is_not_there_leaves_the_model_that_is_loaded(models: Models, tmp_path: Path) -> None:
    served = models.open(LLAMA)
    for names in (ModelNames("./nothing"), ModelNames("tiny", "/nowhere"), ModelNames("tiny", None, "tiny:nothing")):
        with pytest.raises(ModelError):
            models.open(ServeOptions(model="tiny").key_of(names))
        assert models.current is served


def test_what_cannot_be_loaded_is_an_error_and_the_next_model_is_loaded(models: Models, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.open(ModelNames(str(folder), None, None))
    assert models.current is None
    assert models.open(LLAMA) is models.current


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_model_whose_files_changed_starts_with_an_empty_cache(models, tmp_path, is_changed):
    key = ModelNames(str(write_model(tmp_path / "model")), None, None)
    served = models.open(key)
    served.warm(served.tokenizer.encode(LONG))
    before = served.cache
    models.open(LLAMA)
    if is_changed:
        write_model(tmp_path / "model", seed=1)
        os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    served = models.open(key)
    found = served.cache.explain(served.tokenizer.encode(LONG + "!")).resumable_tokens
    assert (found > 0, served.cache is before) == (not is_changed, not is_changed)
    if is_changed:
        with pytest.raises(CacheClosedError):
            before.check()


def test_an_adapter_changes_what_is_said_and_shares_nothing_with_the_model_alone(tmp_path: Path) -> None:
    folder, adapter = write_model(tmp_path / "model"), save_adapter(tmp_path / "adapter")
    with running(model=None) as thread:
        names = [ModelNames(str(folder), each, None) for each in (None, str(adapter), None)]
        answers = [Waiting(thread, names=each, prompt=LONG, logit_bias={1: -1e4}) for each in names]
        said = [answer.tokens for answer in answers]
        assert said[0] == said[2] != said[1]
        assert answers[1].record.cached_tokens == 0


def test_the_servers_chat_template_takes_the_place_of_the_models(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with running(model=str(write_model(tmp_path / "model")), chat_template=template) as thread:
        assert Waiting(thread, messages=[{"role": "user", "content": "four"}]).record.prompt_tokens == 4


def test_tokens_are_counted_as_they_are_asked_for_also_of_a_model_that_is_not_loaded(models: Models) -> None:
    models.open(LLAMA)
    messages = [{"role": "user", "content": "How many?"}]
    for model in ("tiny", "tiny:mamba2"):
        count = len(models.rendering(Request(ModelNames(model), 5, messages=messages)).result().tokens)
        assert count == len(load_model(model).tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    assert models.current is not None
    assert models.current.key == LLAMA
    with pytest.raises(ApiError):
        models.rendering(Request(ModelNames("./nothing"), 5, prompt="a")).result()


def test_a_trace_has_the_requests_of_the_servers_own_model(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with running(trace=trace) as thread:
        for names in (ModelNames(), MAMBA, ModelNames()):
            Waiting(thread, names=names, prompt=LONG).end()
    header, *lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert header["format"] == FORMAT
    assert [line["tokens"] for line in lines] == [len(LONG)] * 2


def test_what_is_warm_at_start_is_pinned_by_name_and_found_by_the_first_request(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
    file = tmp_path / "warm.jsonl"
    lines = [SYSTEM * 2, {"name": "hello", "messages": messages}, {"system": SYSTEM, "namespace": "ann"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    with running(warm=file) as thread:
        pinned = thread.call(lambda models: models.loaded(ModelNames()).cache.names()).result()
        assert list(pinned) == ["warm-1", "hello"]
        for prompt, namespace in ((SYSTEM * 2, ""), (SYSTEM, "ann")):
            asked = [{"role": "system", "content": prompt}, {"role": "user", "content": "What now?"}]
            record = Waiting(thread, messages=asked, namespace=namespace).record
            assert record.cached_tokens > len(prompt)
        record = Waiting(thread, messages=[*messages, {"role": "assistant", "content": "Hi"}, messages[1]]).record
        assert record.cached_tokens > len(SYSTEM) + len("Hello")


def test_a_warm_system_prompt_is_the_beginning_of_prompts_whose_volatile_part_is_moved(tmp_path: Path) -> None:
    system = "Current date: 2026-11-25\nCurrent working directory: /home/ann\nYou are brief."
    (tmp_path / "warm.json").write_text(json.dumps({"system": system}))
    (entry,) = read_warm_file(tmp_path / "warm.json")
    tokenizer, user = load_model("tiny").tokenizer, {"role": "user", "content": "So?"}
    for is_moved in (True, False):
        options = ServeOptions(move_volatile=is_moved)
        body = {"messages": [{"role": "system", "content": system}, user]}
        wanted = prompt_of(ChatBody.read(body, options).request(""), tokenizer, {}).tokens
        found = entry.tokens(tokenizer, options).tolist()
        assert wanted[: len(found)] == found
        assert tokenizer.decode(found).index("You are brief.") < 40 or not is_moved


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", "[", "a.json:1: not JSON"),
        ("a.json", "[5]", "a.json: entry 1 is 5; wanted system prompts or conversations"),
        ("a.json", '{"name": "x"}', "entry 1 is {'name': 'x'}; wanted"),
        ("a.json", '["fine", {"system": "a", "name": ""}]', "entry 2: name ''"),
        ("a.json", '{"messages": []}', "entry 1 has no messages"),
        ("a.json", '{"messages": [{"role": "nobody"}]}', "has role"),
        ("a.json", '{"system": 5}', "content"),
        ("a.jsonl", '"fine"\n{', "a.jsonl: cannot be read"),
    ],
)
def test_a_file_of_what_to_warm_that_makes_no_sense_is_refused(tmp_path, name, content, found):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ValueError, match=found):
        read_warm_file(file)


def test_what_happens_once_happens_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Noting(ParallelGenerator):
        def submit(self, tokens: Any, **options: Any) -> Any:
            made.append([*tokens])
            return super().submit(tokens, **options)

    monkeypatch.setattr(served_model, "ParallelGenerator", Noting)
    with running() as thread:
        assert len(made) == 1  # a reply to nobody
        served = thread.call(lambda models: models.loaded(ModelNames())).result()
        assert inside.layout(served.cache).is_known
        assert served.cache.stats.requests == 0
        assert Waiting(thread, prompt=LONG).record.outcome == "length"


def test_no_request_waits_for_the_trial_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as thread:
        monkeypatch.setattr(passes, "_try_ways", None)
        assert Waiting(thread).record.outcome == "length"


def test_a_model_that_is_wrong_beside_other_rows_answers_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedCacheError("cannot be decoded in a batch.")

    monkeypatch.setattr(passes, "_try_ways", refuse)
    with running() as thread:
        assert Waiting(thread).record.outcome == "length"


@pytest.mark.parametrize(
    ("size", "why"), [(32, "does not support attention sinks"), (64, "divisible by the quantization group size")]
)
def test_a_model_that_cannot_quantize_its_keys_and_values_is_refused_with_the_option(size: int, why: str) -> None:
    named = f"tiny:gpt_oss: --kv-bits 8 --kv-group-size {size} does not work with it: .*{why}"
    with pytest.raises(ModelError, match=named), running(model="tiny:gpt_oss", kv_bits=8, kv_group_size=size):
        pass
    with running(model="tiny:llama", kv_bits=8, kv_group_size=32) as thread:
        for _ in range(2):
            failure = Waiting(thread, prompt="x", names=ModelNames("tiny:gpt_oss")).failure
            assert failure.status == 404
            assert "--kv-bits 8" in failure.message
