"""`load_model` loads what its argument names, or says in one line why not; OpenBLAS is there before any model is."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from runner.models.load import ModelError, load_model, load_outline, local_context_length, stored_folder
from runner.models.tiny import CONTEXT_LENGTH, TINY_KINDS, VOCABULARY_LENGTH, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in mlx-lm's format: the tiny Qwen3, its tokenizer, its configuration."""
    folder = tmp_path / "tiny-qwen3"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(dict(TINY_KINDS["qwen3"].config)))
    mx.save_safetensors(str(folder / "model.safetensors"), _parameters(tiny_model("qwen3", seed=3)))
    return folder


def test_a_folder_gives_its_weights_tokenizer_context_and_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    loaded = load_model("~/tiny-qwen3")
    tokens = mx.array([loaded.tokenizer.encode("abc")])
    assert mx.array_equal(loaded.model(tokens), tiny_model("qwen3", seed=3)(tokens))
    assert loaded.name == "tiny-qwen3"
    assert loaded.context_length == CONTEXT_LENGTH
    assert loaded.vocabulary_length == VOCABULARY_LENGTH


@pytest.mark.parametrize(
    ("spec", "kind", "context_length"),
    [
        ("tiny", "llama", CONTEXT_LENGTH),
        ("tiny:rwkv7", "rwkv7", None),
        ("tiny:llama4", "llama4", CONTEXT_LENGTH),  # its context and vocabulary are in a nested configuration
    ],
)
def test_tiny_names_a_random_model_of_that_kind(spec: str, kind: str, context_length: int | None) -> None:
    loaded = load_model(spec)
    assert loaded.name == f"tiny:{kind}"
    assert type(loaded.model).__module__ == f"mlx_lm.models.{kind}"
    assert loaded.context_length == context_length
    assert loaded.vocabulary_length == VOCABULARY_LENGTH


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tiny:nothing", r"tiny:nothing: no such kind\. Known: .*mamba, "),
        ("nothing", r"'nothing': no such folder\. Give demo, tiny, "),
        ("", "'': no such folder"),
        ("/nowhere/at/all", "'/nowhere/at/all': no such folder"),
        ("../nowhere", r"'\.\./nowhere': no such folder"),
        ("one/two/three", "'one/two/three': no such folder"),
        (__file__, "is a file, wanted a folder"),
        (str(Path(__file__).parent), r"has no config\.json"),
    ],
)
def test_what_names_nothing_is_an_error_of_one_line(spec: str, message: str) -> None:
    assert _failure(spec, message)
    assert _failure(spec, message, load_outline)


def test_a_tokenizer_and_its_configuration_need_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    outline = load_outline(str(folder))
    assert outline.tokenizer.encode("abc") == tiny_tokenizer().encode("abc")
    assert (outline.config["model_type"], outline.name) == ("qwen3", folder.name)
    tiny = load_outline("tiny:mamba")
    assert (tiny.config["model_type"], tiny.config["dtype"]) == ("mamba", "float32")
    (folder / "tokenizer.json").write_text("{")
    assert _failure(str(folder), "cannot be loaded", load_outline)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", r"config\.json: not readable as JSON"),
        ("config.json", b"[]", r"config\.json: names no model_type"),
        ("config.json", b"\xff\xfe{", r"config\.json: not readable as JSON"),
        ("config.json", b'{"model_type": "nothing"}', "nothing not supported"),
        ("config.json", b'{"model_type": "qwen3"}', "cannot be loaded: TypeError"),
        ("model.safetensors", None, r"has no model\*\.safetensors"),
        ("model.safetensors", b"no weights", "cannot be loaded"),
        ("tokenizer.json", b"{", "cannot be loaded"),
    ],
)
def test_a_broken_folder_is_an_error_of_one_line(folder: Path, name: str, content: bytes | None, message: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    assert str(folder) in _failure(str(folder), message)


def test_a_hub_id_that_cannot_be_fetched_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The hub's client asks the environment once, when it is imported; offline it only looks into its cache.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    said = "'nobody/nothing': no such folder, and as a hub id: nobody/nothing cannot be loaded"
    assert _failure("nobody/nothing", said)


def test_asking_what_is_known_of_the_demo_model_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RADIXCACHE_HOME", str(tmp_path))
    monkeypatch.setattr("runner.models.load.demo_model_folder", lambda *_: pytest.fail("it is downloaded"))
    assert stored_folder("demo") is local_context_length("demo") is None


def test_the_tiny_tokenizer_spells_every_text_in_bytes_and_knows_tools() -> None:
    tokenizer = tiny_tokenizer()
    text = "Ünï 🙂\t<|im_end|>\r\n  0123\x7f"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == VOCABULARY_LENGTH
    assert len(tokenizer.encode("é")) == 2
    call = {"function": {"name": "look_up", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found"},
    ]
    options = {"tools": [{"name": "look_up"}], "tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(messages, **options)
    turns = [turn.partition("\n")[0] for turn in prompt.split("<|im_start|>")[1:]]
    assert turns == ["tools", "user", "assistant", "tool", "assistant"]
    assert "look_up" in prompt.split("<|im_start|>")[3]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux loads OpenBLAS")
def test_a_missing_openblas_is_one_line_of_advice_that_names_it() -> None:
    advice = _output("from runner.blas import load_openblas; print(load_openblas('libnowhere.so.0'))")
    assert "libopenblas.so.0 not found" in advice
    assert "\n" not in advice


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux loads OpenBLAS")
def test_a_library_that_is_loaded_answers_for_those_loaded_after_it() -> None:
    found = _output(
        "import ctypes; from runner.blas import load_openblas\n"
        "before = hasattr(ctypes.CDLL(None), 'deflate'); load_openblas('libz.so.1')\n"
        "print(before, hasattr(ctypes.CDLL(None), 'deflate'))"
    )
    # Some interpreters come with zlib inside; then it is there before, and says nothing.
    assert found in ("False True", "True True")


def test_advice_is_not_given_when_mlx_is_loaded_already_and_importing_runner_does_not_load_it() -> None:
    code = "import sys, runner; print('mlx.core' in sys.modules); import mlx.core\n"
    code += "from runner.blas import load_openblas; print(load_openblas('libnowhere.so.0'))"
    assert _output(code) == "False\nNone"


def _output(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def _failure(spec: str, message: str, load: Callable[[str], object] = load_model) -> str:
    with pytest.raises(ModelError, match=message) as error:
        load(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


def _parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))
