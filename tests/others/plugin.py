"""What pytest does otherwise in the processes of `python -m tests.others`: it prepares the
library's names, draws a sample of the tests, ends after a while and counts.
"""

from __future__ import annotations

import ast
import collections
import importlib
import importlib.util
import json
import os
import random
import sys
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import archflash
import archflash.compat
import tests
from tests.others import flashinfer_face
from tests.others.suites import SUITES

TOLD = json.loads(os.environ["ARCHFLASH_OTHERS"])
SUITE = next(suite for suite in SUITES if suite.name == TOLD["suite"])
FOLDER = Path(TOLD["folder"])
HELPERS = "torch.testing._internal"
REFUSALS = (archflash.UnsupportedError, archflash.ForcedImplementationError)


class _Anything(ModuleType):
    """A module beside attention that is not there: every name in it is a function that gives an
    empty list.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: []


def _stand_in(*names: str) -> None:
    for name in names:
        sys.modules[name] = _Anything(name)


def prepare() -> None:
    """Gives the library's names to what serves it. Their folder of tests becomes a part of ours:
    both are called `tests`.
    """
    tests.__path__.append(str(FOLDER / "tests"))
    if importlib.util.find_spec("scipy") is None:
        _stand_in("scipy", "scipy.stats")  # for tests of dropout that are not ours to run
    if SUITE.serve == "compat":
        archflash.compat.install(replace=True)
        if SUITE.name.startswith("fa4"):
            cute = sys.modules["flash_attn.cute"]
            cute.__path__ = [str(FOLDER / "flash_attn" / "cute")]  # for their helper `testing`
            _stand_in("flash_attn.cute.cache_utils")
            for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla"):
                setattr(cute, name, None)
        _stand_in("rich", "rich.console", "rich.table")
    elif SUITE.serve == "face":
        flashinfer_face.install()
        _stand_in("tests.test_helpers.jit_utils", "tests.test_helpers.utils_fp4")
        _stand_in("flashinfer.fp4_quantization")
    elif not TOLD["alone"]:
        archflash.enable()
    if SUITE.library == "pytorch":
        _fill_in(SUITE.file_in(FOLDER))
    if SUITE.library == "xformers":
        # Without its own extension, which has kernels of its own, it would skip PyTorch's, too.
        common: Any = importlib.import_module("xformers.ops.fmha.common")
        common._built_with_cuda = True


def _fill_in(file: Path | None) -> None:
    """Names of PyTorch's helpers for tests that this PyTorch does not have yet: decorators that
    change nothing, and conditions that do not hold.
    """

    def unchanged(*args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else lambda test: test

    for node in ast.walk(ast.parse(file.read_text() if file else "")):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(HELPERS):
            try:
                module = importlib.import_module(str(node.module))
            except ImportError:
                module = sys.modules[str(node.module)] = ModuleType(str(node.module))
            for name in (x.name for x in node.names if not hasattr(module, x.name)):
                setattr(module, name, False if name.isupper() else unchanged)


prepare()


class Counting:
    """Samples and counts."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: dict[str, str] = {}
        self.end = float("inf")

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        calls = metafunc._calls  # there are some 100,000 of a function: no item is made of most
        if TOLD["only"] or len(calls) <= TOLD["sample"]:
            return
        name = metafunc.function.__name__
        calls = [call for call in calls if _is_of_suite(f"{name}[{call.id}]")]
        chance = random.Random(name)
        metafunc._calls = chance.sample(calls, min(len(calls), TOLD["sample"]))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if _is_of_suite(item.nodeid.split("::", 1)[-1])]
        if TOLD["only"]:
            kept = [item for item in kept if item.nodeid in set(TOLD["only"])]
        else:
            by_function = collections.defaultdict(list)
            for item in kept:
                by_function[_function_of(item)].append(item)
            kept = []
            for name, its in by_function.items():
                kept += random.Random(name).sample(its, min(len(its), TOLD["sample"]))
            random.Random(1).shuffle(kept)
            kept = kept[TOLD["share"] :: TOLD["shares"]]
        items[:] = kept
        self.end = time.monotonic() + TOLD["seconds"]
        self.counts["left"] = len(kept)
        self.write()

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if time.monotonic() > self.end else None  # done, without a report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if call.when == "teardown":
            self.counts["left"] -= 1
        if report.skipped:  # also where a failure is expected
            self.counts["skipped"] += 1
        elif report.failed:
            error = call.excinfo.value
            if isinstance(error, REFUSALS):
                self.counts["refused"] += 1
            else:
                lines = str(error).strip().splitlines() or [""]
                self.failures[item.nodeid] = f"{type(error).__name__}: {lines[0]}"[:300]
            if torch.cuda.is_available() and "CUDA error" in str(error):
                self.end = 0.0  # the process is of no use any more
        elif call.when == "call":
            self.counts["passed"] += 1
        self.write()
        return report

    def write(self) -> None:
        """The counts so far: the process may be ended in the middle of a test."""
        names = ("passed", "refused", "skipped", "left")
        result = {name: self.counts[name] for name in names} | {"failures": self.failures}
        Path(TOLD["result"]).write_text(json.dumps(result))


def _is_of_suite(name: str) -> bool:
    if SUITE.only and not any(x in name for x in SUITE.only):
        return False
    if torch.cuda.is_available() and "_cpu" in name.lower():
        return False
    return not any(x in name for x in SUITE.but)


def _function_of(item: pytest.Item) -> str:
    """The function of a case. PyTorch's cases are methods, whose names begin with that of their
    function.
    """
    if item.cls is None or not issubclass(item.cls, unittest.TestCase):
        return str(getattr(item, "originalname", item.name))
    return f"{item.cls.__name__}.{'_'.join(item.name.split('_')[:4])}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Counting(), "others-counting")
