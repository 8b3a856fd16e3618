"""The backward operators of PyTorch's attention, as `_overrides` puts them in front of PyTorch's.

They get the output and the log-sum-exp that a forward operator gave, whoever served it, and return
the gradients of q, k and v in the strides that PyTorch's meta kernels promise. A call that no
backward kernel of archflash serves, or that PyTorch is expected to serve faster, is handed back:
for it, `serve` returns the reason.

The backward operator of the memory-efficient kernel, which PyTorch chooses for float32 and for few
calls else, stays PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import (
    _compute_gradients,
    _dispatch,
    _gradients,
    _options,
    _pytorch_faults,
    _registry,
    _schemas,
    _strides,
)

# Gives the reason why PyTorch serves a problem: the problem, the GPU, an obstacle, what refused it.
WhyPyTorch = Callable[
    [_native.Problem, _native.Device | None, str | None, dict[str, list[str]]], str
]
Layout = tuple[torch.Size, tuple[int, ...]]  # shape and strides


@dataclass(frozen=True)
class Call:
    """What a call of a backward operator means.

    Attributes:
        tensors: the gradient of the output, q, k, v and the output.
        lse: the log-sum-exp, ``(B, H, Nq)``, or ``(H, Tq)`` for packed sequences.
        options: the options of `archflash.attention` that the call has.
    """

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    lse: Tensor
    options: dict[str, Any]

    def request(self) -> _gradients.Request:
        options = _options.complete(self.options)
        return _gradients.Request(*self.tensors, self.lse.contiguous(), None, options)

    def kind(self) -> tuple[Any, ...]:
        """What a call has in common with all that can be planned as it is."""
        options = (x.shape if isinstance(x, Tensor) else x for x in self.options.values())
        tensors = ((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in self.tensors)
        return (self.tensors[1].device.index, *self.options, *options, *tensors)


@dataclass(frozen=True)
class _Decision:
    """What is done with calls of a kind.

    Attributes:
        plan: what computes the gradients; None: PyTorch's own kernel.
        reason: why PyTorch's does.
        layouts: of the gradients of q, k and v.
        by_torch: whether it is the implementation `torch`, because that kernel would fail.
    """

    plan: _native.LaunchPlan | None
    reason: str
    layouts: tuple[Layout, ...] = ()
    by_torch: bool = False


_MOST_DECISIONS = 1024
_decisions: dict[tuple[Any, ...], _Decision] = {}


def serve(
    operator: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forced: str | None,
    why_pytorch: WhyPyTorch,
) -> tuple[Tensor, Tensor, Tensor] | str:
    """What an operator of `OPERATORS` returns for its arguments; or the reason why PyTorch's own
    kernel is to serve the call.

    Raises:
        ForcedImplementationError: the forced implementation has a backward pass, but not for this
            call.
    """
    call = OPERATORS[operator](*args, **kwargs)
    if isinstance(call, str):
        return call
    deterministic = torch.are_deterministic_algorithms_enabled()
    kind = (operator, forced, deterministic, *call.kind())
    decision = _decisions.get(kind)
    if decision is None:
        layouts = _promised(operator, args, kwargs)
        decision = _decide(operator, call, layouts, forced, deterministic, why_pytorch)
        if len(_decisions) >= _MOST_DECISIONS:
            _decisions.clear()
        _decisions[kind] = decision
    if decision.plan is None and not decision.by_torch:
        return decision.reason
    request, into = call.request(), _new_gradients(call, decision.layouts, call.tensors[1].device)
    if decision.plan is None:
        _compute_gradients.compute(request, into, _registry.TORCH, deterministic)
        return into.dq, into.dk, into.dv
    _native.launch(decision.plan, _gradients.operands(request, into, decision.plan))
    # The runtime, which takes the log-sum-exp as it is, serves the next call of this kind itself.
    as_it_is = call.lse.is_contiguous() and call.tensors[1].is_cuda
    _native.note_served(decision.plan, as_it_is)
    return into.dq, into.dk, into.dv


def _promised(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Layout, ...]:
    """Shapes and strides of the gradients of q, k and v as PyTorch's meta kernel has them."""

    given = [*map(_strides.without_data, args)]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "Meta"):
        return tuple((x.shape, x.stride()) for x in map(torch.empty_like, given[1:4]))
    results = getattr(torch.ops.aten, operator)(*given, **kwargs)
    return tuple((x.shape, x.stride()) for x in results[:3])


