"""What the interfaces of FlashAttention-2, -3 and -4 have in common."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _autocast, _dispatch, _gradients, _proofs
from archflash._api import attention
from archflash._eager import is_eager, without_gradient
from archflash._errors import ForcedImplementationError, UnsupportedError
from archflash._given import check_dense
from archflash._kvcache import attention_with_kvcache, values_of
from archflash.compat._arguments import boolean, check_tensors, count, flag, plain

Window = tuple[int | None, int | None]
UNBOUNDED: Window = (-1, -1)


# Arguments that are numbers, of those that `attend` and `attend_to_cache` hand on.
_NUMBERS = ("dropout_p", "num_splits", "max_seqlen_q", "max_seqlen_k", "attention_chunk")


def _with_plain_numbers(options: dict[str, Any]) -> dict[str, Any]:
    if "causal" in options:
        options["causal"] = flag(options["causal"])
    for name in _NUMBERS:
        if options.get(name) is not None:
            options[name] = plain(options[name])
    return options


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, causal: bool,
    window_size: Window, softcap: float, deterministic: bool, want_lse: bool,
    lse_unseen: float = -math.inf, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A call with FlashAttention's arguments: rows before heads, causal and window aligned to the
    bottom right, -1 for an unbounded side of the window, 0 for no softcap.

    Args:
        lse_unseen: the log-sum-exp of a row that sees no key.
        options: further options of `archflash.attention`.

    Returns:
        The output, and the log-sum-exp where it is wanted: float32 (batch, heads, rows), or
        (heads, rows) for packed sequences.
    """
    call: Callable[..., Any] = attention
    if boolean("deterministic", deterministic) and torch.is_grad_enabled():
        call = _deterministic if any(x.requires_grad for x in (q, k, v)) else attention
    want_lse = flag(want_lse)
    result = call(
        q, k, v, scale=plain(softmax_scale), causal=flag(causal), window=as_window(window_size),
        softcap=plain(softcap) or None, layout="bnhd", return_lse=want_lse,
        **_with_plain_numbers(options),
    )  # fmt: skip
    if not want_lse:
        return result, None
    out, lse = result
    return out, _with_unseen(lse, lse_unseen)


