"""archflash.integrations.sglang without SGLang. tests/servers has what needs the package."""

from __future__ import annotations

import sys

import pytest

from archflash.integrations import sglang


def test_another_version_of_sglang_goes_on_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.warns(UserWarning, match="no backend of this SGLang"):
        sglang.register()
