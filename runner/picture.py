"""Pictures as PNG, SVG or PDF. This file never imports MLX, and imports matplotlib only to draw.

The extra [plot] brings matplotlib. Commands ask `can_draw` before they start.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120
ENDINGS = (".png", ".svg", ".pdf")


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def picture_format(path: Path) -> str:
    """The format that a file's ending names; PNG if there is no ending."""
    return path.suffix.lower().removeprefix(".") or "png"


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure without pyplot: nothing global is set, and no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture_bytes(figure: Figure, file_format: str = "png") -> bytes:
    """Draw a figure. Equal figures give equal bytes: no date, and fixed ids."""
    from matplotlib import rc_context

    image = io.BytesIO()
    with rc_context({"svg.hashsalt": "radixcache"}):
        metadata = {"Date": None} if file_format == "svg" else None
        figure.savefig(image, format=file_format, dpi=DPI, metadata=metadata)
    return image.getvalue()
