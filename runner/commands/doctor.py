"""`radixcache doctor`: what is installed, what is missing, and what to do about it. Loads no model, needs no network.

Requirements and extras are read from the metadata of the installed package, so this file has no list of them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import typer
from packaging.requirements import Requirement

import runner
from runner.blas import blas_name
from runner.commands.outputs import EXIT_CHECK_FAILED
from runner.commands.version import device_name, without_home
from runner.text import GIB, MIB

OK, MISSING, PROBLEM = "ok", "missing", "problem"
PACKAGE = "radixcache"
#: What each extra is for; an extra without an entry is not reported.
USES = {
    "serve": "radixcache serve",
    "redis": "prefixes that machines share (--redis)",
    "plot": "pictures (--plot, advise --html)",
    "ray": "replicas and simulations on a cluster (--replicas, --ray)",
    "cuda": "NVIDIA GPUs",
}
REDIS_TIMEOUT_S = 2.0


class CheckResult(NamedTuple):
    mark: str
    subject: str
    text: str


def doctor() -> None:
    """Check the installation: packages, extras, back end, memory, disk, Redis.

    Exits with 1 if a line says problem. What is missing is needed only for what its line names.
    """
    results = list(_check_results())
    for mark, subject, text in results:
        print(f"{mark:<8} {subject:<9} {without_home(text)}")
    if any(result.mark == PROBLEM for result in results):
        raise typer.Exit(EXIT_CHECK_FAILED)


def _check_results() -> Iterator[CheckResult]:
    yield _packages()
    device = _device()
    yield device
    yield (
        CheckResult(MISSING, "BLAS", runner.BLAS_ADVICE) if runner.BLAS_ADVICE else CheckResult(OK, "BLAS", blas_name())
    )
    yield from _extras()
    if device.mark == OK:  # the budget depends on the device
        yield _memory()
        yield _disk()
    if url := os.environ.get("RADIXCACHE_REDIS"):
        yield _redis(url)


def _packages() -> CheckResult:
    try:
        required = requirements_of(PACKAGE)
    except metadata.PackageNotFoundError:
        return CheckResult(
            PROBLEM, "packages", f"{PACKAGE} runs from a folder and is not installed: pip install FOLDER"
        )
    if lacking := [line for each in required for line in lacks_of(each)]:
        return CheckResult(PROBLEM, "packages", f"{'; '.join(lacking)}: pip install --upgrade {PACKAGE}")
    names = dict.fromkeys(each.name for each in required)
    return CheckResult(OK, "packages", ", ".join(f"{name} {metadata.version(name)}" for name in names))


def _extras() -> Iterator[CheckResult]:
    with suppress(metadata.PackageNotFoundError):
        offered = metadata.metadata(PACKAGE).get_all("Provides-Extra") or []
        for extra in [each for each in USES if each in offered]:
            required = requirements_of(PACKAGE, extra)
            if not required:  # not on this system
                continue
            if lacking := [line for each in required for line in lacks_of(each)]:
                advice = f"{'; '.join(lacking)}. For {USES[extra]}: pip install '{PACKAGE}[{extra}]'"
                yield CheckResult(MISSING, f"[{extra}]", advice)
            else:
                yield CheckResult(OK, f"[{extra}]", USES[extra])


def requirements_of(package: str, extra: str = "") -> list[Requirement]:
    """What an installed package requires on this system: always, or for one extra only."""
    required = map(Requirement, metadata.requires(package) or [])
    return [each for each in required if _applies(each, "") is (not extra) and _applies(each, extra)]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def lacks_of(requirement: Requirement) -> list[str]:
    """What is missing for a requirement, and for the extras that it names."""
    name, wanted = requirement.name, requirement.specifier
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return [f"{name} is not installed"]
    if not wanted.contains(version, prereleases=True):
        return [f"{name} is {version}; wanted {wanted}"]
    inner = [each for extra in sorted(requirement.extras) for each in requirements_of(name, extra)]
    return [line for each in inner for line in lacks_of(each)]


def _device() -> CheckResult:
    """Whether MLX can be imported and computes."""
    try:
        import mlx.core as mx

        name = device_name()
        mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))
    except (ImportError, RuntimeError) as error:
        return CheckResult(PROBLEM, "MLX", f"{type(error).__name__}: {error}: pip install --force-reinstall {PACKAGE}")
    if name == "CPU" and sys.platform == "linux" and shutil.which("nvidia-smi"):
        return CheckResult(MISSING, "MLX", f"CPU, beside an NVIDIA GPU: pip install '{PACKAGE}[cuda]' to use it")
    return CheckResult(OK, "MLX", name)


def _memory() -> CheckResult:
    from radixcache.prefix_cache import default_budget_bytes
    from runner.models.demo import DEMO_WHEEL

    memory = psutil.virtual_memory()
    budget_bytes, source = default_budget_bytes(None)
    text = (
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available; "
        f"budget of a cache by default {budget_bytes / GIB:.1f} GiB, {source}"
    )
    if memory.available < DEMO_WHEEL.folder_bytes:
        return CheckResult(PROBLEM, "memory", f"{text}; the demo model takes {DEMO_WHEEL.folder_bytes / GIB:.1f} GiB")
    return CheckResult(OK, "memory", text)


def _disk() -> CheckResult:
    from runner.models.demo import DEMO_WHEEL, cache_home

    home = cache_home()
    if (home / "models" / DEMO_WHEEL.folder_name).is_dir():
        return CheckResult(OK, "disk", f"{_free_gib(home)}; the demo model is there")
    parent = next(each for each in (home, *home.absolute().parents) if each.exists())
    wanted_bytes = 2 * DEMO_WHEEL.wheel_bytes + DEMO_WHEEL.folder_bytes
    needs = f"the demo model, which is fetched when first used, needs {wanted_bytes / MIB:,.0f} MiB"
    advice = "make room, or name another folder with RADIXCACHE_HOME"
    if not os.access(parent, os.W_OK):
        return CheckResult(PROBLEM, "disk", f"{home} cannot be written; {needs}: {advice}")
    is_enough = shutil.disk_usage(parent).free >= wanted_bytes
    return CheckResult(
        OK if is_enough else PROBLEM, "disk", f"{_free_gib(parent)}; {needs}{'' if is_enough else f': {advice}'}"
    )


def _free_gib(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / GIB:,.1f} GiB free in {folder}"


def _redis(url: str) -> CheckResult:
    """Whether the server that RADIXCACHE_REDIS names answers. The URL may hold a password, so it is not shown."""
    try:
        from redis import Redis
        from redis.exceptions import RedisError
    except ImportError:
        return CheckResult(
            PROBLEM, "Redis", f"RADIXCACHE_REDIS is set, without its client: pip install '{PACKAGE}[redis]'"
        )
    try:
        client = Redis.from_url(url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S)
        client.ping()
    except (RedisError, OSError) as error:
        return CheckResult(PROBLEM, "Redis", f"the server of RADIXCACHE_REDIS does not answer ({type(error).__name__})")
    except ValueError:
        return CheckResult(PROBLEM, "Redis", "RADIXCACHE_REDIS is no URL; wanted redis://HOST:PORT/NUMBER")
    return CheckResult(OK, "Redis", "the server of RADIXCACHE_REDIS answers")
