"""What GET /v1/models lists: models in the hub's cache that look like mlx-lm's, and the one that is served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

#: A repository without one of these is no model of mlx-lm's, mlx_lm.server says.
FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}


def list_models(served: str | None, downloaded: Sequence[str], only: str | None = None) -> dict[str, Any]:
    """List models in OpenAI's form, as mlx_lm.server does.

    Args:
        served: what the server was started with; a folder is listed by its whole path.
        downloaded: repositories in the hub's cache.
        only: leave out every repository but this one.
    """
    names = [repository for repository in downloaded if only in (None, repository)]
    if served:
        name = str(Path(served).resolve()) if Path(served).exists() else served
        names += [name] if name not in names else []
    created_s = int(time.time())
    return {"object": "list", "data": [{"id": name, "object": "model", "created": created_s} for name in names]}


def downloaded_models() -> list[str]:
    """The hub's repositories that are there and look like mlx-lm's."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repository.repo_id
        for repository in repositories
        if repository.repo_type == "model"
        and "main" in repository.refs
        and FILES.issubset(file.file_path.name for file in repository.refs["main"].files)
    )
