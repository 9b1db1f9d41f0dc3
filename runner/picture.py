"""Pictures: a figure of its own, and its bytes as PNG, SVG or PDF. Matplotlib is imported when one is asked for.

This file never imports MLX.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120
FORMATS = ("png", "svg", "pdf")


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure. It is not pyplot's: nothing global is set, and no display is looked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture_bytes(figure: Figure, file_format: str = "png") -> bytes:
    """Draw a figure. The same figure gives the same bytes: no date, and ids that do not change."""
    from matplotlib import rc_context

    image = io.BytesIO()
    with rc_context({"svg.hashsalt": "radixcache"}):
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(image, format=file_format, dpi=DPI, metadata=metadata)
    return image.getvalue()


def picture_format(path: Path) -> str:
    """The format that a file's suffix asks for, PNG where it has none.

    Raises:
        ValueError: another format.
    """
    suffix = path.suffix.lower().removeprefix(".") or "png"
    if suffix not in FORMATS:
        raise ValueError(f"{path}: a picture in format {suffix!r}; wanted .png, .svg or .pdf.")
    return suffix
