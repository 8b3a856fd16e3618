"""PyTorch's own attention served by archflash: enable(), disable(), enabled() and stats().

`torch.nn.functional.scaled_dot_product_attention` chooses one of PyTorch's operators for CUDA
tensors (flash, cuDNN or memory-efficient), `torch.nn.attention.varlen` calls flash's for packed
sequences or, from torch 2.15 on, cuDNN's, and FP8 attention has overloads of flash's.
While archflash is enabled, it stands in front of these operators: it serves a call with the kernel
that dispatch chooses, and hands every other call to PyTorch's own kernel. Code under torch.compile
calls the same operators.

An operator promises more than the output: the strides of the output, the log-sum-exp in the shape
and with the values that PyTorch's backward reads, and some tensors that only dropout needs. The
backward operators are replaced as well (`_backward_operators`): each gets what a forward operator
gave, whether PyTorch's kernel did or archflash's.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.attention as _torch_attention
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from archflash import _archflash as _native
from archflash import (
    _backward_operators,
    _dispatch,
    _mended_calls,
    _options,
    _registry,
    _schemas,
    _sharding,
)
from archflash._errors import ForcedImplementationError

NAME = "archflash"  # in PyTorch's registry, beside "FA3" and "FA4"
ENABLE_VARIABLE = "ARCHFLASH_SDPA"
_KEY = "CUDA"  # the dispatch key whose kernels are replaced; tests take "CPU"
_LSE_BLOCK = 32  # PyTorch's memory-efficient kernel pads the rows of its log-sum-exp to this

Kernel = Callable[..., Any]


# --- what was counted ---


@dataclass(frozen=True)
class Stats:
    """What became of the calls of PyTorch's attention operators while archflash was enabled.

    Attributes:
        served: the number of calls that each implementation served.
        declined: the number of calls that PyTorch's own kernels served, for each reason. Reasons
            that differ only in numbers count as one, under the first of them.
    """

    served: dict[str, int]
    declined: dict[str, int]

    def __str__(self) -> str:
        by_archflash, by_pytorch = sum(self.served.values()), sum(self.declined.values())
        lines = [f"{by_archflash} calls served by archflash, {by_pytorch} by PyTorch's own kernels"]
        for counts in (self.served, self.declined):
            for what, count in sorted(counts.items(), key=lambda item: -item[1]):
                lines.append(f"  {count:>9}  {what}")
        return "\n".join(lines)


_kind_of = lru_cache(_dispatch.kind_of)  # the reasons are few, and each is counted many times


class _Declined:
    """Counts of declined calls that several threads may add to. The runtime counts the others:
    those that were served, and those that it handed over without asking here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[Any]] = {}  # by kind of reason: the first one, the number

    def add(self, reason: str) -> None:
        with self._lock:
            self._add(reason, 1)

    def _add(self, reason: str, count: int) -> None:
        self._counts.setdefault(_kind_of(reason), [reason, 0])[1] += count

    def read(self, reset: bool) -> dict[str, int]:
        with self._lock:
            for reason, count in _native.operators_declined(True).items():
                self._add(reason, count)
            counts = dict(self._counts.values())
            if reset:
                self._counts.clear()
        return counts


_declined = _Declined()


def count_declined(reason: str) -> None:
    """Counts a call that is handed to PyTorch's own function on the way, unless archflash stands in
    front of its operators: they count it themselves.
    """
    if _active() is None:
        _declined.add(reason)


def stats(*, reset: bool = False) -> Stats:
    """Counts the calls of PyTorch's attention operators since archflash was first enabled.

    Calls of `archflash.attention` are among them only where that hands them on to PyTorch. Calls
    for which PyTorch uses none of its fused kernels are not. Calls with dropout that
    `archflash.scaled_dot_product_attention` hands to PyTorch's function are, enabled or not.

    Args:
        reset: start to count anew; off by default.

    Returns:
        A `Stats`: how many calls each implementation served, and for what reasons PyTorch served
        the others. Its str() is readable.

    Example:
        >>> import archflash
        >>> before = archflash.stats(reset=True)
        >>> print(archflash.stats())
        0 calls served by archflash, 0 by PyTorch's own kernels
    """
    return Stats(_native.operators_served(reset), _declined.read(reset))


