"""What an issue needs to know about the installation: versions, system, machine, device. Paths in it begin with ~."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from runner.blas import blas_name
from runner.origin import machine, versions
from runner.text import GIB


def version_report() -> str:
    """One `name  value` line each, to be pasted into an issue."""
    about = machine()
    rows = {
        **versions(),
        "system": _system(),
        "machine": f"{platform.machine()}, {about['processor']}",
        "CPUs": about["logical_cores"],
        "memory": f"{about['memory_bytes'] / GIB:.1f} GiB",
        "MLX device": _device(),
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


def _device() -> str:
    try:
        return device_name()
    except (ImportError, RuntimeError) as error:
        return without_home(f"none: {type(error).__name__}: {error}")


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{platform.system()} {platform.release()}" + (f", {name}" if name else "")
