from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNNER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
