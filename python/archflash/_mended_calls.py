"""Calls of PyTorch's operators that its own kernels are to serve, mended where they would not take
them rightly.

PyTorch chooses its kernels without looking at addresses, at most strides and at the sign of the
scale. On an H200 (torch 2.11, cuDNN 9.19, 2026-11-28) its cuDNN kernel then gave wrong results
without a word, and its flash kernel an illegal access: for rows that do not start at multiples of
16 bytes; for an added mask in another dtype (pytorch/pytorch#191612), or whose last dimension is
strided or broadcast; for a scale of 0 or less; for some numbers of keys
(`_pytorch_faults.hidden_keys`); for a gradient of the output with other strides than that of an
earlier call (`_torch_kernels.gradient_for_cudnn`). Its memory-efficient kernel reads keys and
values beyond their end where a mask has 1 column more than a multiple of 32 and they are expanded
(pytorch/pytorch#191937).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _schemas, _torch_kernels
from archflash._schemas import by_name, by_place

_MASK_COLUMNS = 32  # of a mask, which PyTorch's memory-efficient kernel reads at a time
_CUDNN = "_scaled_dot_product_cudnn_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_TENSORS = ("grad_out", "query", "key", "value", "out")  # whose rows PyTorch's kernels load


class Call:
    """The arguments of a call as PyTorch's own kernel takes them rightly.

    Attributes:
        args, kwargs: those arguments.
        differs: whether they are not the caller's own, or may be for another call that the runtime
            takes for one of the same kind.
    """

    def __init__(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        op = _schemas.find(operator)
        given = by_name(op, *args, **kwargs)
        self._backward = operator.endswith("_backward")
        self._key, self._value = given["key"], given["value"]  # as the caller gave them
        self._factor = 1.0  # of the gradient of q
        a = given.copy()
        by_cudnn = self._backward and operator.startswith(_CUDNN)
        for name in _TENSORS if self._backward else ("query", "key", "value"):
            if name != "grad_out" or not by_cudnn:
                a[name] = _torch_kernels.aligned_for_fused_kernels(a[name])
        if a.get("attn_bias") is not None:
            _mend_mask(operator, a)
        if operator.startswith(_CUDNN) and self._may_differentiate(a):
            _hide_keys(a)
        scale = a.get("scale")
        if scale is not None and not scale > 0 and operator != _EFFICIENT:
            self._factor, a["scale"] = _torch_kernels.positive_scale(scale)
            a["query"] = a["query"] * self._factor
        if by_cudnn:
            tensors = (a["query"], a["key"], a["value"], a.get("attn_bias"))
            kind = _torch_kernels.kind_for_cudnn(*tensors, a["is_causal"])
            strides = a["out"].stride()
            a["grad_out"] = _torch_kernels.gradient_for_cudnn(kind, strides, a["grad_out"])
        self.args, self.kwargs = by_place(op, a)
        self.differs = any(x is not given.get(name) for name, x in a.items())
        self._hidden = a["key"].shape[-2] > self._key.shape[-2]

    def _may_differentiate(self, a: dict[str, Any]) -> bool:
        """Whether the gradients of the call are cuDNN's, and its mask is not the causal one."""
        return (self._backward or a["compute_log_sumexp"]) and not a.get("is_causal")

    def results(self, results: Any) -> Any:
        """What the operator returns, of what PyTorch's own kernel did."""
        if not self.differs:
            return results
        if not self._backward:
            nk = self._key.shape[-2]
            return (*results[:5], nk, *results[6:]) if self._hidden else results
        dq, dk, dv = results[:3]
        if self._factor != 1.0:
            dq = dq * self._factor
        if self._hidden:
            dk, dv = _rows_like(dk, self._key), _rows_like(dv, self._value)
        return (dq, dk, dv, *results[3:])


def _mend_mask(operator: str, a: dict[str, Any]) -> None:
    nk = a["key"].shape[2]
    dtype = a["query"].dtype
    a["attn_bias"] = _torch_kernels.mask_for_fused_kernels(a["attn_bias"], nk, dtype)
    if operator == _EFFICIENT and nk % _MASK_COLUMNS == 1:
        for name in ("key", "value"):
            if 0 in a[name].stride()[:2]:
                a[name] = a[name].contiguous()


def _hide_keys(a: dict[str, Any]) -> None:
    """Adds the keys that cuDNN needs behind the others, in both passes, so that both drop the same
    weights.
    """
    query, key, mask = a["query"], a["key"], a.get("attn_bias")
    more = _torch_kernels.hidden_keys_for_cudnn(query, key)
    if more == 0:
        return
    if mask is None:
        mask = query.new_zeros(1, 1, query.shape[2], key.shape[2])
    hiding = _torch_kernels.with_hidden_keys(key, a["value"], mask, more)
    a["key"], a["value"], a["attn_bias"] = hiding


def _rows_like(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradients of the keys or values that the caller gave, dense in the order of theirs."""
    return torch.empty_like(x).copy_(gradient[..., : x.shape[-2], :])
