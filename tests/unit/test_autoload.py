"""ARCHFLASH_SDPA=1 reaches programs that do not import archflash."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

import archflash_autoload

PROGRAM = """
import sys
import torch

print("archflash" in sys.modules, torch.nn.attention.current_flash_attention_impl())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("value", "printed"), [("1", "True archflash"), ("yes", "False None")])
def test_torch_imports_archflash_where_it_is_asked_for(value: str, printed: str) -> None:
    pytest.importorskip("torch.nn.attention._registry", reason="this torch has no registry")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"ARCHFLASH_SDPA": value},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == printed


def test_nothing_is_imported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "archflash", None)  # an import of it fails
    monkeypatch.setenv("ARCHFLASH_SDPA", "1")
    with pytest.warns(UserWarning, match="archflash does not serve attention"):
        archflash_autoload.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in ("0", ""):
            monkeypatch.setenv("ARCHFLASH_SDPA", value)
            archflash_autoload.load()
        monkeypatch.delenv("ARCHFLASH_SDPA")
        archflash_autoload.load()
