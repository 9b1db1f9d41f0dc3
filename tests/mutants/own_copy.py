"""pytest plugin: end the run unless the tests import the code that lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    import policies
    import radixcache
    import runner

    root = session.config.rootpath.resolve()
    for package in (policies, radixcache, runner):
        path = Path(package.__file__ or "").resolve()
        if not path.is_relative_to(root):
            pytest.exit(f"{path} is imported; wanted the one in {root}.", returncode=3)
