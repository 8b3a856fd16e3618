"""The cases of FlashMLA's three scripts of tests, as tests of pytest. Their lists are taken from
the scripts, without those that time.
"""

from __future__ import annotations

import ast
import copy
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
DEFAULTS = torch.get_default_dtype(), torch.get_default_device()


def _lists(script: Any, inside: ast.AST) -> Iterator[Any]:
    """The cases of the lists that this part of a script assigns."""
    names = dict(vars(script))
    for node in ast.walk(inside):
        target = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if target.startswith(("correctness_cases", "corner_cases")):
            exec(compile(ast.Module([node], []), script.__file__, "exec"), names)
            yield names[target]


def _cases() -> Iterator[Any]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        dense = importlib.import_module("test_flash_mla_dense_decoding")
        tree = ast.parse(Path(dense.__file__ or "").read_text())
        main = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "main")
        for case in itertools.chain(*_lists(dense, main)):
            yield pytest.param(dense.test_flash_mla, case, id=f"dense-{case}")
        sparse = importlib.import_module("test_flash_mla_sparse_decoding")
        for raw in sparse.gen_testcase():
            if not raw.num_runs:
                case = raw.to_test_param()
                yield pytest.param(sparse.test_flash_mla, case, id=f"sparse-decoding-{raw}")
        prefill = importlib.import_module("test_flash_mla_sparse_prefill")
        tree = ast.parse(Path(prefill.__file__ or "").read_text())
        for case in itertools.chain(*_lists(prefill, tree.body[-1])):
            yield pytest.param(prefill.run_test, case, id=f"sparse-prefill-{case}")
    finally:
        torch.set_default_dtype(DEFAULTS[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    by_kind: dict[str, list[Any]] = {}
    for case in _cases():
        by_kind.setdefault(case.id.split("Test")[0].split("Raw")[0], []).append(case)
    name = metafunc.function.__name__.removeprefix("test_").replace("_", "-")
    metafunc.parametrize(("run", "case"), by_kind[f"{name}-"])


@pytest.fixture
def on_gpu() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda" if GPU else "cpu")
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(DEFAULTS[0])


def _check(run: Any, case: Any) -> None:
    answer = run(copy.deepcopy(case))
    assert answer is None or getattr(answer, "is_correct", answer)


def test_dense(run: Any, case: Any, on_gpu: None) -> None:
    _check(run, case)


def test_sparse_decoding(run: Any, case: Any, on_gpu: None) -> None:
    _check(run, case)


def test_sparse_prefill(run: Any, case: Any, on_gpu: None) -> None:
    _check(run, case)
