"""PyTorch's own attention served by archflash: enable(), disable(), enabled() and stats().

`torch.nn.functional.scaled_dot_product_attention` chooses one of PyTorch's operators for CUDA
tensors (flash, cuDNN or memory-efficient), and `torch.nn.attention.varlen` calls a fourth one.
While archflash is enabled, it stands in front of these operators: it serves a call with the kernel
that dispatch chooses, and hands every other call to PyTorch's own kernel. Code under torch.compile
calls the same operators.

An operator promises more than the output: the strides of the output, the log-sum-exp in the shape
and with the values that PyTorch's backward reads, and some tensors that only dropout needs. A
backward is always PyTorch's own, computed from the output and the log-sum-exp given here.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.attention as _torch_attention
import torch.nn.functional as F
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _options, _registry
from archflash._errors import ForcedImplementationError

NAME = "archflash"  # in PyTorch's registry, beside "FA3" and "FA4"
ENABLE_VARIABLE = "ARCHFLASH_SDPA"
_KEY = "CUDA"  # the dispatch key whose kernels are replaced; tests take "CPU"
_LSE_BLOCK = 32  # PyTorch's memory-efficient kernel pads the rows of its log-sum-exp to this
_MOST_CHOICES = 4096  # problems whose choice is remembered

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


class _Counts:
    """Counts that several threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, int] = {}
        self._declined: dict[str, list[Any]] = {}  # by kind of reason: the first one, the number

    def serve(self, name: str) -> None:
        with self._lock:
            self._served[name] = self._served.get(name, 0) + 1

    def decline(self, reason: str) -> None:
        kind = _kind_of(reason)
        with self._lock:
            self._declined.setdefault(kind, [reason, 0])[1] += 1

    def read(self, reset: bool) -> Stats:
        with self._lock:
            stats = Stats(dict(self._served), dict(self._declined.values()))
            if reset:
                self._served.clear()
                self._declined.clear()
        return stats


_counts = _Counts()


def stats(*, reset: bool = False) -> Stats:
    """Counts the calls of PyTorch's attention operators since archflash was first enabled.

    Calls of `archflash.attention` are among them only where that hands them on to PyTorch. Calls
    for which PyTorch uses none of its fused kernels are not.

    Args:
        reset: start to count anew; off by default.

    Returns:
        A `Stats`: how many calls each implementation served, and for what reasons PyTorch served
        the others. Its str() is readable.

    Example:
        >>> import archflash
        >>> print(archflash.stats())
        0 calls served by archflash, 0 by PyTorch's own kernels
    """
    return _counts.read(reset)


# --- who serves a call ---


class _Choice(NamedTuple):
    name: str | None  # of the kernel; None: PyTorch's own
    reason: str  # why it is PyTorch's own


_choices: dict[tuple[_native.Problem, int, str | None], _Choice] = {}


def _device_of(problem: _native.Problem, index: int) -> tuple[_native.Device | None, str | None]:
    return _dispatch.device_of(problem, index)


def _decide(problem: _native.Problem, index: int, forced: str | None) -> _Choice:
    """Who serves a problem that is stated without the log-sum-exp, which PyTorch's fused kernels
    give at no cost, although they do not give it to a caller of SDPA.
    """
    device, obstacle = _device_of(problem, index)
    plan, refusals = _dispatch.choose(problem, device, forced, obstacle)
    if plan is not None:
        return _Choice(plan.implementation, "")
    if forced is not None:
        return _Choice(None, f"{forced} is forced")
    if device is None or obstacle is not None:
        return _Choice(None, obstacle or "tensors on the CPU")
    if not refusals:
        return _Choice(None, _dispatch.why_torch(problem, device))
    kernel, reasons = _dispatch.nearest(refusals, problem, device)
    return _Choice(None, f"{kernel}: {reasons[0]}")


