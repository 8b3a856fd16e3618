"""Eager calls of archflash.attention whose gradients are needed and that a kernel serves: one node
of autograd, each pass of which is one call of the runtime. Where the output alone is returned, and
one tensor at most is read beside q, k and v, the runtime makes the node itself, in C++ (on a GPU,
from torch 2.11 on; src/torch_operators/node.h). Such a node has the name that PyTorch gives it, and
asks here for gradients of a kind that was not seen before.

Whatever is more than that goes through the operators of `_ops`: compiling, tracing, modes,
transforms and subclasses in the forward pass; in the backward pass these, gradients that are to be
differentiated themselves, and what the runtime leaves to Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _eager_gradients as _eager_gradients  # it tells the runtime who is asked
from archflash import _ops_backward, _options, _schemas
from archflash._eager import is_eager
from archflash._gradients import asks_for_deterministic, wants_deterministic

_is_grad_enabled = torch.is_grad_enabled
# The arguments of the operator whose derivative is a node in C++, and of its backward operator, as
# src/torch_operators/node.cpp takes them.
_NODE_TYPES = ["TTTfbtg", "TTTTTTfbtg"]
_INPUTS = ("q", "k", "v", "sinks", "attn_mask")  # of the node, behind what was recorded


class ArchflashAttention(torch.autograd.Function):
    """The node in Python, in profiles ArchflashAttentionBackward. What `forward` returns was
    computed before, in the call that reads the tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, recorded: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *_: Any
    ) -> Any:
        # `given`: the tensors among the options. Tensors are saved by autograd alone, which tells
        # whether they were changed. `call`: (options without tensors, places of the tensors,
        # implementation, whether others may compute the gradients where that one does not).
        out, lse, given, returns_lse, call = recorded
        ctx.call = call, asks_for_deterministic()
        ctx.save_for_backward(q, k, v, out, lse, *given)
        ctx.set_materialize_grads(False)
        return (out, lse) if returns_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        call, deterministic = ctx.call
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        if dout is None:
            dout = torch.zeros_like(saved[3])
        return _compute(dout, dlse, saved, call, needed, deterministic, False)


def _compute(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    call: tuple[Any, ...],
    needed: tuple[bool, ...],
    deterministic: bool,
    keep: bool,
) -> Any:
    """What a node of ArchflashAttention gives: None and the gradients of _INPUTS.

    Args:
        dout: the gradient of the output.
        dlse: that of the log-sum-exp; None: it is 0.
        saved: the node's tensors.
        call: what the runtime tells of the call.
        needed: which gradients are.
        deterministic: whether they were asked for so in the forward pass.
        keep: the runtime computes those of calls like this one itself from now on, if it can.
    """
    if not _is_grad_enabled() and is_eager():
        found = _native.recorded_backward(
            dout, dlse, saved, call, needed, deterministic or wants_deterministic(), keep
        )
        if found is not NotImplemented:
            return found
    (values, places, kernel, or_others), (q, k, v, out, lse, *given) = call, saved
    implementation = None if or_others else kernel
    options = dict(zip(_options.OF_ATTENTION, values, strict=True)) | {"return_lse": True}
    options |= {_options.OF_ATTENTION[i]: x for i, x in zip(places, given, strict=True)}
    inputs = _INPUTS[: len(needed) - 1]
    by_name = _ops_backward.gradients(
        {"q": q, "k": k, "v": v, "implementation": implementation}
        | _options.to_operator(_options.with_python_numbers(options)),
        (out, lse), (dout, dlse), {n for n, x in zip(inputs, needed[1:], strict=True) if x},
        deterministic,
    )  # fmt: skip
    return (None, *(by_name.get(name) for name in inputs))


def _gradients_of_node(
    dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: float,
    is_causal: bool, other: Tensor | None, scale: None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the backward pass of a node in C++ gives, where no earlier one was like it, or somebody
    watches.
    """
    call, deterministic = _native.told_to_node(number)
    if dout is None:
        dout = torch.zeros_like(out)
    given = [] if other is None else [other] * len(call[1])  # one tensor in all these places
    saved = (q, k, v, out, lse, *given)
    found: tuple[Tensor, ...] = _compute(dout, None, saved, call, (True,) * 4, deterministic, True)
    return found[1:]


def _install_node() -> None:
    """Lets the runtime make nodes in C++ for plain calls, where it can."""
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    forward = getattr(torch._C._VariableFunctions, operator, None)
    functions = _schemas.handle_functions()
    if forward is None or functions is None:
        return
    if [_schemas.letters(name) for name in (operator, operator + "_backward")] == _NODE_TYPES:
        _native.install_node(forward, _gradients_of_node, *functions)


# The function in C++ behind `apply`, which looks for transforms of torch.func first: the runtime
# records no call inside of one.
_native.set_record(super(torch.autograd.Function, ArchflashAttention).apply, asks_for_deterministic)
_install_node()
