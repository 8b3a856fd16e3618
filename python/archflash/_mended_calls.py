"""Calls of PyTorch's operators that its own kernels are to serve, mended where they would not take
them rightly.

PyTorch chooses its kernels without looking at addresses, at most strides and at the sign of the
scale. On an H200 (torch 2.11, cuDNN 9.19, 2026-11-28) its cuDNN kernel then gave wrong results
without a word, and its flash kernel an illegal access: for rows that do not start at multiples of
16 bytes; for an added mask in another dtype (pytorch/pytorch#191612), or whose last dimension is
strided or broadcast; for a scale of 0 or less; for some numbers of keys
(`_pytorch_faults.hidden_keys`). Its memory-efficient kernel reads keys and values beyond their end
where a mask has 1 column more than a multiple of 32 and they are expanded
(pytorch/pytorch#191937).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _torch_kernels

_MASK_COLUMNS = 32  # of a mask, which PyTorch's memory-efficient kernel reads at a time
_CUDNN = "_scaled_dot_product_cudnn_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN_BACKWARD = "_scaled_dot_product_cudnn_attention_backward"
_PLACE_OF_MASK = {_CUDNN: 3, _EFFICIENT: 3, _CUDNN_BACKWARD: 8}


class Call:
    """The arguments of a call as PyTorch's own kernel takes them rightly.

    Attributes:
        args, kwargs: those arguments.
        differs: whether they are not the caller's own, or may be for another call that the runtime
            takes for one of the same kind.
    """

    def __init__(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = [*args], kwargs
        self._backward = operator.endswith("_backward")
        first = 1 if self._backward or operator.endswith("_inplace") else 0
        self._query, self._key, self._value = first, first + 1, first + 2
        self._given_key = args[self._key]
        self._given_value = args[self._value]
        self._factor = 1.0  # of the gradient of q
        for i in range(5) if self._backward else (self._query, self._key, self._value):
            self.args[i] = _torch_kernels.aligned_for_fused_kernels(args[i])
        place = _PLACE_OF_MASK.get(operator)
        masked = place is not None and len(args) > place and args[place] is not None
        if masked and place is not None:
            self._read_mask(operator, place)
        if place is not None and self._may_differentiate_by_cudnn(operator):
            self._hide_keys(place)
        scale = kwargs.get("scale")
        if scale is not None and not scale > 0 and operator != _EFFICIENT:
            self._factor, positive = _torch_kernels.positive_scale(scale)
            self.args[self._query] = self.args[self._query] * self._factor
            self.kwargs = kwargs | {"scale": positive}
        # The runtime reads no mask of a backward pass.
        self.differs = masked and self._backward
        self.differs |= any(x is not given for x, given in zip(self.args, args, strict=True))

    def _read_mask(self, operator: str, place: int) -> None:
        query, key, value = (self.args[i] for i in (self._query, self._key, self._value))
        nk = key.shape[2]
        self.args[place] = _torch_kernels.mask_for_fused_kernels(self.args[place], nk, query.dtype)
        if operator == _EFFICIENT and nk % _MASK_COLUMNS == 1:
            for i, x in ((self._key, key), (self._value, value)):
                if 0 in x.stride()[:2]:
                    self.args[i] = x.contiguous()

    def _may_differentiate_by_cudnn(self, operator: str) -> bool:
        """Whether the gradients of the call are cuDNN's, and its mask is not the causal one."""
        if operator == _CUDNN_BACKWARD:
            return not self.args[14]
        is_causal = len(self.args) > 6 and self.args[6]
        return operator == _CUDNN and self.args[4] and not is_causal

    def _hide_keys(self, place: int) -> None:
        """Adds the keys that cuDNN needs behind the others, in both passes, so that both drop the
        same weights.
        """
        query, key, value = (self.args[i] for i in (self._query, self._key, self._value))
        more = _torch_kernels.hidden_keys_for_cudnn(query, key)
        if more == 0:
            return
        mask = self.args[place]
        if mask is None:
            mask = query.new_zeros(1, 1, query.shape[2], key.shape[2])
        hiding = _torch_kernels.with_hidden_keys(key, value, mask, more)
        self.args[self._key], self.args[self._value], self.args[place] = hiding

    def results(self, results: Any) -> Any:
        """What the operator returns, of what PyTorch's own kernel did."""
        if not self.differs:
            return results
        nk = self._given_key.shape[-2]
        hidden = self.args[self._key].shape[-2] > nk
        if not self._backward:
            return (*results[:5], nk, *results[6:]) if hidden else results
        dq, dk, dv = results[:3]
        if self._factor != 1.0:
            dq = dq * self._factor
        if hidden:
            dk, dv = _rows_like(dk, self._given_key), _rows_like(dv, self._given_value)
        return (dq, dk, dv, *results[3:])


def _rows_like(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradients of the keys or values that the caller gave, dense in the order of theirs."""
    return torch.empty_like(x).copy_(gradient[..., : x.shape[-2], :])
