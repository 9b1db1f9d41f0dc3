"""The machine that figures were measured on, and the versions of the packages. This file never imports MLX."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("radixcache", "mlx", "mlx-lm", "numpy", "transformers")


def machine() -> dict[str, Any]:
    """The hardware and the system: nothing that identifies the computer or its owner."""
    return {
        "processor": _processor(),
        "device": _device(),
        "logical_cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of `PACKAGES`; a package that is not installed is `source`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "source"
    return found


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _device() -> str | None:
    """The accelerator that MLX uses; None: MLX is not loaded, or computes on the CPU."""
    mx = sys.modules.get("mlx.core")
    if mx is None or mx.default_device().type == mx.DeviceType.cpu:
        return None
    return str(mx.device_info().get("device_name", mx.default_device()))
