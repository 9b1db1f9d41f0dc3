"""`radixcache doctor` and `--version --verbose`: what is installed, what is missing, and what to do about it.

Requirements and extras come from the metadata of the installed package, so this file has no list of packages.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from textwrap import fill

import psutil
import typer
from packaging.requirements import Requirement

import runner
from runner.blas import blas_name
from runner.commands.outputs import EXIT_CHECK_FAILED, MOST_COLUMNS, Outputs, machine, versions
from runner.text import GIB, MIB

OK, MISSING, PROBLEM, NEXT = "ok", "missing", "problem", "next"
PACKAGE = "radixcache"
#: What each extra is for; an extra without an entry is not reported.
USES = {
    "redis": "prefixes that machines share (--redis)",
    "plot": "pictures (--plot)",
    "ray": "replicas and simulations on a cluster (--replicas, --ray)",
    "cuda": "NVIDIA GPUs",
}
REDIS_TIMEOUT_S = 2.0

#: A mark, and a line on what was found and what to do.
Verdict = tuple[str, str]


def doctor() -> None:
    """Check the installation: packages, extras, device, memory, disk, Redis.

    Exits with 1 if a line says `problem`. A line that says `missing` names the feature that it is needed for. A line
    that says `next` names a command to go on with.
    """
    verdicts = list(_verdicts())
    has_problem = any(mark == PROBLEM for _, (mark, _) in verdicts)
    if not has_problem:
        verdicts += [("replay", (NEXT, "to compare four caches in a minute: radixcache replay"))]
        verdicts += [("serve", (NEXT, "to serve a model: radixcache serve --model demo, or the name of another one"))]
    columns = shutil.get_terminal_size((MOST_COLUMNS, 0)).columns  # a file or a pipe gets a line for each subject
    lines = []
    for subject, (mark, text) in verdicts:
        head = f"{mark:<8} {subject:<9} "
        line = head + without_home(text).replace("pip install ", "pip\xa0install\xa0")  # a command is not broken
        indent = " " * len(head)
        filled = fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines.append(filled.replace("\xa0", " "))
    results = Outputs({})
    results.print("\n".join(lines))
    if has_problem:
        raise typer.Exit(EXIT_CHECK_FAILED)
    results.finish()


def _verdicts() -> Iterator[tuple[str, Verdict]]:
    yield "packages", _packages()
    yield "MLX", (device := _device())
    yield "BLAS", (MISSING, runner.BLAS_ADVICE) if runner.BLAS_ADVICE else (OK, blas_name())
    for extra in USES:
        if required := _requirements(PACKAGE, extra):
            yield f"[{extra}]", _extra(extra, required)
    if device[0] != PROBLEM:  # the budget depends on the device
        yield "memory", _memory()
        yield "disk", _disk()
    if url := os.environ.get("RADIXCACHE_REDIS"):
        yield "Redis", _redis(url)


def _packages() -> Verdict:
    required = _requirements(PACKAGE)
    if not required:
        return PROBLEM, f"{PACKAGE} runs from a folder and is not installed: pip install FOLDER"
    if lacks := _lacks(required):
        return PROBLEM, f"{'; '.join(lacks)}: pip install --upgrade {PACKAGE}"
    names = dict.fromkeys(each.name for each in required)
    return OK, ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _extra(extra: str, required: list[Requirement]) -> Verdict:
    if lacks := _lacks(required):
        return MISSING, f"{'; '.join(lacks)}. For {USES[extra]}: pip install '{PACKAGE}[{extra}]'"
    return OK, USES[extra]


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """What an installed package requires on this system: always, or for one extra alone."""
    try:
        required = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    always = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    if not extra:
        return always
    return [each for each in required if each not in always and each.marker and each.marker.evaluate({"extra": extra})]


def _lacks(required: list[Requirement]) -> list[str]:
    """What is missing of these requirements, and of the extras that they name."""
    lacks = []
    for each in required:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            lacks.append(f"{each.name} is not installed")
            continue
        if not each.specifier.contains(version, prereleases=True):
            lacks.append(f"{each.name} is {version}; wanted {each.specifier}")
        for extra in sorted(each.extras):
            lacks += _lacks(_requirements(each.name, extra))
    return lacks


def _device() -> Verdict:
    try:
        import mlx.core as mx

        name = device_name()
        mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))
    except (ImportError, RuntimeError) as error:
        return PROBLEM, f"{type(error).__name__}: {error}: pip install --force-reinstall {PACKAGE}"
    if name == "CPU" and sys.platform == "linux" and shutil.which("nvidia-smi"):
        return MISSING, f"CPU; to use the NVIDIA GPU of this machine: pip install '{PACKAGE}[cuda]'"
    return OK, name


def _memory() -> Verdict:
    from radixcache.prefix_cache import default_budget_bytes
    from runner.models.demo import DEMO_WHEEL

    memory = psutil.virtual_memory()
    budget_bytes, source = default_budget_bytes(None)
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.available < DEMO_WHEEL.folder_bytes:
        return PROBLEM, f"{found}; the demo model needs {DEMO_WHEEL.folder_bytes / GIB:.1f} GiB: end other programs"
    return OK, f"{found}; the default budget of a cache is {budget_bytes / GIB:.1f} GiB, {source}"


def _disk() -> Verdict:
    from runner.models.demo import DEMO_WHEEL, cache_home

    home = cache_home()
    parent = next(each for each in (home, *home.absolute().parents) if each.exists())
    found = f"{shutil.disk_usage(parent).free / GIB:,.1f} GiB free for {home}"
    if Path(home, "models", DEMO_WHEEL.folder_name).is_dir():
        return OK, f"{found}; the demo model is already there"
    wanted_bytes = 2 * DEMO_WHEEL.wheel_bytes + DEMO_WHEEL.folder_bytes
    needs = f"the demo model, which is downloaded on first use, needs {wanted_bytes / MIB:,.0f} MiB"
    if shutil.disk_usage(parent).free < wanted_bytes:
        return PROBLEM, f"{found}; {needs}: make room, or name another folder with RADIXCACHE_HOME"
    if not os.access(parent, os.W_OK):
        return PROBLEM, f"{home} cannot be written; {needs}: name another folder with RADIXCACHE_HOME"
    return OK, f"{found}; {needs}"


def _redis(url: str) -> Verdict:
    """Ask the server that RADIXCACHE_REDIS names. The URL may hold a password, so no line shows it."""
    try:
        from redis import Redis, RedisError

        Redis.from_url(url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S).ping()
    except ImportError:
        return (
            PROBLEM,
            f"RADIXCACHE_REDIS is set, but the package redis is not installed: pip install '{PACKAGE}[redis]'",
        )
    except (RedisError, OSError) as error:
        return PROBLEM, f"the server of RADIXCACHE_REDIS does not answer ({type(error).__name__})"
    except ValueError:
        return PROBLEM, "RADIXCACHE_REDIS is not a URL; wanted redis://HOST:PORT/NUMBER"
    return OK, "the server of RADIXCACHE_REDIS answers"


def version_report() -> str:
    """One `name  value` line each, to be pasted into an issue."""
    about = machine()
    rows = {
        **versions(),
        "system": _system(),
        "machine": f"{platform.machine()}, {about['processor']}",
        "CPUs": about["logical_cores"],
        "memory": f"{about['memory_bytes'] / GIB:.1f} GiB",
        "MLX device": without_home(_device()[1]),
        "BLAS": blas_name(),
    }
    return "\n".join(f"{name:<12}  {value}" for name, value in rows.items())


def device_name() -> str:
    """The back end that MLX computes with, and its device. Raises what `import mlx.core` raises."""
    import mlx.core as mx

    about = mx.device_info()
    if mx.default_device().type == mx.DeviceType.cpu:
        return "CPU"
    return f"{'CUDA' if mx.cuda.is_available() else 'Metal'}, {about.get('device_name', 'device without a name')}"


def without_home(text: object) -> str:
    """A text on one line with ~ for the home folder."""
    return " ".join(str(text).replace(str(Path.home()), "~").split())


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{platform.system()} {platform.release()}" + (f", {name}" if name else "")