def _deterministic(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`archflash.attention` by kernels of archflash, whose gradients always have the same bits.

    Raises:
        UnsupportedError: no kernel computes the gradients of this call. On the CPU none is asked
            unless it is forced, because the simulator would run it. Or the call is compiled, where
            only PyTorch's setting can ask for such gradients, and that is off.
    """
    compiling = torch.compiler.is_compiling()
    if compiling and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic=True under torch.compile, in a call whose gradients are needed: call "
            "torch.use_deterministic_algorithms(True), which a compiled backward pass reads, or "
            "leave it at False"
        )
    forced = _dispatch.forced()
    why = "PyTorch would compute the gradients"
    for name in _with_gradients(q.device) if forced is None else (forced,):
        if name not in _gradients.FOLDERS:
            continue
        try:
            with contextlib.nullcontext() if compiling else _gradients.asked_for(True):
                return attention(q, k, v, implementation=name, **options)
        except ForcedImplementationError as error:
            why = str(error)
    raise UnsupportedError(
        "deterministic=True, and no kernel of archflash computes these gradients; PyTorch's are "
        f"not promised to give the same bits: leave it at False ({why})"
    )


def _with_gradients(device: torch.device) -> list[str]:
    """The kernels that compute gradients on a device, of those that have run on such GPUs."""
    if device.type != "cuda":
        return []
    capability = torch.cuda.get_device_capability(device)
    passes = (_proofs.FORWARD, _proofs.BACKWARD)
    return [
        name
        for name in _gradients.FOLDERS
        if _native.targets(name) and all(_proofs.proved(name, capability, of) for of in passes)
    ]


def attend_to_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: int | Tensor | None,
    page_table: Tensor | None, k_new: Tensor | None, softmax_scale: float | None,
    window_size: Window, softcap: float, num_splits: int, want_lse: bool,
    lse_unseen: float = -math.inf, rotary_cos: Tensor | None = None,
    rotary_interleaved: bool = False, append: Callable[[], None] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """A call on a KV cache with FlashAttention's arguments. Rotary positions count from behind
    leftpad_k here, as `archflash.attention_with_kvcache` has them.

    Args:
        cache_seqlens: the lengths, one for all sequences, or None where the caches are full.
        num_splits: 0 for the fastest.
        lse_unseen: as for `attend`.
        rotary_interleaved: counts only with rotary_cos.
        append: writes new rows into the caches, once the call is known to be right.
        options: further options of `archflash.attention_with_kvcache`.

    Returns:
        The output, or the pair of it and the log-sum-exp where that is wanted.

    Raises:
        ValueError: k_new is given without cache_seqlens.
    """
    if cache_seqlens is None and k_new is not None:
        raise ValueError("k is given without cache_seqlens: say how long the caches are before it")
    want_lse = flag(want_lse)
    rotary_interleaved = boolean("rotary_interleaved", rotary_interleaved)
    if not isinstance(cache_seqlens, Tensor):
        check_tensors(q=q, k_cache=k_cache)
        cu_seqlens_q = options.get("cu_seqlens_q")
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        if cache_seqlens is None:
            if k_cache.ndim != 4:
                raise ValueError(f"k_cache has {k_cache.ndim} dimensions: it must have 4")
            pages = 1 if page_table is None else page_table.shape[1]
            cache_seqlens = k_cache.shape[1] * pages
        else:
            cache_seqlens = count("cache_seqlens", cache_seqlens)
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    call = _with_plain_numbers(options) | {
        "cache_seqlens": cache_seqlens, "page_table": page_table, "k_new": k_new,
        "scale": plain(softmax_scale), "window": as_window(window_size),
        "softcap": plain(softcap) or None, "num_splits": count("num_splits", num_splits) or None,
        "rotary_cos": rotary_cos,
        "rotary_interleaved": rotary_cos is not None and rotary_interleaved,
        "return_lse": want_lse,
    }  # fmt: skip
    with torch.no_grad():  # as in flash-attn, tensors that require a gradient are taken
        if append is not None:
            if is_eager():
                asked, qv = _autocast.beside_cache(k_cache, q, options.get("qv"))
                _native.make_problem(asked, k_cache, v_cache, values_of(**call | {"qv": qv}), 0)
            append()
        result = attention_with_kvcache(q, k_cache, v_cache, **call)
    given = (q, k_cache, v_cache, k_new, *options.values())
    result = without_gradient("attention with a KV cache", result, *given)
    if not want_lse:
        return result
    out, lse = result
    return out, _with_unseen(lse, lse_unseen)


def needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _NoBackward(torch.autograd.Function):
    """Gives a result on, and raises UnsupportedError where its gradients are asked for."""

    @staticmethod
    def forward(
        ctx: Any, name: str, out: Tensor, lse: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.name = name
        return out, lse

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(f"{ctx.name}: there are no gradients of a call with it")


def without_backward(
    name: str, q: Tensor, k: Tensor, v: Tensor, *, num_splits: int, attention_chunk: int = 0,
    **options: Any,
) -> Any:  # fmt: skip
    """`attend_to_cache` of tensors that may require gradients.

    Args:
        name: the argument for which there are none.
        num_splits: 1 for any number, as by default.
    """
    options |= {
        "k_new": None, "num_splits": num_splits if num_splits > 1 else 0,
        "attention_chunk": attention_chunk or None,
    }  # fmt: skip
    qv = options.get("qv")
    if not needs_gradients(q, k, v, qv):
        return attend_to_cache(q, k, v, **options)
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"{name} in a compiled call whose gradients are needed: there are none; call it under "
            "torch.no_grad()"
        )
    with torch.no_grad():
        result = attend_to_cache(q, k, v, **options)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out, lse = _NoBackward.apply(name, out, lse, q, k, v, qv)  # type: ignore[no-untyped-call]
    return (out, lse) if isinstance(result, tuple) else out


def as_window(window_size: Window) -> Window | None:
    """A window as archflash has it: None for an unbounded side, and for none at all."""
    if window_size is UNBOUNDED:
        return None
    left, right = (None if side is None or side < 0 else side for side in sides_of(window_size))
    return None if left is None and right is None else (left, right)


def sides_of(window_size: Any) -> list[int | None]:
    """Both sides of a window as Python has them; a side may be a tensor, and so may both."""
    is_pair = isinstance(window_size, (tuple, list)) or getattr(window_size, "ndim", 0) == 1
    if isinstance(window_size, Tensor):
        check_dense(window_size=window_size)
    sides = [plain(side) for side in window_size] if is_pair else []
    if len(sides) != 2 or not all(
        side is None or isinstance(side, (int, torch.SymInt)) for side in sides
    ):
        raise TypeError(
            f"window_size is {_native.given(window_size)}: it must be (left, right), each an int"
        )
    return sides


def is_window(window_size: Window) -> bool:
    """Whether any side is bounded."""
    return as_window(window_size) is not None


def seen_by_none(lse: Tensor) -> Tensor:
    """A log-sum-exp in which rows that see no key have -inf, as archflash has it. FlashAttention-2
    gives them +inf.
    """
    return lse.masked_fill(lse == math.inf, -math.inf)


def _with_unseen(lse: Tensor, value: float) -> Tensor:
    """The log-sum-exp with a value for rows that see no key."""
    return lse if value == -math.inf else lse.masked_fill(lse == -math.inf, value)


def refuse(**given: tuple[Any, Any]) -> None:
    """Refuses arguments that archflash does not take.

    Args:
        given: for each argument its value and the only one that is taken.

    Raises:
        UnsupportedError: one has another value; it is named.
    """
    for name, (value, taken) in given.items():
        value = plain(value)
        if isinstance(value, Tensor) or getattr(value, "ndim", 0) > 0:
            raise UnsupportedError(f"{name}: not built yet; leave it at {taken}")
        if value != taken:
            raise UnsupportedError(f"{name}={value!r}: not built yet; leave it at {taken!r}")
