"""pytest plugin: end the run unless the tests import the code that lies beside them, and never shrink an example.

Shrinking the example that fails takes minutes for a walk, and a mutant needs no small example.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import Phase, settings

PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", settings.get_profile("ci"), phases=PHASES, report_multiple_bugs=False)


def pytest_sessionstart(session: pytest.Session) -> None:
    import policies
    import radixcache
    import runner

    root = session.config.rootpath.resolve()
    for package in (policies, radixcache, runner):
        path = Path(package.__file__ or "").resolve()
        if not path.is_relative_to(root):
            pytest.exit(f"{path} is imported; wanted the one in {root}.", returncode=3)