def _new_gradients(
    call: Call, layouts: tuple[Layout, ...], device: torch.device | str
) -> _gradients.Gradients:
    dtype = call.tensors[1].dtype
    dq, dk, dv = (
        torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for shape, strides in layouts
    )
    return _gradients.Gradients(dq, dk, dv, None)


def _decide(
    operator: str,
    call: Call,
    layouts: tuple[Layout, ...],
    forced: str | None,
    deterministic: bool,
    why_pytorch: WhyPyTorch,
) -> _Decision:
    if any(0 in x.shape for x in call.tensors):
        return _Decision(None, "a tensor without elements")
    if forced is not None and forced not in _gradients.FOLDERS:
        return _Decision(None, f"{forced} is forced, and has no backward pass")
    request = call.request()
    try:
        problem = request.problem()
    except (TypeError, ValueError) as error:
        return _Decision(None, f"arguments that archflash does not take: {error}")
    device, obstacle = _dispatch.device_of(problem, call.tensors[1].device.index)
    # Both passes were measured together. So the gradients are computed here where archflash's two
    # passes are faster than PyTorch's, whoever served the first of them.
    both = _native.Problem.from_dict(problem.to_dict() | {"needs_grad": 1, "want_lse": 0})
    capability = None if device is None or obstacle else device.capability
    kernel = _KERNEL_OF.get(operator)
    fails = kernel is not None and _dispatch.pytorch_fails(both, capability, kernel) is not None
    if forced is None and not fails:
        plan, refusals = _dispatch.choose(both, device, None, obstacle)
        if plan is None:
            return _Decision(None, why_pytorch(both, device, obstacle, refusals))
    into = _new_gradients(call, layouts, "meta")
    decision = _gradients.decide(request, into, device, forced, obstacle, deterministic)
    if decision.plan is None and fails:
        return _Decision(None, "", layouts, by_torch=True)
    if decision.plan is None:
        refusals = {name: why for name, why in decision.reasons.items() if name != _registry.TORCH}
        return _Decision(None, why_pytorch(both, device, obstacle, refusals))
    return _Decision(decision.plan, "", layouts)


# --- what the arguments of each operator mean ---

_NESTED = "gradients of nested tensors"
_WITH_MASK = "gradients of a call with a mask"
_DROPPED = "gradients of a call with dropout"


def _flash(*args: Any, scale: float | None = None) -> Call | str:
    """aten::_scaled_dot_product_flash_attention_backward. Causal aligns to the bottom right."""
    grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, _, _, dropout_p, is_causal, *_ = args
    if cum_seq_q is not None or cum_seq_k is not None:
        return _NESTED
    if dropout_p != 0.0:
        return _DROPPED
    return Call((grad_out, q, k, v, out), lse, {"causal": is_causal, "scale": scale})


def _cudnn(*args: Any, scale: float | None = None) -> Call | str:
    """aten::_scaled_dot_product_cudnn_attention_backward. Causal aligns to the top left, and the
    log-sum-exp is a column.
    """
    grad_out, q, k, v, out, lse, _, _, attn_bias, cum_seq_q, cum_seq_k, *numbers = args
    _, _, dropout_p, is_causal = numbers
    if cum_seq_q is not None or cum_seq_k is not None:
        return _NESTED
    if attn_bias is not None:
        return _WITH_MASK
    if dropout_p != 0.0:
        return _DROPPED
    options = _top_left(is_causal, scale, q, k)
    return Call((grad_out, q, k, v, out), lse.reshape(q.shape[:3]), options)


