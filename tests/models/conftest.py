"""The demo model, loaded once for all tests that ask it something; skipped only where it cannot be fetched."""

import pytest

from runner.models.load import FetchError, LoadedModel, load_model


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    try:
        return load_model("demo")
    except FetchError as error:
        pytest.skip(str(error))
