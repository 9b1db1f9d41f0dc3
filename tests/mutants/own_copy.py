"""pytest plugin: ends the run unless what is tested is the code that lies beside the tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    import policies
    import radixcache

    root = session.config.rootpath.resolve()
    for package in (policies, radixcache):
        path = Path(package.__file__ or "").resolve()
        if not path.is_relative_to(root):
            pytest.exit(f"{path} is imported; wanted the one in {root}.", returncode=3)