def _packed(
    *args: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Call | str:
    """aten::_flash_attention_backward, which torch.nn.attention.varlen calls. Rows come before
    heads, packed sequences have three dimensions, and causal aligns to the bottom right.
    """
    grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, *more = args
    if (cum_seq_q is None) != (cum_seq_k is None):
        return "cum_seq_q without cum_seq_k"
    if dropout_p != 0.0:
        return _DROPPED
    options = {"layout": "bnhd", "causal": more[0], "scale": scale}
    options |= window_option(window_size_left, window_size_right)
    options |= lengths_option(cum_seq_q, cum_seq_k, max_q, max_k)
    return Call((grad_out, q, k, v, out), lse, options)


def _cudnn_packed(*args: Any, scale: float | None = None) -> Call | str:
    """aten::_cudnn_attention_backward, which torch.nn.attention.varlen calls from torch 2.15 on: as
    `_packed`, but causal aligns to the top left.
    """
    grad_out, q, k, v, out, lse, _, _, attn_bias, cum_seq_q, cum_seq_k, *numbers = args
    max_q, max_k, dropout_p, is_causal = numbers
    if attn_bias is not None:
        return _WITH_MASK
    if cum_seq_q is None or cum_seq_k is None or lse.shape != (q.shape[1], q.shape[0]):
        return _NESTED
    if dropout_p != 0.0:
        return _DROPPED
    options: dict[str, Any] = {"layout": "bnhd", "causal": is_causal, "scale": scale}
    options |= lengths_option(cum_seq_q, cum_seq_k, max_q, max_k)
    options |= top_left_of_packed(is_causal, cum_seq_q, cum_seq_k)
    return Call((grad_out, q, k, v, out), lse, options)


def lengths_option(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int
) -> dict[str, Any]:
    """The lengths of packed sequences, as options; nothing where there are none."""
    if cum_seq_q is None:
        return {}
    lengths: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
    return lengths | {"max_seqlen_q": max_q, "max_seqlen_k": max_k}


def top_left_of_packed(
    causal: bool, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None
) -> dict[str, Any]:
    """As `_top_left` for packed sequences. Where one tensor has the lengths of both, all sequences
    have as many queries as keys.
    """
    if not causal or cum_seq_q is cum_seq_k:
        return {}
    same = (
        cum_seq_q is not None
        and cum_seq_k is not None
        and cum_seq_q.data_ptr() == cum_seq_k.data_ptr()
        and cum_seq_q.shape == cum_seq_k.shape
    )
    return {} if same else {"q_offset": 0}


def window_option(left: int | None, right: int | None) -> dict[str, Any]:
    """The window of PyTorch's flash operators, where a side below 0 is unbounded, as an option."""
    window = tuple(None if side is None or side < 0 else side for side in (left, right))
    return {} if window == (None, None) else {"window": window}


def _top_left(causal: bool, scale: float | None, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The options for PyTorch's top-left alignment. With as many queries as keys ours is the same,
    and that one was measured.
    """
    options: dict[str, Any] = {"causal": causal, "scale": scale}
    return options | ({"q_offset": 0} if causal and q.shape[2] != k.shape[2] else {})


# The kernels behind those operators whose calls may be such that they fail (`_pytorch_faults`).
_KERNEL_OF = {
    "_scaled_dot_product_flash_attention_backward": _pytorch_faults.FLASH,
    "_scaled_dot_product_cudnn_attention_backward": _pytorch_faults.CUDNN,
}

OPERATORS: dict[str, Callable[..., Call | str]] = {
    "_scaled_dot_product_flash_attention_backward": _flash,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn,
    "_flash_attention_backward": _packed,
}
# Whether torch.nn.attention.varlen calls cuDNN's operators. Older versions of these serve nested
# tensors alone, with a log-sum-exp of their own.
HAS_PACKED_CUDNN = _schemas.find("_cudnn_attention_forward_no_dropout_inplace") is not None
if HAS_PACKED_CUDNN:
    OPERATORS["_cudnn_attention_backward"] = _cudnn_packed
