"""The caches that replay compares, by name. This file imports MLX no sooner than a cache is opened.

Each backend answers the same call: `begin(prompt)` gives a run standing at the deepest offset the cache could restore,
and leaving its block stores what the request evaluated. All else (chunks, decode, timing) is the pipeline's.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.models.load import LoadedModel
    from runner.replay.backends.backend import Backend

CACHE_NAMES = ("none", "single", "mlx-lm", "radix")


def open_backend(
    name: str,
    loaded: "LoadedModel",
    *,
    budget_bytes: int,
    policy: str,
    exact_step_size: int | None = None,
    disk: str | None = None,
    disk_bytes: int = 0,
) -> "Backend":
    """Make an empty cache of that name. `none` and `single` hold one request at a time and have no use for a budget.

    Args:
        exact_step_size: make the radix cache an exact one, on the grid of chunks of that many tokens.
        disk, disk_bytes: have the radix cache keep what it stores in this folder too, and so many bytes of it.

    Raises:
        ValueError: the name is not in CACHE_NAMES.
        StoreError: the folder cannot be used.
    """
    # Imported here: the command line wants the names without waiting for MLX.
    if name == "none":
        from runner.replay.backends.none import NoCache

        return NoCache(loaded.model)
    if name == "single":
        from runner.replay.backends.single import SinglePrefix

        return SinglePrefix(loaded.model)
    if name == "mlx-lm":
        from runner.replay.backends.mlx_lm import LRUPrompts

        return LRUPrompts(loaded.model, loaded.tokenizer, budget_bytes=budget_bytes)
    if name == "radix":
        from runner.replay.backends.radix import RadixPrefixes

        return RadixPrefixes(
            loaded.model,
            budget_bytes=budget_bytes,
            policy=policy,
            exact_step_size=exact_step_size,
            disk=disk,
            disk_bytes=disk_bytes,
        )
    raise ValueError(f"cache {name!r} is not known. Known: {', '.join(CACHE_NAMES)}.")
