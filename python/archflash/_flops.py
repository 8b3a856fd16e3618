"""What torch.utils.flop_counter.FlopCounterMode counts for archflash's operators.

It is what PyTorch counts for its own attention operators of the same sizes: masks, the causal one
included, take nothing away, and packed sequences count by their lengths where these can be read.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER = "torch.utils.flop_counter"


def _of_forward(*given: Any, **named: Any) -> int:
    """Of archflash::attention: q k^T, and the weights times v."""
    call = _by_name("attention", given, named)
    heads, pairs = _heads_and_pairs(call)
    return int(2 * heads * pairs * (call["q"].shape[-1] + call["v"].shape[-1]))


def _of_backward(*given: Any, **named: Any) -> int:
    """Of archflash::attention_backward: the scores once more, and two products for each of the two
    of the forward pass.
    """
    call = _by_name("attention_backward", given, named)
    heads, pairs = _heads_and_pairs(call)
    return int(2 * heads * pairs * (3 * call["q"].shape[-1] + 2 * call["v"].shape[-1]))


def _of_cache(*given: Any, **named: Any) -> int:
    """Of archflash::attention_with_kvcache: each sequence counts the keys that it has after the
    append or, where its length cannot be read, those that it has room for.
    """
    call = _by_name("attention_with_kvcache", given, named)
    q, k_cache, v_cache, lengths = (call[x] for x in ("q", "k_cache", "v_cache", "cache_seqlens"))
    rows = 1 if call["layout"] == "bnhd" else 2
    lists = call.get("key_indices")
    if lists is not None:
        pairs = q.shape[0] * q.shape[rows] * lists.shape[3]
        qv = call.get("qv")  # as wide as V
        dv = v_cache.shape[-1] if qv is None else qv.shape[-1]
        of_scores = q.shape[-1] + (0 if qv is None else dv)
        return int(2 * q.shape[3 - rows] * pairs * (of_scores + dv))
    table, new, cu_seqlens = (call.get(x) for x in ("page_table", "k_new", "cu_seqlens_q"))
    capacity = k_cache.shape[rows] * (1 if table is None else table.shape[1])
    added = 0 if new is None else new.shape[rows]
    batch = lengths.shape[0]
    nk = [capacity] * batch
    if _is_readable(lengths):
        nk = [min(max(n + added, 0), capacity) for n in lengths.tolist()]
    if cu_seqlens is None:
        heads, nq = q.shape[3 - rows], [q.shape[rows]] * batch
    else:
        heads, nq = q.shape[1], _lengths(cu_seqlens, call.get("max_seqlen_q"), q.shape[0])
    pairs = sum(one * other for one, other in zip(nq, nk, strict=True))
    of_scores = q.shape[-1] + (0 if call.get("qv") is None else v_cache.shape[-1])
    return int(2 * heads * pairs * (of_scores + v_cache.shape[-1]))


def _by_name(operator: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, however they came."""
    schema = getattr(torch.ops.archflash, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, given, strict=False)) | named


def _heads_and_pairs(call: dict[str, Any]) -> tuple[int, int]:
    """The query heads, and how many pairs of a query and a key each head has in all sequences."""
    q, k = call["q"], call["k"]
    if call.get("cu_seqlens_q") is not None:
        nq = _lengths(call["cu_seqlens_q"], call.get("max_seqlen_q"), q.shape[0])
        nk = _lengths(call["cu_seqlens_k"], call.get("max_seqlen_k"), k.shape[0])
        return q.shape[1], sum(one * other for one, other in zip(nq, nk, strict=True))
    rows = 1 if call["layout"] == "bnhd" else 2
    lists = call.get("key_indices")
    keys = k.shape[rows] if lists is None else lists.shape[3]
    return q.shape[3 - rows], q.shape[0] * q.shape[rows] * keys


def _lengths(cu_seqlens: Tensor, longest: int | None, total: int) -> list[int]:
    """The lengths of packed sequences or, where they cannot be read, the longest that there may be
    for each.
    """
    if _is_readable(cu_seqlens):
        lengths: list[int] = cu_seqlens.diff().clamp(min=0).tolist()
        return lengths
    return [total if longest is None else longest] * (cu_seqlens.shape[0] - 1)


def _is_readable(x: Tensor) -> bool:
    """Whether the host can read the values of a tensor now."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta":
        return False  # a fake tensor, or another one that stands for something else
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


_FORMULAS: dict[str, Callable[..., int]] = {
    "attention": _of_forward,
    "attention_backward": _of_backward,
    "attention_with_kvcache": _of_cache,
}


# What saves tensors for autograd elsewhere: a checkpoint, for example. Not in torch 2.6.
_saving_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def are_counted() -> bool:
    """Whether a FlopCounterMode watches the calls of this thread. Not inside of a checkpoint, where
    PyTorch's own operations are counted: one that is computed again behind the counter has to save
    the same tensors then.
    """
    counter: Any = sys.modules.get(_COUNTER)
    if counter is None or _saving_hooks(True) is not None:
        return False
    modes = (counter.FlopCounterMode, getattr(counter, "_FlopCounterMode", ()))
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())


def _register(counter: Any) -> None:
    for name, formula in _FORMULAS.items():
        operator = getattr(torch.ops.archflash, name)
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(_without_result(formula))


def _without_result(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula as PyTorch calls it, with the results of the call, too."""
    return lambda *args, out_val=None, **kwargs: formula(*args, **kwargs)


class _WhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Registers the formulas as soon as PyTorch's module is imported. A counter copies PyTorch's
    table when it is made, and importing that module here would load Triton.
    """

    _asks_others = False  # who loads the module

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks_others = False
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if (spec := module.__spec__) is not None:
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        _register(module)


def register() -> None:
    """Registers the formulas: now, or when PyTorch's module is imported."""
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _register(counter)
    else:
        sys.meta_path.insert(0, _WhenImported())
