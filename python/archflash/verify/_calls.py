"""The calls of attention, gradients and caches that `archflash verify` makes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from archflash import _archflash as _native
from archflash.verify import _checks
from archflash.verify._making import FP8, Call, Maker, Tensors
from archflash.verify._setup import Item, Setup

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
MORE_DIMS = ((32, 32), (96, 96), (384, 384), (512, 512))


def first_items(kernel: str, dtype: str, dims: tuple[int, int], setup: Setup) -> list[Item]:
    """Small calls of a head dimension, which must work before all else."""
    fp8 = dtype in FP8
    rows = 40 if setup.simulate else 700

    def item(name: str, make: Callable[[Maker], tuple[Tensors, Call]]) -> Item:
        label = f"d{dims[0]} {name}" if dims[0] == dims[1] else f"d{dims[0]}/{dims[1]} {name}"
        run = functools.partial(_checks.check_call, kernel, f"{dtype} {label}", make)
        return Item(label, run)

    def plain(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, dims, (1, 1), min(rows, 128), min(rows, 128)), {}

    def causal(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, dims, (4, 2), rows, rows + 33), {"causal": True}

    if setup.simulate:
        return [item("causal, grouped heads", causal)]

    def window(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, dims, (2, 2), rows, rows), {"window": (170, 3), "softcap": 9.0}

    def sinks(make: Maker) -> tuple[Tensors, Call]:
        call = {"sinks": make.rand(4), "causal": True, "q_offset": 300, "scale": 0.2}
        return make.qkv(dtype, dims, (4, 1), 257, 600), call

    def one_row(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, dims, (4, 1), 1, 3 * rows, 2), {}

    def shares(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, dims, (4, 1), 9, 5000), {"causal": True, "num_splits": 3}

    def packed(make: Maker) -> tuple[Tensors, Call]:
        lengths, keys = [7, 0, 300, 393], [50, 3, 300, 211]
        q, k, v = (x[0].transpose(0, 1) for x in make.qkv(dtype, dims, (4, 2), 700, 564))
        return (q, k, v), {
            "causal": True, "cu_seqlens_q": make.ends(lengths), "cu_seqlens_k": make.ends(keys),
        }  # fmt: skip

    def many(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, dims, (32, 8), 1025, 1025, 2), {"causal": True}

    def transposed(make: Maker) -> tuple[Tensors, Call]:
        q, k, v = make.qkv(dtype, dims, (4, 2), 257, 300)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return (q, k, v), {"layout": "bnhd"}

    found = [
        item("plain", plain),
        item("causal, grouped heads", causal),
        item("window and softcap", window),
        item("sinks, scale and offset", sinks),
        item("one query row", one_row),
        item("packed sequences", packed),
        item("rows before heads", transposed),
        item("many tiles", many),
    ]
    if not fp8:
        found.insert(5, item("keys in 3 shares", shares))
        return found

    def descales(make: Maker) -> tuple[Tensors, Call]:
        call = {f"{x}_descale": make.rand(2, n).abs() + 0.5 for x, n in (("q", 4), ("k", 2))}
        call["v_descale"] = make.rand(2, 2).abs() + 0.5
        return make.qkv(dtype, dims, (4, 2), 300, 520, 2), call

    return [*found, item("descales", descales)]


def odd_items(kernel: str, dtype: str, setup: Setup) -> list[Item]:
    """Calls with masks as data, dropout and odd tensors."""

    def item(name: str, make: Callable[[Maker], tuple[Tensors, Call]]) -> Item:
        run = functools.partial(_checks.check_call, kernel, f"{dtype} {name}", make)
        return Item(name, run)

    def odd_columns(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, (100, 100), (2, 1), 300, 333), {"causal": True}

    found = [item("d100, copied", odd_columns)]
    if dtype in FP8:
        return found
    for d in (64, 128, 256) if setup.full else (128,):
        dims = (d, d)

        def tensors(make: Maker, dims: tuple[int, int] = dims) -> Tensors:
            return make.qkv(dtype, dims, (4, 2), 400, 450)

        def added(make: Maker, tensors: Any = tensors) -> tuple[Tensors, Call]:
            return tensors(make), {"attn_mask": make.rand(1, 4, 400, 450, dtype=dtype)}

        def kept(make: Maker, tensors: Any = tensors) -> tuple[Tensors, Call]:
            return tensors(make), {"attn_mask": make.rand(1, 1, 400, 450) > -0.5}

        def slopes(make: Maker, tensors: Any = tensors) -> tuple[Tensors, Call]:
            return tensors(make), {"alibi_slopes": make.rand(4).abs(), "causal": True}

        def ranges(make: Maker, tensors: Any = tensors) -> tuple[Tensors, Call]:
            begin = make.int32([[min(3 * row // 4, 440), row + 60] for row in range(400)])
            return tensors(make), {"key_ranges": begin[None, None, :, None]}

        def dropped(make: Maker, tensors: Any = tensors) -> tuple[Tensors, Call]:
            state = torch.tensor([1234, 8], dtype=torch.int64, device=make.device)
            return tensors(make), {"dropout_p": 0.2, "rng_state": state, "causal": True}

        found += [
            item(f"d{d} {name}", make)
            for name, make in (
                ("added mask", added), ("bool mask", kept), ("slopes", slopes),
                ("ranges of keys", ranges), ("dropout", dropped),
            )
        ]  # fmt: skip
    return found


def long_items(kernel: str, setup: Setup) -> list[Item]:
    """One long call of each head dimension, of which some rows are compared."""
    dtypes = _native.describe(kernel).dtypes
    found = []
    for dtype, dims in itertools.product(dtypes, DIMS):
        if dtype == "float16" and "bfloat16" in dtypes and not setup.full:
            continue  # the same kernels but for conversions
        label = f"{dtype} d{dims[0]}" + ("" if dims[0] == dims[1] else f"/{dims[1]}")
        found.append(Item(label, functools.partial(_checks.long_call, kernel, dtype, dims)))
    return found


def decode_items(kernel: str, setup: Setup) -> list[Item]:
    """Few query rows over many keys, as one step of decoding has them."""
    found = []
    for dtype in _native.describe(kernel).dtypes:
        for d, rows, batch in ((64, 1, 4), (128, 1, 1), (128, 4, 8), (256, 1, 2)):
            run = functools.partial(_checks.decode, kernel, dtype, d, rows, batch)
            found.append(Item(f"{dtype} d{d}, {batch}x{rows} rows", run))
    return found


def gradient_items(kernel: str, dtype: str, setup: Setup) -> list[Item]:
    """Gradients by a kernel's backward pass."""
    rows = 300

    def item(
        name: str, make: Callable[[Maker], tuple[Tensors, Call]], limit_s: float = 60, **more: Any
    ) -> Item:
        run = functools.partial(_checks.check_gradients, kernel, f"{dtype} {name}", make, more)
        return Item(name, run, limit_s)

    found = []
    for dims in DIMS if not setup.simulate else DIMS[:1]:
        label = f"d{dims[0]}" + ("" if dims[0] == dims[1] else f"/{dims[1]}")

        def plain(make: Maker, dims: tuple[int, int] = dims) -> tuple[Tensors, Call]:
            return make.qkv(dtype, dims, (2, 2), rows, rows + 40), {}

        def causal(make: Maker, dims: tuple[int, int] = dims) -> tuple[Tensors, Call]:
            return make.qkv(dtype, dims, (4, 2), 2 * rows + 7, 2 * rows, 2), {"causal": True}

        found += [
            item(f"{label} plain", plain),
            item(f"{label} causal, grouped heads", causal),
            item(f"{label} deterministic", causal, deterministic=True),
        ]

    def window(make: Maker) -> tuple[Tensors, Call]:
        call = {"window": (90, 20), "softcap": 9.0, "sinks": make.rand(4)}
        return make.qkv(dtype, (128, 128), (4, 2), rows, rows), call

    def packed(make: Maker) -> tuple[Tensors, Call]:
        q, k, v = (x[0].transpose(0, 1) for x in make.qkv(dtype, (128, 128), (4, 2), 600, 600))
        ends = make.ends([7, 0, 250, 343])
        return (q, k, v), {"causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends}

    def mask(make: Maker) -> tuple[Tensors, Call]:
        call = {"attn_mask": make.rand(1, 2, rows, rows, dtype=dtype)}
        return make.qkv(dtype, (64, 64), (2, 2), rows, rows), call

    def dropout(make: Maker) -> tuple[Tensors, Call]:
        state = torch.tensor([99, 4], dtype=torch.int64, device=make.device)
        call = {"dropout_p": 0.2, "rng_state": state, "causal": True}
        return make.qkv(dtype, (128, 128), (2, 2), rows, rows), call

    def long(make: Maker) -> tuple[Tensors, Call]:
        return make.qkv(dtype, (128, 128), (2, 1), 3000, 3000), {"causal": True}

    return [
        *found,
        item("d128 window, softcap and sinks", window),
        item("d128 packed sequences", packed),
        item("d64 added mask", mask),
        item("d128 dropout", dropout),
        item("d128 long", long, deterministic=True),
    ]


def cache_items(kernel: str, dtype: str, setup: Setup) -> list[Item]:
    """Calls of attention_with_kvcache."""

    def item(name: str, **made: Any) -> Item:
        run = functools.partial(_checks.check_cache, kernel, f"{dtype} {name}", dtype, made)
        return Item(name, run)

    lengths = [333, 40, 1] if not setup.simulate else [40]
    found = []
    for d in (64, 128, 256):
        found += [
            item(f"d{d} one row", lengths=lengths, d=d),
            item(f"d{d} pages of 16 rows", lengths=lengths, d=d, page_size=16, nq=3),
            item(f"d{d} many rows", lengths=[700, 300], d=d, nq=200),
            item(f"d{d} many rows, pages", lengths=[700, 300], d=d, nq=200, page_size=64),
        ]
    return [
        *found,
        item("d128 append", lengths=lengths, n_new=4, nq=4, page_size=32),
        item("d128 append, many rows", lengths=[300, 200], n_new=150, nq=150),
        item("d128 8-bit cache", lengths=lengths, cache_dtype="float8_e4m3fn"),
        item("d128 long, split keys", lengths=[9000, 5000], page_size=64, heads=(16, 2)),
        item("latent cache", lengths=[700, 200], latent=True, heads=(16, 1), page_size=64),
        item(
            "latent cache, listed rows",
            lengths=[700, 200],
            latent=True,
            heads=(16, 1),
            page_size=64,
            listed=True,
        ),
    ]


def function_items(setup: Setup) -> list[Item]:
    """quantize_fp8 and merge_attention, whose results are compared with plain operations."""
    return [
        Item("quantize_fp8", _checks.check_quantize),
        Item("merge_attention", _checks.check_merge),
    ]