def _serve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make_out: Callable[[], Tensor],
    obstacle: str | None,
    *,
    want_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None] | str:
    """The output of a call and its log-sum-exp (None where it is not wanted); or the reason why
    PyTorch's own kernel has to serve the call.

    Args:
        q, k, v: as for `archflash.attention`.
        make_out: gives the tensor to write the output to, once a kernel is chosen.
        obstacle: a reason for PyTorch's kernel that is known already.
        want_lse: whether the log-sum-exp is wanted.
        options: of `archflash.attention`.
    """
    forced = _dispatch.forced()
    reason = obstacle
    if reason is None and not (q.numel() and k.numel() and v.numel()):
        reason = "a tensor without elements"
    if reason is None:
        values = _option_values(options)
        problem = _native.make_problem(q, k, v, values, _GRADIENTS_ARE_PYTORCHS)
        key = (problem, q.get_device(), forced)
        choice = _choices.get(key)
        if choice is None:
            if len(_choices) >= _MOST_CHOICES:
                _choices.clear()
            choice = _choices.setdefault(key, _decide(*key))
        if choice.name is not None:
            options.update(out=make_out(), return_lse=want_lse)
            values = _option_values(options)
            result: Any = _native.attention(q, k, v, values, _GRADIENTS_ARE_PYTORCHS, choice.name)
            if result is not NotImplemented:
                _counts.serve(choice.name)
                return result if want_lse else (result, None)
        reason = choice.reason or "a tensor whose memory does not hold its values"
    if forced not in (None, _registry.TORCH):
        raise ForcedImplementationError(f"{forced} is forced, but PyTorch calls for {reason}")
    return reason


_GRADIENTS_ARE_PYTORCHS = 0  # the runtime is told of none: see the text of this module
_DEFAULT_VALUES = list(_options.DEFAULTS.values())
_PLACE = {name: place for place, name in enumerate(_options.DEFAULTS)}


def _option_values(options: dict[str, Any]) -> tuple[Any, ...]:
    """The values of all options in the order in which the runtime takes them. This is part of every
    call, and writing a few places of a list is faster than merging dictionaries.
    """
    values = _DEFAULT_VALUES.copy()
    for name, value in options.items():
        values[_PLACE[name]] = value
    return tuple(values)


# --- PyTorch's operators ---


@cache
def _generator_state() -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """The shapes and dtypes of the state of a random generator in the results of PyTorch's flash
    operator, which differ between its versions.
    """
    q = torch.empty(1, 1, 1, 8, device="meta")
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    return tuple((x.shape, x.dtype) for x in results[6:8])


def _no_dropout_state(q: Tensor) -> list[Tensor]:
    """The state of a random generator, which a backward without dropout does not read."""
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in _generator_state()]


def _obstacle(dropout_p: float, debug_mask: bool) -> str | None:
    """Why no kernel of archflash serves a call with these arguments; None if one may."""
    if dropout_p != 0.0:
        return "dropout: no kernel of archflash drops weights"
    return "return_debug_mask: no kernel of archflash returns weights" if debug_mask else None


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
    nq, nk = query.shape[2], key.shape[2]
    obstacle = _obstacle(dropout_p, return_debug_mask)
    if value.shape[3] != query.shape[3]:
        obstacle = obstacle or "values of another head dimension than queries"
    served = _serve(
        query, key, value, lambda: torch.empty_like(query), obstacle, want_lse=True,
        causal=is_causal, scale=scale,
    )  # fmt: skip
    if isinstance(served, str):
        return served
    if is_causal and nq > nk:
        _as_pytorchs_lse(served[1])
    return *served, None, None, nq, nk, *_no_dropout_state(query), query.new_empty(0)


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
    nq, nk = query.shape[2], key.shape[2]
    obstacle = _obstacle(dropout_p, return_debug_mask)
    if attn_bias is not None and compute_log_sumexp:
        obstacle = obstacle or _MASK_AND_GRADIENTS
    served = _serve(
        query, key, value, lambda: _like_query(query, value.shape[3]), obstacle,
        want_lse=compute_log_sumexp, scale=scale, **_top_left(is_causal, nq, nk),
        **_masked(attn_bias),
    )  # fmt: skip
    if isinstance(served, str):
        return served
    out, lse = served
    stats = query.new_empty(query.shape[:3], dtype=torch.float32) if lse is None else lse
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return out, stats[..., None], None, None, nq, nk, seed, offset, None


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
    batch, heads, nq, _ = query.shape

    def rows_before_heads() -> Tensor:
        return query.new_empty(batch, nq, heads, value.shape[3]).transpose(1, 2)

    obstacle = _obstacle(dropout_p, False)
    if attn_bias is not None and compute_log_sumexp:
        obstacle = obstacle or _MASK_AND_GRADIENTS
    served = _serve(
        query, key, value, rows_before_heads, obstacle, want_lse=compute_log_sumexp,
        scale=scale, **_top_left(is_causal, nq, key.shape[2]), **_masked(attn_bias),
    )  # fmt: skip
    if isinstance(served, str):
        return served
    out, lse = served
    if lse is None:
        lse = query.new_empty((batch, heads, 0), dtype=torch.float32)
    elif nq % _LSE_BLOCK:  # a row of infinity has no weights
        lse = F.pad(lse, (0, _LSE_BLOCK - nq % _LSE_BLOCK), value=math.inf)
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return out, lse, seed, offset


