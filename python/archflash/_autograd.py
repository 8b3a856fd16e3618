"""Eager calls of archflash.attention whose gradients are needed and that a kernel serves: one node
of autograd, each pass of which is one call of the runtime.

Whatever is more than that goes through the operators of `_ops`: compiling, tracing, modes,
transforms and subclasses in the forward pass; in the backward pass these, gradients that are to be
differentiated themselves, and what the runtime leaves to Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _ops_backward, _options
from archflash._eager import is_eager
from archflash._gradients import asks_for_deterministic, wants_deterministic

_is_grad_enabled = torch.is_grad_enabled
# The places of options among the values of a call.
_SINKS, _MASK, _RETURN_LSE = map(_options.OF_ATTENTION.index, ("sinks", "attn_mask", "return_lse"))
_WINDOW = _options.OF_ATTENTION.index("window")


class ArchflashAttention(torch.autograd.Function):
    """The node, in profiles ArchflashAttentionBackward. What `forward` returns was computed before,
    in the call that reads the tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, recorded: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *_: Any
    ) -> Any:
        out, lse, values, implementation, places = recorded
        # Tensors are saved by autograd alone, which tells whether they were changed.
        given = [values[i] for i in places]
        if places:
            values = tuple(None if i in places else x for i, x in enumerate(values))
        if isinstance(values[_WINDOW], list):  # which its owner may change before the backward pass
            values = (*values[:_WINDOW], tuple(values[_WINDOW]), *values[_WINDOW + 1 :])
        ctx.call = (values, places, implementation, asks_for_deterministic())
        ctx.save_for_backward(q, k, v, out, lse, *given)
        ctx.set_materialize_grads(False)
        return (out, lse) if values[_RETURN_LSE] else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        values, places, implementation, deterministic = ctx.call
        q, k, v, out, lse, *given = ctx.saved_tensors
        if places:
            values = list(values)
            for i, x in zip(places, given, strict=True):
                values[i] = x
            values = tuple(values)
        needed = ctx.needs_input_grad
        if dout is None:
            dout = torch.zeros_like(out)
        found: Any = NotImplemented
        if not _is_grad_enabled() and is_eager():
            found = _native.attention_backward(
                dout, q, k, v, out, lse, dlse, values, implementation, None, None, None, False,
                needed[5], deterministic or wants_deterministic(), False,
            )  # fmt: skip
        if found is NotImplemented:
            names = ("q", "k", "v", "sinks", "attn_mask")
            options = dict(zip(_options.OF_ATTENTION, values, strict=True)) | {"return_lse": True}
            by_name = _ops_backward.gradients(
                {"q": q, "k": k, "v": v, "implementation": implementation}
                | _options.to_operator(_options.with_python_numbers(options)),
                (out, lse), (dout, dlse), {n for n, x in zip(names, needed[1:], strict=True) if x},
                deterministic,
            )  # fmt: skip
            return (None, *(by_name.get(name) for name in names))
        dq, dk, dv, dsinks, dmask = found
        if dsinks is not None:
            dsinks = dsinks.to(values[_SINKS].dtype)
        if dmask is not None:
            mask = values[_MASK]
            dmask = dmask.reshape(mask.shape).to(mask.dtype)
        return None, dq, dk, dv, dsinks, dmask


# The function in C++ behind `apply`, which looks for transforms of torch.func first: the runtime
# records no call inside of one.
_apply: Any = super(torch.autograd.Function, ArchflashAttention).apply


def _record(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: tuple[Any, ...],
    implementation: str,
    places: tuple[int, ...],
) -> Any:
    """What a call returns whose output and log-sum-exp a kernel has computed: the same, recorded by
    autograd. `places`: those of the values that are tensors.
    """
    recorded = (out, lse, values, implementation, places)
    return _apply(recorded, q, k, v, values[_SINKS], values[_MASK])


_native.set_record(_record)