# --- who serves a call ---


_device_of = _dispatch.device_of


def _decide(problem: _native.Problem, index: int, forced: str | None) -> _native.LaunchPlan | str:
    """The plan that serves a problem of PyTorch's operators, or the reason why PyTorch's own kernel
    does. The runtime asks this once for each problem.

    The decision is made for the problem without the log-sum-exp, which PyTorch's fused kernels give
    at no cost, although they do not give it to a caller of SDPA.
    """
    sizes = (problem.heads_q, problem.heads_kv, problem.nq, problem.nk, problem.d, problem.dv)
    if 0 in sizes or (problem.batch == 0 and not problem.varlen):
        return "a tensor without elements"
    device, obstacle = _device_of(problem, index)
    without_lse = _with_lse(problem, False)
    plan, refusals = _dispatch.choose(without_lse, device, forced, obstacle)
    if plan is None:
        if forced is not None:
            return f"{forced} is forced"
        return _why_pytorch(problem, device, obstacle, refusals)
    if forced is None and _dispatch.pytorch_reads_mask_faster(without_lse, plan):
        return _dispatch.MASK_READ_FASTER
    if not problem.want_lse:
        return plan
    answer = _native.plan(plan.implementation, _with_lse(plan.problem, True), plan.device)
    return f"{plan.implementation}: {answer[0]}" if isinstance(answer, list) else answer


def _why_pytorch(
    problem: _native.Problem,
    device: _native.Device | None,
    obstacle: str | None,
    refusals: dict[str, list[str]],
) -> str:
    """Why PyTorch's own kernel serves a problem, with the reasons of the kernels that cannot."""
    if device is None or obstacle is not None:
        return obstacle or "tensors on the CPU"
    if not refusals:
        return _dispatch.why_torch(problem, device)
    kernel, reasons = _dispatch.nearest(refusals, problem, device)
    return f"{kernel}: {reasons[0]}"


def _with_lse(problem: _native.Problem, want: bool) -> _native.Problem:
    return _native.Problem.from_dict(problem.to_dict() | {"want_lse": int(want)})


_native.set_decide_operator(lambda *problem: _decide(*problem))

_DEFAULT_VALUES = list(_options.DEFAULTS.values())
_PLACE = {name: place for place, name in enumerate(_options.DEFAULTS)}


def _named_values(options: dict[str, Any]) -> tuple[Any, ...]:
    """The values of all options, in the order in which the runtime takes them."""
    values = _DEFAULT_VALUES.copy()
    for name, value in options.items():
        values[_PLACE[name]] = value
    return tuple(values)


@lru_cache(maxsize=1024)
def _values(
    causal: bool, scale: float | None, want_lse: bool, top_left: bool = False
) -> tuple[Any, ...]:
    """`_named_values` of the options that SDPA has but for the mask. This is part of every call.

    Args:
        causal, scale: as for SDPA.
        want_lse: whether the log-sum-exp is wanted.
        top_left: whether causal aligns to the top left. With as many queries as keys both
            alignments are the same, and the other one was measured.
    """
    options = {"causal": causal, "scale": scale, "return_lse": want_lse}
    return _named_values(options | ({"q_offset": 0} if top_left else {}))


def _with_mask(values: tuple[Any, ...], mask: Tensor) -> tuple[Any, ...]:
    place = _PLACE["attn_mask"]
    return (*values[:place], mask, *values[place + 1 :])


def _with_out(values: tuple[Any, ...], out: Tensor) -> tuple[Any, ...]:
    place = _PLACE["out"]
    return (*values[:place], out, *values[place + 1 :])


def _decline(reason: str) -> str:
    """The reason, as an operator returns it for PyTorch's own kernel to serve the call.

    Raises:
        ForcedImplementationError: a kernel of archflash is forced.
    """
    forced = _forced()
    if forced not in (None, _registry.TORCH):
        raise ForcedImplementationError(f"{forced} is forced, but PyTorch calls for {reason}")
    return reason


_forced = _dispatch.forced
_serve = _native.serve_operator