# Rows that see no key have another log-sum-exp in each of PyTorch's kernels, and its backward reads
# it.
_MASK_AND_GRADIENTS = "a mask, and gradients may be needed"


def _top_left(is_causal: bool, nq: int, nk: int) -> dict[str, Any]:
    """The options for the causal rule of SDPA. If the lengths are equal both alignments are the
    same, and the default is the one that was measured.
    """
    if not is_causal:
        return {}
    return {"causal": True} if nq == nk else {"causal": True, "q_offset": 0}


def _masked(attn_bias: Tensor | None) -> dict[str, Any]:
    return {} if attn_bias is None else {"attn_mask": attn_bias}


def _flash_forward(query: Tensor, *args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward, which torch.nn.attention.varlen and nested tensors call."""
    served = _flash_into_tensor(lambda: torch.empty_like(query), query, *args, **options)
    if isinstance(served, str):
        return served
    return *served, *_no_dropout_state(query), query.new_empty(0)


def _flash_forward_into(out: Tensor, *args: Any, **options: Any) -> Any:
    """aten::_flash_attention_forward_no_dropout_inplace."""
    served = _flash_into_tensor(lambda: out, *args, **options)
    return served if isinstance(served, str) else served[1]


def _flash_into_tensor(
    make_out: Callable[[], Tensor],
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
) -> tuple[Tensor, Tensor | None] | str:
    """Rows come before heads here, packed sequences have three dimensions, and causal aligns to the
    bottom right.
    """
    paged = block_table is not None and seqused_k is not None and cum_seq_q is not None
    obstacle = _obstacle(dropout_p, return_debug_mask)
    if alibi_slopes is not None:
        obstacle = obstacle or "alibi_slopes: no kernel of archflash takes it here"
    elif not paged and (block_table is not None or seqused_k is not None):
        obstacle = obstacle or "seqused_k or block_table, but not both with cum_seq_q"
    elif not paged and (cum_seq_q is None) != (cum_seq_k is None):
        obstacle = obstacle or "cum_seq_q without cum_seq_k"
    left, right = (
        None if side is None or side < 0 else side for side in (window_size_left, window_size_right)
    )
    options: dict[str, Any] = {"layout": "bnhd", "causal": is_causal, "scale": scale}
    if left is not None or right is not None:
        options["window"] = (left, right)
    if num_splits:
        options["num_splits"] = num_splits
    if paged:  # key and value are pages
        options.update(cu_seqlens_q=cum_seq_q, max_seqlen_q=max_q)
        options.update(cache_seqlens=seqused_k, page_table=block_table)
    elif cum_seq_q is not None:
        options.update(cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k)
        options.update(max_seqlen_q=max_q, max_seqlen_k=max_k)
    served = _serve(query, key, value, make_out, obstacle, want_lse=True, **options)
    every_row_sees_a_key = cum_seq_q is None and left is right is None and not is_causal
    if not isinstance(served, str) and not every_row_sees_a_key:
        _as_pytorchs_lse(served[1])
    return served


def _as_pytorchs_lse(lse: Tensor | None) -> None:
    """Gives +inf to rows that see no key, as PyTorch's flash kernel does: its backward relies on
    that.
    """
    assert lse is not None
    lse.masked_fill_(lse == -math.inf, math.inf)


_OPERATORS: dict[str, Kernel] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
}


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
        hasattr(torch.ops.aten, operator)
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


def _replacement(serve: Kernel, original: Kernel) -> Kernel:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside.pytorch:
            return original(keys, *args, **kwargs)
        result = serve(*args, **kwargs)
        if not isinstance(result, str):
            return result
        _counts.decline(result)
        _inside.pytorch = True
        try:
            return original(keys, *args, **kwargs)
        finally:
            _inside.pytorch = False

    return kernel


class _Replaced:
    """PyTorch's operators while archflash stands in front of them, until remove()."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        _generator_state()  # asked outside of any call
        originals = {operator: _original(operator) for operator in _OPERATORS}
        with warnings.catch_warnings():
            # PyTorch warns that a kernel of its own is replaced, which is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            for operator, original in originals.items():
                if original is not None:
                    kernel = _replacement(_OPERATORS[operator], original)
                    self._library.impl(  # type: ignore[no-untyped-call]
                        operator, kernel, _KEY, with_keyset=True
                    )

    def remove(self) -> None:
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
    tensors, in this process, compiled code included.

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
