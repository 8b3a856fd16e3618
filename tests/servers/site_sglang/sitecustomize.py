"""Lets SGLang run without a GPU. Python imports this at its start where this folder is in
PYTHONPATH, so that it works in all of SGLang's processes.

sgl_kernel has no build for a CPU: here it is a module with what speculative decoding needs, all
other functions of which raise when they are called. PyPI's torchvision does not load beside a torch
for CPUs unless two operators exist.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class _Missing(ModuleType):
    """A module of sgl_kernel, or anything in it."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import sgl_kernel_drafts

        if hasattr(sgl_kernel_drafts, name):
            return getattr(sgl_kernel_drafts, name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no build for a CPU")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    _knows_operators = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision" and not self._knows_operators:
            import torch

            self._knows_operators = True
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for operator in ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", schema)
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None  # Python finds all other modules as usual

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
