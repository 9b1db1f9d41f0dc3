"""LayerCache of mlx-lm's deepseek_v41; with an mlx-lm before 0.32, a class that no model has."""

try:
    from mlx_lm.models.deepseek_v41 import LayerCache as LayerCache
except ImportError:

    class LayerCache:  # type: ignore[no-redef]
        """What no cache is."""
