"""Fixtures of the engine tests."""

from collections.abc import Iterator

import pytest
from support.engine_pair import Pair, make_pair


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """One engine at a time, shared by a module's tests."""
    made = make_pair(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")
    yield made
    made.engine.close()
    made.trainer.close()
