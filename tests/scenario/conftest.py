"""What several scenarios share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from runner.tiny import tiny_model


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture
def exact_allocations() -> Iterator[None]:
    """Without MLX's pool of freed buffers, which hands out larger ones than asked for: every allocation shows."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)