# --- PyTorch's operators ---


# Results of PyTorch's operators that nothing reads where no weights are dropped are as cheap as can
# be. A compiled graph may give the memory of such a result to another one, and a CUDA graph of
# torch.compile has to own its results: so they are new in each call that may belong to a compiled
# graph, and the same in all others: PyTorch runs compiled graphs without gradients, those too that
# keep results for a backward, and in inference mode nothing is kept.
_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled


@lru_cache
def _flash_shapes() -> tuple[Tensor, Tensor]:
    """Meta tensors like the state of a random generator in the flash operator, which differs
    between versions of PyTorch.
    """
    q = torch.empty(1, 1, 1, 8, device="meta")
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    return results[6], results[7]


@lru_cache
def _scalar_shapes() -> tuple[Tensor, Tensor]:
    """As `_flash_shapes` for the other operators."""
    scalar = torch.empty((), dtype=torch.int64, device="meta")
    return scalar, scalar


class _State:
    """Makes the state of a random generator, two tensors whose values nothing reads.

    Args:
        shapes: makes meta tensors like them.
    """

    def __init__(self, shapes: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._shapes = shapes
        self._like: dict[int, tuple[Tensor, Tensor]] = {}  # by the index of the device
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, query: Tensor) -> tuple[Tensor, Tensor]:
        index = query.get_device()
        if _is_grad_enabled() or _is_inference():
            shared = self._shared.get(index)
            if shared is not None or (shared := self._share(query, index)) is not None:
                return shared
        one, other = self._like.get(index) or self._for_empty_like(query, index)
        return _empty_like(one), _empty_like(other)

    def _share(self, query: Tensor, index: int) -> tuple[Tensor, Tensor] | None:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # memory that is allocated now belongs to the graph
        self._shared[index] = shared = self._new(query)
        return shared

    def _for_empty_like(self, query: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Tensors without memory: what is allocated during the capture of a CUDA graph must not
        outlive it. empty_like is faster than new_empty.
        """
        pair = self._new(query)
        for x in pair:
            x.untyped_storage().resize_(0)
        self._like[index] = pair
        return pair

    def _new(self, query: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):  # autograd keeps no tensors of inference mode
            one, other = (torch.empty_like(x, device=query.device) for x in self._shapes())
        return one, other


_flash_state, _two_scalars = _State(_flash_shapes), _State(_scalar_shapes)
_NO_STATE = (torch.zeros((), dtype=torch.int64),) * 2


@lru_cache
def _no_elements(device: torch.device, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.empty((*sizes, 0), dtype=dtype, device=device)


_empty_like = torch.empty_like


def _flash_tail(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last three results of the flash operator."""
    one, other = _flash_state(q)
    return one, other, _no_elements(q.device, q.dtype)


def _scalar_state(q: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
    """The state of a random generator in the other operators. Without a log-sum-exp there is no
    backward that keeps it.
    """
    return _two_scalars(q) if lse else _NO_STATE


DROPPED_FASTER = "dropout: PyTorch's fused kernels drop weights faster"
_DROPPED = "dropout: the backward pass of PyTorch's operator knows its own random bits only"


def _why_not(dropout_p: float, debug_mask: bool) -> str:
    """Why no kernel of archflash serves a call with dropout or with return_debug_mask."""
    assert dropout_p != 0.0 or debug_mask
    if dropout_p != 0.0:
        return _DROPPED
    return "return_debug_mask: no kernel of archflash returns weights"


def _like_query(query: Tensor, dv: int) -> Tensor:
    """An empty output (B, H, N, dv), dense, with its dimensions in memory in the order of query's,
    as PyTorch's meta kernels promise it.
    """
    if dv == query.shape[-1]:
        return torch.empty_like(query)
    shape = [*query.shape[:-1], dv]
    order = sorted(range(4), key=lambda i: query.stride(i), reverse=True)
    empty = query.new_empty([shape[i] for i in order])
    return empty.permute([order.index(i) for i in range(4)])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention. Causal aligns to the bottom right here: SDPA calls
    it with as many queries as keys, and causal_lower_right of torch.nn.attention.bias with any.
    """
    if dropout_p != 0.0 or return_debug_mask:
        return _decline(_why_not(dropout_p, return_debug_mask))
    values = _values(is_causal, scale, True)
    forced = _forced()
    served = _serve(query, key, value, values, forced)
    if served is None:
        served = _serve(query, key, value, _with_out(values, _empty_like(query)), forced)
    if type(served) is str:
        return _decline(served)
    out, lse = served
    return out, lse, None, None, query.size(2), key.size(2), *_flash_tail(query)


def _flash_quantized(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention.quantized: FP8, with descales (batch, heads_kv),
    and the output in bfloat16.
    """
    if dropout_p != 0.0 or return_debug_mask:
        return _decline(_why_not(dropout_p, return_debug_mask))
    options: dict[str, Any] = {"causal": is_causal, "scale": scale, "return_lse": True}
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    options["out"] = _new_output(query)
    served = _serve(query, key, value, _named_values(options), _forced())
    if type(served) is str:
        return _decline(served)
    out, lse = served
    return out, lse, None, None, query.size(2), key.size(2), *_flash_tail(out)


def _new_output(query: Tensor) -> Tensor:
    """An output in query's layout; FP8 attention gives bfloat16."""
    fp8 = query.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return _empty_like(query, dtype=torch.bfloat16) if fp8 else _empty_like(query)


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_cudnn_attention."""
    if dropout_p != 0.0 or return_debug_mask:
        return _decline(_why_not(dropout_p, return_debug_mask))
    if attn_bias is not None and compute_log_sumexp:
        return _decline(_MASK_AND_GRADIENTS)
    nq, nk = query.size(2), key.size(2)
    values = _values(is_causal, scale, compute_log_sumexp, is_causal and nq != nk)
    if attn_bias is not None:
        values = _with_mask(values, attn_bias)
    forced = _forced()
    served = _serve(query, key, value, values, forced, False, True)  # the log-sum-exp as a column
    if served is None:
        out = _like_query(query, value.size(3))
        served = _serve(query, key, value, _with_out(values, out), forced, False, True)
    if type(served) is str:
        return _decline(served)
    if compute_log_sumexp:
        out, lse = served
    else:
        out, lse = served, None  # as PyTorch's kernel
    return out, lse, None, None, nq, nk, *_scalar_state(query, compute_log_sumexp), None


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_efficient_attention."""
    if dropout_p != 0.0:
        return _decline(_why_not(dropout_p, False))
    if attn_bias is not None and compute_log_sumexp:
        return _decline(_MASK_AND_GRADIENTS)
    top_left = is_causal and query.size(2) != key.size(2)
    values = _values(is_causal, scale, compute_log_sumexp, top_left)
    if attn_bias is not None:
        values = _with_mask(values, attn_bias)
    served = _serve(query, key, value, values, _forced(), True)
    if type(served) is str:
        return _decline(served)
    if compute_log_sumexp:
        out, lse = served
        if beyond := query.size(2) % _LSE_BLOCK:  # a row of infinity has no weights
            lse = F.pad(lse, (0, _LSE_BLOCK - beyond), value=math.inf)
    else:
        out, lse = served, _no_elements(query.device, torch.float32, query.size(0), query.size(1))
    return out, lse, *_scalar_state(query, compute_log_sumexp)


# Rows that see no key have another log-sum-exp in each of PyTorch's kernels, and its backward reads
# it.
_MASK_AND_GRADIENTS = "a mask, and gradients may be needed"


def _flash_forward(query: Tensor, *args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward, which torch.nn.attention.varlen and nested tensors call."""
    served = _flash_into(None, query, *args, **options)
    return served if isinstance(served, str) else (*served, *_flash_tail(query))


def _flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward_no_dropout_inplace."""
    served = _flash_into(out, *args, **options)
    return served if isinstance(served, str) else served[1]


def _flash_forward_quantized(*args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward.quantized, whose last positional arguments are descales."""
    *of_flash, q_descale, k_descale, v_descale = args
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    served = _flash_into(None, *of_flash, **options, descales=descales)
    return served if isinstance(served, str) else (*served, *_flash_tail(served[0]))


def _cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Any:
    """aten::_cudnn_attention_forward, which torch.nn.attention.varlen calls from torch 2.15 on. As
    `_flash_forward`, but causal aligns to the top left of packed keys.
    """
    if attn_bias is not None:
        return _decline("attn_bias of packed sequences")
    served = _flash_into(
        None, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, scale=scale, seqused_k=seqused_k, block_table=block_table,
        top_left=seqused_k is None,
    )  # fmt: skip
    if isinstance(served, str):
        return served
    return *served, cum_seq_q, cum_seq_k, max_q, max_k, *_two_scalars(query), None


def _cudnn_forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Any:
    """aten::_cudnn_attention_forward_no_dropout_inplace."""
    served = _flash_into(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, False,
        scale=scale, seqused_k=seqused_k, block_table=block_table, top_left=seqused_k is None,
    )  # fmt: skip
    return served if isinstance(served, str) else served[1]


def _flash_into(
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    top_left: bool = False,
    descales: dict[str, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor] | str:
    """The output, in `out` if that is given, and the log-sum-exp. Rows come before heads here,
    packed sequences have three dimensions, and causal aligns to the bottom right, or to the top
    left. (Of equally long queries and keys both are the same, and the former was measured.)
    """
    paged = block_table is not None and seqused_k is not None and cum_seq_q is not None
    if dropout_p != 0.0 or return_debug_mask:
        return _decline(_why_not(dropout_p, return_debug_mask))
    if alibi_slopes is not None:
        return _decline("alibi_slopes: no kernel of archflash takes it here")
    if not paged and (block_table is not None or seqused_k is not None):
        return _decline("seqused_k or block_table, but not both with cum_seq_q")
    if not paged and (cum_seq_q is None) != (cum_seq_k is None):
        return _decline("cum_seq_q without cum_seq_k")
    options: dict[str, Any] = {"layout": "bnhd", "causal": is_causal, "scale": scale}
    options["return_lse"] = True
    options |= _backward_operators.window_option(window_size_left, window_size_right)
    options |= descales or {}
    if top_left:
        options |= _backward_operators.top_left_of_packed(is_causal, cum_seq_q, cum_seq_k)
    if num_splits:
        options["num_splits"] = num_splits
    if paged:  # key and value are pages
        options.update(cu_seqlens_q=cum_seq_q, max_seqlen_q=max_q)
        options.update(cache_seqlens=seqused_k, page_table=block_table)
    else:
        options |= _backward_operators.lengths_option(cum_seq_q, cum_seq_k, max_q, max_k)
    options["out"] = _new_output(query) if out is None else out
    served: Any = _serve(query, key, value, _named_values(options), _forced())
    if isinstance(served, str):
        return _decline(served)
    result: tuple[Tensor, Tensor] = served
    return result


def _gradients_of(operator: str) -> Kernel:
    """The function that serves a backward operator. A forced implementation without a backward pass
    leaves the gradients to PyTorch.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        forced = _forced()
        served = _backward_operators.serve(operator, args, kwargs, forced, _why_pytorch)
        if isinstance(served, str) and (forced is None or _native.has_backward(forced)):
            return _decline(served)
        return served

    return kernel


_OPERATORS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_scaled_dot_product_flash_attention.quantized": _flash_quantized,
    "_flash_attention_forward.quantized": _flash_forward_quantized,
    **{operator: _gradients_of(operator) for operator in _backward_operators.OPERATORS},
}
if _backward_operators.HAS_PACKED_CUDNN:
    _OPERATORS["_cudnn_attention_forward"] = _cudnn_forward
    _OPERATORS["_cudnn_attention_forward_no_dropout_inplace"] = _cudnn_forward_into


# --- PyTorch's own kernels ---


class _Inside(threading.local):
    """Whether this thread is inside a kernel of PyTorch's. Some of them call other operators of the
    list, and that must not count as a call.
    """

    pytorch = False


_inside = _Inside()


def _original(operator: str) -> Kernel | None:
    """PyTorch's own kernel, which takes a set of dispatch keys before its arguments; None if there
    is none, or no way to call it while it is replaced.
    """
    name = f"aten::{operator}"
    if not (
        _schemas.find(operator) is not None
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
    ):
        return None
    if hasattr(torch.library, "get_kernel"):
        kernel: Kernel = torch.library.get_kernel(name, _KEY).call_boxed
        return kernel
    return _BY_OTHER_OPERATORS.get(operator)


def _flash_by_its_part(
    keys: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    nq, nk = query.shape[2], key.shape[2]
    out, lse, *rest = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, nq, nk,
        dropout_p, is_causal, return_debug_mask, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, None, None, nq, nk, *rest


def _efficient_by_its_part(
    keys: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_bias,
        None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse, seed, offset


# Versions of PyTorch without torch.library.get_kernel cannot call a kernel that is replaced. Two
# operators only transpose and call another one there, which is not replaced; the others keep
# PyTorch's kernel.
_BY_OTHER_OPERATORS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _flash_by_its_part,
    "_scaled_dot_product_efficient_attention": _efficient_by_its_part,
}


def _replacement(operator: str, serve: Kernel, original: Kernel) -> Kernel:
    """The kernel that stands before PyTorch's own one, the original."""
    # Asking the dispatcher for the keys of each call takes time, and no kernel on CUDA reads them.
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _inside.pytorch:
            return original(keys, *args, **kwargs)
        result = serve(*args, **kwargs)
        if type(result) is not str:
            return result
        _declined.add(result)
        mended = _mended_calls.Call(operator, args, kwargs)
        if not mended.differs:  # else the runtime asks again for each call of the kind
            _native.note_declined(result)
        _inside.pytorch = True
        _native.note_inside_pytorch(True)
        try:
            return mended.results(original(keys, *mended.args, **mended.kwargs))
        finally:
            _inside.pytorch = False
            _native.note_inside_pytorch(False)

    return kernel


# Operators whose calls the runtime serves, or hands to PyTorch's own kernel, without Python where
# it knows one like it.
_IN_RUNTIME = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_flash_attention_backward",
)
_OLDEST_FOR_RUNTIME = (2, 11)  # the oldest version of PyTorch with which this was tried
_LETTERS = {
    "Tensor": "T", "float": "f", "bool": "b", "int": "i", "SymInt": "i", "Optional[Tensor]": "t",
    "Optional[float]": "g", "Optional[int]": "j", "Optional[SymInt]": "j",
}  # fmt: skip


def _handle_functions() -> tuple[Kernel, Kernel] | None:
    """The two private functions of PyTorch with which the runtime makes a Python tensor of a
    handle, and handles of Python tensors; None if this PyTorch lacks one.
    """
    core = getattr(torch._C, "_aoti", None)
    tensor_of = getattr(core, "alloc_tensor_by_stealing_from_void_ptr", None)
    handles_of = getattr(core, "unsafe_alloc_void_ptrs_from_tensors", None)
    return None if tensor_of is None or handles_of is None else (tensor_of, handles_of)


def _runtime_serves() -> bool:
    """Whether the runtime can stand in front of PyTorch's operators itself. Where it cannot, the
    functions in Python serve every call.
    """
    new = bool(TorchVersion(torch.__version__) >= _OLDEST_FOR_RUNTIME)  # type: ignore[operator]
    return new and _native.has_torch_functions() and _handle_functions() is not None


def _install_in_runtime(operator: str, kernel: Kernel) -> None:
    """Lets the runtime serve an operator, and `kernel` what the runtime does not know. Nothing
    happens where the operator takes arguments of a kind that the runtime does not read.
    """
    arguments = getattr(torch.ops.aten, operator).default._schema.arguments
    letters = [_LETTERS.get(str(argument.real_type)) for argument in arguments]
    functions = _handle_functions()
    if None in letters or functions is None:
        return
    positional = sum(not argument.kwarg_only for argument in arguments)
    names = [argument.name for argument in arguments[positional:]]

    def by_python(*given: Any) -> Any:
        return kernel(*given[:positional], **dict(zip(names, given[positional:], strict=True)))

    types = "".join(str(letter) for letter in letters)
    _native.install_operator(operator, types, _KEY, by_python, _forced, *functions)


class _Replaced:
    """PyTorch's operators while archflash stands in front of them, until remove()."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def _install(self) -> None:
        _flash_shapes()  # asks PyTorch, outside of any call
        _sharding.register_if_loaded()  # PyTorch's operator for the CPU has no strategy
        kernels = {
            operator: _replacement(operator, serve, original)
            for operator, serve in _OPERATORS.items()
            if (original := _original(operator)) is not None
        }
        with warnings.catch_warnings():
            # PyTorch warns that a kernel of its own is replaced, which is what was asked for. It
            # does so once: the runtime's kernels come afterwards, in front of these.
            warnings.simplefilter("ignore", UserWarning)
            for operator, kernel in kernels.items():
                self._library.impl(operator, kernel, _KEY)
        if _runtime_serves():
            for operator in _IN_RUNTIME:
                if operator in kernels:
                    _install_in_runtime(operator, kernels[operator])

    def remove(self) -> None:
        _native.remove_operators()
        self._library._destroy()


# --- on and off ---

# Newer versions of PyTorch have a registry of providers of flash attention, one of them active.
_HAS_REGISTRY = hasattr(_torch_attention, "restore_flash_attention_impl")
_replaced: _Replaced | None = None  # where PyTorch has no registry

if _HAS_REGISTRY:
    _torch_attention.register_flash_attention_impl(NAME, register_fn=_Replaced)


def _active() -> str | None:
    """The provider that stands in front of PyTorch's kernels: NAME, another one, or None."""
    if _HAS_REGISTRY:
        return _torch_attention.current_flash_attention_impl()
    return None if _replaced is None else NAME


def _activate(name: str | None) -> None:
    global _replaced
    if name == _active():
        return
    if _HAS_REGISTRY:
        if name is None:
            _torch_attention.restore_flash_attention_impl()
        else:
            _torch_attention.activate_flash_attention_impl(name)
        return
    if _replaced is not None:
        _replaced.remove()
    _replaced = None if name is None else _Replaced()


def enable() -> None:
    """Lets archflash serve PyTorch's own attention: calls of
    `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen` with CUDA
    tensors, in this process, compiled code included; and PyTorch's prototype for FP8,
    `_scaled_dot_product_attention_quantized`.

    A call that no kernel of archflash serves, or that PyTorch is expected to serve faster, goes to
    PyTorch's own kernel; `archflash.stats()` has the numbers and the reasons. is_causal keeps
    PyTorch's meaning. With `archflash.force` a call that the forced implementation cannot serve
    raises.

    In PyTorch's registry of providers the name is "archflash":
    ``torch.nn.attention.activate_flash_attention_impl("archflash")`` is the same. One provider is
    active at a time, so enable() replaces another one ("FA3", "FA4"). With ARCHFLASH_SDPA=1 in the
    environment archflash is enabled as soon as torch is imported.

    Example:
        >>> import archflash
        >>> archflash.enable()
        >>> archflash.disable()
    """
    _activate(NAME)


def disable() -> None:
    """Gives PyTorch its own attention kernels back. Nothing happens if archflash is not enabled."""
    if _active() == NAME:
        _activate(None)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Lets archflash serve PyTorch's own attention inside a `with` block, as `enable` does. At its
    end, what was active before is active again: PyTorch's own kernels, or another provider.

    The effect is on the whole process, not on this thread alone.

    Example:
        >>> import archflash, torch
        >>> q = torch.randn(1, 2, 5, 8)
        >>> with archflash.enabled():
        ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).shape
        torch.Size([1, 2, 5, 8])
    """
    before = _active()
    enable()
    try:
        yield
    finally:
        _activate(before)


def enable_if_asked() -> None:
    """Enables archflash if ARCHFLASH_SDPA is 1.

    Raises:
        ValueError: it is something else than 0, 1 or nothing.
    """
    asked = os.environ.get(ENABLE_VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ValueError(
            f"{ENABLE_VARIABLE} is {asked!r}: it must be 1, for archflash to serve "
            "scaled_dot_product_attention, or 0"
        )
    if asked == "1":
        enable()
