"""PyTorch's scaled_dot_product_attention, and which of its fused CUDA kernels it may choose.

PyTorch chooses a kernel without looking at everything that decides whether that kernel is right
(`_pytorch_faults` has the list). Here kernels that fail at a call are switched off for it, and
tensors and masks are brought into a form that the others read.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from archflash import _fused_kernels, _pytorch_faults
from archflash._eager import in_transform, is_tracing

_MINUS_INF = -math.inf

# Kept at import: code may put `archflash.scaled_dot_product_attention` in its place later.
PYTORCHS_SDPA = F.scaled_dot_product_attention


def pytorchs_sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's scaled_dot_product_attention without those of its kernels that fail at the call."""
    if scale is not None and not scale > 0:
        factor, scale = positive_scale(scale)
        query = query * factor
    traced = is_tracing()  # by torch.jit.trace, which must not record what one shape needs
    if not traced and type(attn_mask) is Tensor and _has_fused_kernels(query):
        nk = key.shape[-2]
        if attn_mask.is_floating_point():
            attn_mask = mask_for_fused_kernels(attn_mask, nk, query.dtype)
            if attn_mask.requires_grad and torch.is_grad_enabled():
                query = _with_gradient(query, key, value)
        if query.ndim == 4 and differentiates(query, key, value, attn_mask):
            more = hidden_keys_for_cudnn(query, key)
            if (
                more > 0
                and _gpu(query.device.index).cudnn_first
                and _on(SDPBackend.CUDNN_ATTENTION)
            ):
                key, value, attn_mask = with_hidden_keys(key, value, attn_mask, more)
    if not traced and _has_fused_kernels(query):
        query = without_repeats(query, value)
    failing = {}
    if not traced:
        failing = failing_kernels(query, key, value, attn_mask, is_causal, dropout_p != 0.0)
    with _others(failing) if failing else _NOTHING:
        out = PYTORCHS_SDPA(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
    if out.requires_grad and not traced and not torch.compiler.is_compiling():
        let_read_gradients(out, query, key, value, attn_mask, is_causal)
    return out


_NOTHING = contextlib.nullcontext()


def _has_fused_kernels(query: Tensor) -> bool:
    # A fake tensor may be on a CUDA device that is not there.
    return query.is_cuda and not query.is_nested and _has_cuda()


_has_cuda = functools.cache(torch.cuda.is_available)


def hidden_keys_for_cudnn(query: Tensor, key: Tensor) -> int:
    """How many keys that a mask hides have to follow key for the gradients of PyTorch's cuDNN
    kernel to be right (`_pytorch_faults.hidden_keys`).
    """
    if not _has_fused_kernels(query):
        return 0
    gpu = _gpu(query.device.index)
    nq, nk = query.shape[2], key.shape[2]
    return _pytorch_faults.hidden_keys((gpu.major, gpu.minor), gpu.cudnn, nq, nk)


def hidden_keys(capability: tuple[int, int], nq: int, nk: int) -> int:
    """`hidden_keys_for_cudnn` of numbers of queries and keys."""
    return _pytorch_faults.hidden_keys(capability, _fused_kernels.cudnn_version(), nq, nk)


def with_hidden_keys(
    key: Tensor, value: Tensor, mask: Tensor, more: int
) -> tuple[Tensor, Tensor, Tensor]:
    """key, value and the mask with more keys, none of which a query sees."""
    hidden: float | bool = False if mask.dtype == torch.bool else _MINUS_INF
    mask = _changed_rows(mask, key.shape[2], lambda rows: F.pad(rows, (0, more), value=hidden))
    return F.pad(key, (0, 0, 0, more)), F.pad(value, (0, 0, 0, more)), mask


def positive_scale(scale: float) -> tuple[float, float]:
    """A factor for q and a scale for the product, which is positive: PyTorch's kernels need one
    (`_pytorch_faults`). Both together are the given scale.
    """
    return (0.0, 1.0) if scale == 0 else (-1.0, -scale)


def mask_for_fused_kernels(mask: Tensor, nk: int, dtype: torch.dtype | None = None) -> Tensor:
    """An added mask as PyTorch's fused CUDA kernels read it: a number for each key in neighbouring
    elements from an aligned address on, in the dtype of q if that is given. cuDNN's takes any other
    for such a one.
    """
    if dtype is not None and mask.dtype != dtype:
        # The least finite number of a dtype has no neighbour below it but -inf in another.
        least = torch.finfo(dtype).min
        mask = torch.where(mask == _MINUS_INF, mask, mask.clamp(min=least)).to(dtype)
    dense = mask.shape[-1] == nk and (mask.stride(-1) == 1 or nk == 1)
    if dense and _address(mask) % _LOAD_BYTES == 0:
        return mask
    return _changed_rows(mask, nk, lambda rows: rows.clone(memory_format=torch.contiguous_format))


def mask_in_float32(mask: Tensor) -> Tensor:
    """An added mask of float64; what is finite stays so."""
    most = torch.finfo(torch.float32).max
    mask = mask if mask.ndim else mask[None]
    return _changed_rows(
        mask,
        mask.shape[-1],
        lambda rows: torch.where(rows.isinf(), rows, rows.clamp(-most, most)).float(),
    )


def _changed_rows(mask: Tensor, nk: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A mask with a number for each key, of which a function made each row anew; rows that are
    repeated by a stride of 0 are made once.
    """
    outer = mask.shape[:-1]
    repeated = zip(outer, mask.stride()[:-1], strict=True)
    once = mask[tuple(slice(0, 1) if n > 1 and not step else slice(None) for n, step in repeated)]
    return change(once.expand(*once.shape[:-1], nk)).expand(*outer, -1)


def _with_gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query, or the same with a gradient if none of the three has one. PyTorch before 2.13 keeps no
    log-sum-exp then, which its memory-efficient kernel needs for the gradient of a mask.
    """
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return query
    if torch.compiler.is_compiling() or in_transform():
        return query  # where nothing can require a gradient later
    return query.detach().requires_grad_()


def without_repeats(query: Tensor, value: Tensor) -> Tensor:
    """query, or a dense copy if a stride of 0 repeats it and v has other columns. PyTorch then
    orders the dimensions of the output by query's strides, and cuDNN refuses an output whose
    columns are not neighbours (H200, torch 2.11, 2026-11-29).
    """
    if query.shape[-1] == value.shape[-1]:
        return query
    repeated = any(not step and n > 1 for n, step in zip(query.shape, query.stride(), strict=True))
    return query.clone(memory_format=torch.contiguous_format) if repeated else query


_BACKENDS = {
    _pytorch_faults.CUDNN: SDPBackend.CUDNN_ATTENTION,
    _pytorch_faults.FLASH: SDPBackend.FLASH_ATTENTION,
    _pytorch_faults.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


def failing_kernels(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, dropout: bool
) -> dict[str, str]:
    """The kernels of PyTorch that fail at a call of its function."""
    if not _has_fused_kernels(query) or query.ndim != 4:
        return {}
    # torch.compile does not trace what is kept between calls.
    find = _failing_of.__wrapped__ if torch.compiler.is_compiling() else _failing_of
    gradients = differentiates(query, key, value)
    shapes = (*query.shape, key.shape[2], value.shape[3])
    return find(query.device.index, *shapes, mask is not None, is_causal, gradients, dropout)


@functools.lru_cache(maxsize=1024)
def _failing_of(
    device: int, batch: int, heads: int, nq: int, d: int, nk: int, dv: int, masked: bool,
    causal: bool, gradients: bool, dropout: bool,
) -> dict[str, str]:  # fmt: skip
    gpu = _gpu(device)
    return _fused_kernels.faults(
        capability=(gpu.major, gpu.minor), batch=batch, heads=heads, nq=nq, nk=nk, d=d, dv=dv,
        causal=causal, masked=masked, gradients=gradients, dropout=dropout, cudnn=gpu.cudnn,
    )  # fmt: skip


def _others(failing: dict[str, str]) -> contextlib.AbstractContextManager[None]:
    """A context in which PyTorch's function chooses none of these kernels."""
    kept = [backend for name, backend in _BACKENDS.items() if name not in failing and _on(backend)]
    context: contextlib.AbstractContextManager[None] = sdpa_kernel([*kept, SDPBackend.MATH])
    return context


class _Gpu(NamedTuple):
    """What PyTorch's choice of a kernel depends on, beside the call.

    Attributes:
        major, minor: compute capability of the GPU.
        cudnn: version of cuDNN.
        cudnn_first: whether PyTorch asks its cuDNN kernel before its others.
    """

    major: int
    minor: int
    cudnn: int
    cudnn_first: bool


def _ask_gpu(device: int) -> tuple[int, int, int, bool]:
    major, minor = torch.cuda.get_device_capability(device)
    first = _fused_kernels.cudnn_comes_first((major, minor))
    return major, minor, _fused_kernels.cudnn_version(), first


# torch.compile takes what it returns as a constant. PyTorch's function that says so loads dynamo.
_ask_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]
_asked_gpu = functools.cache(_ask_gpu)


def _gpu(device: int) -> _Gpu:
    # torch.compile does not trace what is kept between calls.
    return _Gpu(*(_ask_gpu(device) if torch.compiler.is_compiling() else _asked_gpu(device)))


def _on(backend: SDPBackend) -> bool:
    """Whether one of PyTorch's kernels is allowed at present, as by its sdpa_kernel."""
    if backend == SDPBackend.CUDNN_ATTENTION:
        return torch._C._get_cudnn_sdp_enabled()
    if backend == SDPBackend.FLASH_ATTENTION:
        return torch._C._get_flash_sdp_enabled()
    return torch._C._get_mem_efficient_sdp_enabled()


_LOAD_BYTES = 16  # bytes that PyTorch's fused CUDA kernels load at a time


def readable_by_fused_kernels(x: Tensor) -> Tensor:
    """A tensor as it is, or a dense copy where PyTorch's fused CUDA kernels could not read it.

    Their loads of 16 bytes fault if an address is not a multiple of 16, but PyTorch chooses them
    without looking at the tensor's address and at most of its strides. So a tensor is copied if its
    address, or a stride times the size of an element, is not a multiple of 16 bytes. It is also
    copied if its last dimension is not dense, because PyTorch would not use the fused kernels. It
    is not copied if the bytes of a row are not a multiple of 16: PyTorch then pads the rows, which
    copies them, or uses plain operations, which read any tensor. float64 has plain operations only.
    The same holds for a mask that is added; of a bool one PyTorch makes a mask that is added.
    """
    size, width = x.element_size(), x.shape[-1]
    if x.dtype == torch.float64 or width * size % _LOAD_BYTES:
        return x
    *strides, innermost = x.stride()
    aligned = innermost == 1 and all(stride * size % _LOAD_BYTES == 0 for stride in strides)
    if aligned and _address(x) % _LOAD_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def aligned_for_fused_kernels(x: Tensor) -> Tensor:
    """A tensor as it is, or a dense copy of one whose rows have a width that is a multiple of 16
    bytes, but do not start at such multiples.
    """
    size = x.element_size()
    steps = [step for n, step in zip(x.shape, x.stride(), strict=True) if n > 1 and step > 1]
    if x.shape[-1] * size % _LOAD_BYTES or x.stride(-1) != 1:
        return x
    if all(step * size % _LOAD_BYTES == 0 for step in steps) and _address(x) % _LOAD_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


_FUSED = "ScaledDotProduct"  # how autograd's nodes of PyTorch's fused kernels are called


def fused_node(out: Tensor) -> Any:
    """Autograd's node of the fused kernel that gave PyTorch's SDPA its output; None if none did."""
    node = out.grad_fn
    while node is not None and not node.name().startswith(_FUSED):
        # Columns that SDPA has appended are cut off behind the kernel.
        if not node.name().startswith("Slice"):
            return None  # SDPA by plain operations
        node = node.next_functions[0][0]
    return node


def let_read_gradients(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> None:
    """Lets the gradient of what PyTorch's SDPA returned for a call have any address and strides.

    Its fused CUDA kernels load it as they load q, k and v, and fault likewise
    (`readable_by_fused_kernels`).
    """
    if not out.is_cuda or in_transform() or (node := fused_node(out)) is None:
        return
    if "Cudnn" in node.name():
        kind = kind_for_cudnn(query, key, value, mask, is_causal)
        node.register_prehook(functools.partial(_readable_by_cudnn, kind, out.stride()))
    else:
        node.register_prehook(_readable)


def _readable(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """What the backward pass of one of PyTorch's kernels is given, as it can read it; None for as
    it is.
    """
    dout = given[0]
    if dout is None or (readable := aligned_for_fused_kernels(dout)) is dout:
        return None
    return readable, *given[1:]


def _readable_by_cudnn(
    kind: tuple[Any, ...], out_strides: tuple[int, ...], given: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """As `_readable`, for cuDNN's kernel."""
    dout = given[0]
    if dout is None or (readable := gradient_for_cudnn(kind, out_strides, dout)) is dout:
        return None
    return readable, *given[1:]


def kind_for_cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Any, ...]:
    """What calls have in common that have one plan of PyTorch's cuDNN kernel, and maybe more."""
    given = [query, key, value] if mask is None else [query, key, value, mask]
    return query.device, query.dtype, is_causal, *((x.shape, x.stride()) for x in given)


_MOST_PLANS = 4096
_strides_of_plans: dict[tuple[Any, ...], tuple[int, ...]] = {}


def gradient_for_cudnn(kind: tuple[Any, ...], out_strides: tuple[int, ...], dout: Tensor) -> Tensor:
    """The gradient of an output as PyTorch's cuDNN kernel reads it rightly, which is copied where
    it has other strides than that of the thread's first call of a kind.

    PyTorch keeps a plan of cuDNN for each kind of calls in each thread, in which the gradient has
    the strides of the first one, and uses it for all of them, so that others give wrong gradients
    without a word (H200, torch 2.11, cuDNN 9.19, 2026-12-01).
    """
    kind = (threading.get_ident(), *kind)
    strides = _strides_of_plans.get(kind)
    if strides is None:
        dense = dout.stride(-1) == 1 and aligned_for_fused_kernels(dout) is dout
        strides = dout.stride() if dense else out_strides
        if len(_strides_of_plans) >= _MOST_PLANS:
            _strides_of_plans.clear()
        _strides_of_plans[kind] = strides
    if dout.stride() == strides and _address(dout) % _LOAD_BYTES == 0:
        return dout
    return dout.new_empty_strided(dout.shape, strides).copy_(dout)


def _address(x: Tensor) -> int:
    if torch.compiler.is_compiling():
        # A compiled graph serves tensors at any address and cannot ask for it. Inductor itself
        # copies a tensor at an unaligned address; other backends leave that to the caller.
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # inside transforms such as vmap a tensor has no address
        return 1


def differentiates(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
