"""ARCHFLASH_SDPA=1 reaches programs that do not import archflash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import torch

print("archflash" in sys.modules, torch.nn.attention.current_flash_attention_impl())
"""


@pytest.mark.parametrize(
    ("value", "printed"),
    [(None, "False None"), ("0", "False None"), ("1", "True archflash"), ("yes", "False None")],
)
def test_torch_imports_archflash_where_it_is_asked_for(value: str | None, printed: str) -> None:
    pytest.importorskip("torch.nn.attention._registry", reason="this torch has no registry")
    environment = {name: x for name, x in os.environ.items() if name != "ARCHFLASH_SDPA"}
    if value is not None:
        environment["ARCHFLASH_SDPA"] = value
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == printed
