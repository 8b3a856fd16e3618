"""What a process keeps between calls is bounded: a server that runs for a month does not grow."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _kvcache
from archflash.integrations._paged import PagedAttention

PACKAGE = Path(archflash.__file__).parent
SOURCES = Path(__file__).parents[2] / "src"

# Tables of a module that no `maxsize` bounds, and why they stay small.
BOUNDED = {
    "_backward_operators._decisions": "emptied at _MOST_DECISIONS",
    "_calibrated._found": "one for each kind of GPU",
    "_dispatch.explain._noted": "one for each reason without its numbers",
    "_kvcache._kinds": "emptied at _MOST",
    "_kvcache._same": "emptied at _MOST",
    "_proofs._warned": "kernels and kinds of GPUs",
    "_torch_kernels._strides_of_plans": "emptied at _MOST_PLANS",
    "compat.__init__._hidden": "modules whose names were taken",
    "compat.__init__._listed": "tables of others that were changed",
    "compat._operators._libraries": "one for each version of the operators",
    "distributed._agree._beside": "as long as the group lives",
    "distributed._agree._given_up": "as long as the group lives",
    "distributed._work._plans": "emptied at _MOST_PLANS",
    "distributed._plan._with_tables": "_MOST_WITH_TABLES",
    "integrations._mask_functions._kinds": "one for each function that makes masks",
    "sim._attention._announced": "one for each kernel",
}
# Arguments of functions with an unbounded `cache` that have few values.
FEW = {"capability", "device", "dtype", "image", "index", "kernel", "kind", "name", "size",
       "torch_version"}  # fmt: skip
# Tables that live as long as the process, of C++.
BOUNDED_NATIVE = {
    ("runtime/execute.cpp", "kernels"), ("runtime/execute.cpp", "libraries"),  # of the package
    ("runtime/registry.cpp", "sorted"), ("runtime/registry.cpp", "parsed"),
    ("runtime/registry.cpp", "images"), ("runtime/registry.cpp", "names"),
    ("runtime/known_devices.cpp", "table"), ("runtime/known_devices.cpp", "devices"),
    ("runtime/call_path.cpp", "last"),  # one text
    ("runtime/orders.cpp", "instance"),  # of gradients: one for each GPU and forced kernel
}  # fmt: skip


def test_every_table_of_a_module_is_bounded() -> None:
    """A new one needs a bound, and a line in `BOUNDED` that says which."""
    tables, cached = set(), {}
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        if module.startswith("verify."):
            continue  # a process of its own
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            elif isinstance(node, ast.AnnAssign):
                target = node.target
            else:
                continue
            value = ast.unparse(node.value) if node.value else ""
            if re.fullmatch(r"\{\}|\[\]|set\(\)|(weakref|collections)\.\w+\(.*\)", value):
                tables.add(f"{module}.{ast.unparse(target)}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                how = {ast.unparse(x).removeprefix("functools.") for x in node.decorator_list}
                if how & {"cache", "lru_cache(None)", "lru_cache(maxsize=None)"}:
                    cached[f"{module}.{node.name}"] = {x.arg for x in node.args.args}
    assert tables == set(BOUNDED)
    assert {name: given - FEW for name, given in cached.items() if given - FEW} == {}


def test_every_table_of_the_runtime_is_bounded() -> None:
    pattern = r"static (?:const )?(?:auto&|std::[\w:<>, ]+) (\w+) ?[;=][^;]*"
    kept = set()
    for folder in ("runtime", "torch_operators"):
        for file in (SOURCES / folder).rglob("*.cpp"):
            for found in re.finditer(pattern, file.read_text()):
                if re.search(r"std::(\w*map|vector|list|deque|\w*set|string)\b", found[0]):
                    kept.add((file.relative_to(SOURCES).as_posix(), found[1]))
    assert kept == BOUNDED_NATIVE


def test_plans_of_many_shapes_are_not_kept() -> None:
    most = 1024
    k = torch.zeros(1, 1, 8, 8)
    for rows in range(1, most + 50):
        archflash.attention(torch.zeros(1, 1, rows, 8), k, k)
    assert native.cache_info()[2] <= most


def test_options_of_layers_are_not_kept_for_ever() -> None:
    for i in range(3 * _kvcache._MOST):
        _kvcache.kind_of(_kvcache.values_of(scale=1.0 + i / 7))
    assert len(_kvcache._same) <= _kvcache._MOST
    assert len(_kvcache._kinds) <= _kvcache._MOST
    # Numbers are not given twice: a batch knows its calls by them.
    first, again = (_kvcache.kind_of(_kvcache.values_of(scale=0.25)) for _ in range(2))
    assert first == again >= 3 * _kvcache._MOST


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_layer_does_not_keep_a_cache_alive(cache_dtype: str) -> None:
    layer = PagedAttention(2, 8, 1.0, kv_cache_dtype=cache_dtype)
    dtype = torch.uint8 if cache_dtype == "fp8" else torch.float32
    cache = torch.zeros(3, 2, 4, 16, dtype=dtype)
    keys, values = layer.caches(cache)
    assert layer.caches(cache)[0] is keys
    keys.view(torch.uint8).fill_(1)
    assert cache.view(torch.uint8).flatten()[0] == 1  # the same memory
    gone, views = weakref.ref(cache), [weakref.ref(x) for x in (keys, values)]
    del cache, keys, values
    gc.collect()
    assert gone() is None
    assert [x() for x in views] == [None, None]
    other = torch.zeros(3, 2, 4, 16, dtype=dtype)
    assert layer.stored_caches(other)[0].data_ptr() == other.data_ptr()
