"""Tests of the kernels on a GPU: `make test-gpu`. Without one, every test skips and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from archflash import _archflash as _native
from archflash import _dispatch, _user_tables

from .gpu_cases import no_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def no_tables_of_this_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `archflash verify` and `calibrate` found here changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_user_tables.VARIABLE, str(tmp_path_factory.mktemp("tables")))
        yield


@pytest.fixture
def fresh_dispatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No decision is cached and no fallback has been warned of."""
    monkeypatch.setattr(_dispatch.explain, "_noted", set())
    _native.clear_cache()
    yield
    _native.clear_cache()
