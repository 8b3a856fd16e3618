"""The examples of the repository, run as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .executors import executor

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("kernel", executor().kernels("fp8_cache"))
def test_a_model_generates_the_same_tokens_from_a_paged_cache(
    kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("decode", EXAMPLES / "decode.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    asked = ["--check", "--steps", "5", "--device", executor().device, "--implementation", kernel]
    assert module.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2] == "the same tokens as without a cache"
