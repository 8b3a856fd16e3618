"""Calls of attention, gradients and caches by a forced kernel, compared with float64."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import _options, _registry, reference
from archflash.verify._setup import Item, NotHereError, Setup, Told
from archflash.verify._wrong import WrongError, judge, same_bits, where

FP8 = ("float8_e4m3fn", "float8_e5m2")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
MORE_DIMS = ((32, 32), (96, 96), (384, 384), (512, 512))
# Runs of a call that must give the same bits. What is read too early is not so in every run.
REPEATS, LONG_REPEATS = 10, 12
LONG_ROWS = 16384
SAMPLE_ROWS = 48  # query rows of a long call that are compared at each of several places
BYTES_OF_LONG = 1 / 6  # share of the GPU's memory that the tensors of a long call may take

Tensors = tuple[Tensor, Tensor, Tensor]
Call = dict[str, Any]


class Maker:
    """Random tensors, the same for the same name."""

    def __init__(self, setup: Setup, name: str) -> None:
        self.device = setup.device
        self._generator = torch.Generator(device=setup.device).manual_seed(
            zlib.crc32(name.encode())
        )

    def rand(self, *shape: int, dtype: str = "float32") -> Tensor:
        x = torch.randn(shape, generator=self._generator, device=self.device)
        return x.to(getattr(torch, dtype))

    def qkv(
        self, dtype: str, dims: tuple[int, int], heads: tuple[int, int], nq: int, nk: int,
        batch: int = 1,
    ) -> Tensors:  # fmt: skip
        d, dv = dims
        return (
            self.rand(batch, heads[0], nq, d, dtype=dtype),
            self.rand(batch, heads[1], nk, d, dtype=dtype),
            self.rand(batch, heads[1], nk, dv, dtype=dtype),
        )

    def int32(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def ranges(self, rows: int, keys: int) -> Tensor:
        """key_ranges that begin later and later, and end near the end."""
        row = torch.arange(rows, dtype=torch.int32, device=self.device)
        both = torch.stack([row * keys // (2 * rows), keys - row % 7], -1)
        return both[None, None, :, None]

    def lists(self, *shape: int, keys: int) -> Tensor:
        """key_indices of distinct keys, some of them none."""
        step = torch.arange(shape[-1], device=self.device)
        first = torch.arange(math.prod(shape[:-1]), device=self.device).reshape(*shape[:-1], 1)
        listed = (step * 7 + first * 3) % (keys + 5) - 2
        return torch.where(step < keys, listed, -1).int()

    def ends(self, lengths: Sequence[int]) -> Tensor:
        return self.int32([0, *itertools.accumulate(lengths)])


# --- attention ---


def first_items(kernel: str, dtype: str, dims: tuple[int, int], setup: Setup) -> list[Item]:
    """Small calls of a head dimension, which must work before all else."""
    fp8 = dtype in FP8
    rows = 40 if setup.simulate else 700

    def item(name: str, make: Callable[[Maker], tuple[Tensors, Call]]) -> Item:
        label = f"d{dims[0]} {name}" if dims[0] == dims[1] else f"d{dims[0]}/{dims[1]} {name}"
        run = functools.partial(check_call, kernel, f"{dtype} {label}", make)
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
        run = functools.partial(check_call, kernel, f"{dtype} {name}", make)
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


def check_call(
    kernel: str, name: str, make: Callable[[Maker], tuple[Tensors, Call]], setup: Setup
) -> Told:
    """Runs a call several times; compares bits between runs, and the result with float64."""
    (q, k, v), call = make(Maker(setup, name))
    plan = planned(kernel, q, k, v, call, setup)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = archflash.attention(
            q, k, v, implementation=kernel, return_lse=True, **call
        )
        return answer

    out, lse = run(q, k, v)
    for _ in range(0 if setup.simulate else REPEATS - 1):
        run(*poisoned(q, k, v))
        forget_caches(setup)
        again, lse_again = run(q, k, v)
        same_bits("output", by_head(out, call), by_head(again, call))
        same_bits("log-sum-exp", lse, lse_again)
    compare(kernel, setup, (q, k, v), call, out, lse)
    return Told(kernels=tuple(plan.kernels))


def poisoned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors like these that are full of NaN. A call with them leaves NaN wherever a kernel keeps
    anything, so that the next one shows it if it reads something before it is there.
    """
    made = [torch.empty_like(x) for x in tensors]
    for x in made:
        if x.dtype.itemsize == 1:
            x.view(torch.uint8).fill_(0x7F)  # NaN in both types of 8 bits
        else:
            x.fill_(torch.nan)
    return tuple(made)


@functools.cache
def _scratch(device: str, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def forget_caches(setup: Setup) -> None:
    """Fills the GPU's L2 cache with other data, so that the next copies of a kernel take long."""
    size = 2 * torch.cuda.get_device_properties(setup.device).L2_cache_size
    if size < setup.memory / 8:
        _scratch(setup.device, size).fill_(1)


def planned(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, call: Call, setup: Setup, **more: Any
) -> _native.LaunchPlan:
    """The plan of a call by a kernel, which raises ForcedImplementationError if it does not serve
    it.
    """
    plan = archflash.explain(
        q, k, v, implementation=kernel, device=setup.planned_for, return_lse=True, **call, **more
    ).plan
    if plan is None:
        raise NotHereError(f"{kernel} launches nothing for it")
    return plan


def by_head(x: Tensor, call: Call) -> Tensor:
    """A tensor of rows with its heads before its rows."""
    if call.get("cu_seqlens_q") is not None:
        return x.transpose(0, 1)
    return x.transpose(1, 2) if call.get("layout") == "bnhd" else x


def compare(
    kernel: str, setup: Setup, tensors: Tensors, call: Call, out: Tensor, lse: Tensor | None
) -> None:
    """Raises WrongError if a result breaks the error rule."""
    q, k, v = tensors
    asked = {name: value for name, value in call.items() if name not in _options.ADVICE}
    expected, expected_lse = reference.attention(q, k, v, **asked)
    if call.get("approximate") is not None:
        report, lse_report = reference.check_approximate(
            call["approximate"], out, lse, q, k, v, **asked
        )
        judge("output", by_head(out, call), by_head(expected, call), report)
        if lse is not None and lse_report is not None:
            judge("log-sum-exp", lse[..., None], expected_lse[..., None], lse_report)
        return
    if str(q.dtype).removeprefix("torch.") in FP8:
        report = reference.check_fp8(out, expected, q, k, v, **asked)
    else:
        report = reference.check(out, expected, reference.baseline(q, k, v, **asked))
    judge("output", by_head(out, call), by_head(expected, call), report)
    if lse is not None:
        more = reference.fp8_score_error(kernel, setup.capability, q, k, v, **asked)
        judge(
            "log-sum-exp", lse[..., None], expected_lse[..., None],
            reference.check_lse(lse, expected_lse, more),
        )  # fmt: skip


# --- long calls ---


def long_items(kernel: str, setup: Setup) -> list[Item]:
    """One long call of each head dimension, of which some rows are compared."""
    dtypes = _native.describe(kernel).dtypes
    found = []
    for dtype, dims in itertools.product(dtypes, DIMS):
        if dtype == "float16" and "bfloat16" in dtypes and not setup.full:
            continue  # the same kernels but for conversions
        label = f"{dtype} d{dims[0]}" + ("" if dims[0] == dims[1] else f"/{dims[1]}")
        found.append(Item(label, functools.partial(long_call, kernel, dtype, dims)))
    return found


def long_call(kernel: str, dtype: str, dims: tuple[int, int], setup: Setup) -> Told:
    """A long causal call: it is finite, has the same bits each time, and is right in some rows."""
    heads = (8, 2)
    rows = long_rows(kernel, dims, heads, setup.memory)
    q, k, v = Maker(setup, f"long {dtype} {dims}").qkv(dtype, dims, heads, rows, rows)
    call: Call = {"causal": True}
    plan = planned(kernel, q, k, v, call, setup)
    out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True, **call)
    for number in range(LONG_REPEATS):
        if number % 4 == 0:
            archflash.attention(*poisoned(q, k, v), implementation=kernel, **call)
        again = archflash.attention(q, k, v, implementation=kernel, **call)
        same_bits("output", out, again)
    compare_rows(kernel, setup, (q, k, v), call, out, lse)
    return Told(f"{rows} rows", tuple(plan.kernels))


def long_rows(kernel: str, dims: tuple[int, int], heads: tuple[int, int], memory: int) -> int:
    """The rows of a long call, whose tensors fit into a share of the GPU's memory."""
    row_bytes = 4 * 2 * sum(heads) * sum(dims)  # numbers are made in float32
    rows = LONG_ROWS if _registry.uses_tensor_cores(kernel) else LONG_ROWS // 4
    while rows > 1024 and rows * row_bytes > memory * BYTES_OF_LONG:
        rows //= 2
    return rows - 37  # the last tile is not full


def compare_rows(
    kernel: str, setup: Setup, tensors: Tensors, call: Call, out: Tensor, lse: Tensor
) -> None:
    """`compare` for some rows of a call whose only option is causal, and that all are finite."""
    q, k, v = tensors
    if not bool(out.isfinite().all()):
        raise WrongError("output: values that are not finite", where(~out.isfinite(), out))
    nq, nk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    for number, start in enumerate(
        (0, nq // 5 // 128 * 128 + 100, nq // 2, nq * 4 // 5, max(nq - SAMPLE_ROWS, 0))
    ):
        head = number % k.shape[1]
        rows = slice(start, start + SAMPLE_ROWS)
        of_head = slice(head * group, (head + 1) * group)
        part = (q[:, of_head, rows], k[:, head : head + 1], v[:, head : head + 1])
        asked = call | {"q_offset": nk - nq + start}
        try:
            compare(kernel, setup, part, asked, out[:, of_head, rows], lse[:, of_head, rows])
        except WrongError as error:
            said = f"heads from {head * group}, rows from {start} on: {error}"
            raise WrongError(said, error.where) from None


# --- gradients ---


def gradient_items(kernel: str, dtype: str, setup: Setup) -> list[Item]:
    """Gradients by a kernel's backward pass."""
    rows = 300

    def item(
        name: str, make: Callable[[Maker], tuple[Tensors, Call]], limit_s: float = 60, **more: Any
    ) -> Item:
        run = functools.partial(check_gradients, kernel, f"{dtype} {name}", make, more)
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


def check_gradients(
    kernel: str, name: str, make: Callable[[Maker], tuple[Tensors, Call]], more: Call, setup: Setup
) -> Told:
    """Compares gradients with float64. Deterministic ones have the same bits each time."""
    maker = Maker(setup, name)
    (q, k, v), call = make(maker)
    plan = planned(kernel, q, k, v, call, setup, backward=True)
    dtype = str(q.dtype).removeprefix("torch.")
    dout = maker.rand(*q.shape[:-1], v.shape[-1], dtype=dtype)
    # Output and log-sum-exp are those of the formula, so that no forward pass matters.
    exact, exact_lse = reference.attention(q, k, v, **call)
    out, lse = exact.to(q.dtype), exact_lse.float()

    def run(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return archflash.attention_backward(
            dout, q, k, v, out, lse, implementation=kernel, **call, **more
        )

    run(*poisoned(dout, q, k, v))
    forget_caches(setup)
    found = run(dout, q, k, v)
    names = ("dq", "dk", "dv", "dsinks")
    for _ in range(4 if more.get("deterministic") else 0):
        for what, first, again in zip(names, found, run(dout, q, k, v), strict=False):
            same_bits(what, by_rows(first, call), by_rows(again, call))
    expected = reference.attention_backward(dout, q, k, v, **call)
    base = reference.baseline_backward(dout, q, k, v, **call)
    for what, gradient in zip(names, found, strict=False):
        right = getattr(expected, what)
        report = reference.check(gradient, right, getattr(base, what).to(gradient.dtype))
        judge(what, by_rows(gradient, call), by_rows(right, call), report)
    return Told(kernels=tuple(plan.kernels))


def by_rows(x: Tensor, call: Call) -> Tensor:
    """`by_head` for gradients, among them those of sinks."""
    return x if x.dim() == 1 else by_head(x, call)


# --- caches ---


def cache_items(kernel: str, dtype: str, setup: Setup) -> list[Item]:
    """Calls of attention_with_kvcache."""

    def item(name: str, **made: Any) -> Item:
        run = functools.partial(check_cache, kernel, f"{dtype} {name}", dtype, made)
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


def cache_call(maker: Maker, dtype: str, made: dict[str, Any]) -> tuple[Tensor, list[Tensor], Call]:
    """Queries, caches whose unused rows are NaN, and the options of a call."""
    lengths: list[int] = made["lengths"]
    heads: tuple[int, int] = made.get("heads", (8, 2))
    latent = bool(made.get("latent"))
    d, dv = (64, 512) if latent else (made.get("d", 128),) * 2
    nq, n_new, page = made.get("nq", 1), made.get("n_new", 0), made.get("page_size", 0)
    kind = made.get("cache_dtype", dtype)
    batch, capacity = len(lengths), -(-(max(lengths) + n_new) // 64) * 64
    call: Call = {"cache_seqlens": maker.int32(lengths), "causal": True}
    caches = [maker.rand(batch, capacity, heads[1], n, dtype=kind) for n in (d, dv)]
    for sequence, length in enumerate(lengths if maker.device != "meta" else ()):
        for cache in caches:
            cache[sequence, length:] = float("nan")
    if page:
        pages = batch * capacity // page
        order = torch.arange(pages, device=maker.device).flip(0)
        for number, cache in enumerate(caches):
            mixed = torch.empty_like(cache).reshape(pages, page, *cache.shape[2:])
            mixed[order] = cache.reshape(mixed.shape)
            caches[number] = mixed
        call["page_table"] = order.to(torch.int32).reshape(batch, -1)
    if n_new:
        call["k_new"] = maker.rand(batch, n_new, heads[1], d, dtype=kind)
        call["v_new"] = maker.rand(batch, n_new, heads[1], dv, dtype=kind)
    if kind in FP8:
        call |= {"k_descale": maker.rand(1).abs() + 0.5, "v_descale": maker.rand(1).abs() + 0.5}
    if made.get("masked"):
        call["attn_mask"] = maker.rand(1, 1, nq, 32) > -1.0
    rows: list[int] | None = made.get("rows")
    if rows is not None:
        call["cu_seqlens_q"] = maker.int32([0, *itertools.accumulate(rows)])
    shape = (batch, nq) if rows is None else (sum(rows),)
    q = maker.rand(*shape, heads[0], d, dtype=dtype)
    if made.get("listed"):
        call["key_indices"] = maker.lists(batch, 1, nq, 300, keys=max(lengths))
    if latent:
        call |= {"qv": maker.rand(batch, nq, heads[0], dv, dtype=dtype), "scale": 0.05}
    return q, caches, call


def check_cache(kernel: str, name: str, dtype: str, made: dict[str, Any], setup: Setup) -> Told:
    """Compares a call over a cache with float64."""
    q, caches, call = cache_call(Maker(setup, name), dtype, made)
    plan = planned(kernel, q, caches[0], caches[1], call, setup)
    expected, expected_lse = reference.attention_with_kvcache(q, *caches, **call)
    base = reference.baseline_with_kvcache(q, *caches, **call)
    after = reference.appended(*caches, **call)

    def run(q: Tensor, *caches: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        own = [x.clone() for x in caches]
        out, lse = archflash.attention_with_kvcache(
            q, *own, implementation=kernel, return_lse=True, **call
        )
        return out, lse, own

    def heads_first(x: Tensor) -> Tensor:  # (batch, heads, rows, dv), of one sequence if packed
        return x.transpose(-3, -2) if x.ndim == 4 else x.transpose(-3, -2)[None]

    def of_heads(x: Tensor) -> Tensor:  # (batch, heads, rows, 1)
        return (x if x.ndim == 3 else x[None])[..., None]

    out, lse, written = run(q, *caches)
    for _ in range(REPEATS - 1):
        run(*poisoned(q, *caches))
        forget_caches(setup)
        again, lse_again, _ = run(q, *caches)
        same_bits("output", heads_first(out), heads_first(again))
        same_bits("log-sum-exp", lse, lse_again)
    report = reference.check(out, expected, base)
    judge("output", heads_first(out), heads_first(expected), report)
    judge(
        "log-sum-exp", of_heads(lse), of_heads(expected_lse),
        reference.check_lse(lse, expected_lse),
    )  # fmt: skip
    for what, cache, right in zip(("k_cache", "v_cache"), written, after, strict=True):
        same_bits(what, right.float().flatten(1), cache.float().flatten(1))
    return Told(kernels=tuple(plan.kernels))


# --- decoding ---


def decode_items(kernel: str, setup: Setup) -> list[Item]:
    """Few query rows over many keys, as one step of decoding has them."""
    found = []
    for dtype in _native.describe(kernel).dtypes:
        for d, rows, batch in ((64, 1, 4), (128, 1, 1), (128, 4, 8), (256, 1, 2)):
            run = functools.partial(decode, kernel, dtype, d, rows, batch)
            found.append(Item(f"{dtype} d{d}, {batch}x{rows} rows", run))
    return found


def decode(kernel: str, dtype: str, d: int, rows: int, batch: int, setup: Setup) -> Told:
    """Runs one step 20 times, which must give the same bits, and compares it with float64."""
    keys = 20011 if batch * d < 512 else 6007
    q, k, v = Maker(setup, f"decode {dtype} {d} {rows} {batch}").qkv(
        dtype, (d, d), (8, 2), rows, keys, batch
    )
    call: Call = {"causal": True}
    plan = planned(kernel, q, k, v, call, setup)
    out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True, **call)
    for number in range(20):
        if number % 5 == 0:
            archflash.attention(*poisoned(q, k, v), implementation=kernel, **call)
            forget_caches(setup)
        same_bits("output", out, archflash.attention(q, k, v, implementation=kernel, **call))
    compare(kernel, setup, (q, k, v), call, out, lse)
    return Told(f"{keys} keys", tuple(plan.kernels))


# --- the functions beside attention ---


def function_items(setup: Setup) -> list[Item]:
    """quantize_fp8 and merge_attention, whose results are compared with plain operations."""
    return [
        Item("quantize_fp8", check_quantize),
        Item("merge_attention", check_merge),
    ]


def check_quantize(setup: Setup) -> Told:
    """Numbers of 8 bits and their scales against float32 on the same device."""
    if not _native.has_quantizer(setup.capability):
        raise NotHereError("no code of quantize_fp8 for this GPU: it runs in PyTorch")
    x = Maker(setup, "quantize").rand(2, 3, 300, 128, dtype="bfloat16")
    names = list(_native.quantizer_names())
    for per, dims in (("tensor", (0, 1, 2, 3)), ("head", (2, 3))):
        made, scale = archflash.quantize_fp8(x, per=per, implementation=names[0])
        again, _ = archflash.quantize_fp8(x, per=per, implementation=names[0])
        same_bits(f"per {per}", made.float(), again.float())
        largest = x.float().abs().amax(dims, keepdim=True)
        back = made.double() * scale.double().reshape(largest.shape)
        bound = x.double().abs() * 2.0**-4 + largest.double() * 2.0**-9
        wrong = ~((back - x.double()).abs() <= bound)
        if bool(wrong.any()):
            raise WrongError(f"per {per}: numbers are not the nearest", where(wrong, made.float()))
    return Told()


def check_merge(setup: Setup) -> Told:
    """Two halves of the keys, merged, are attention over all of them."""
    if not _native.has_merger(setup.capability):
        raise NotHereError("no code of merge_attention for this GPU: it runs in PyTorch")
    maker = Maker(setup, "merge")
    for dtype in ("float16", "bfloat16"):
        outs = [maker.rand(2, 3, 300, 128, dtype=dtype) for _ in range(3)]
        lses = [maker.rand(2, 3, 300) for _ in range(3)]
        name = next(iter(_native.merger_names()))
        out, lse = archflash.merge_attention(outs, lses, implementation=name)
        expected, expected_lse = reference.merge_attention(outs, lses)
        shares = torch.softmax(torch.stack(lses), 0)[..., None]
        plain = (shares * torch.stack(outs).float()).sum(0)
        report = reference.check(out, expected, plain.to(out.dtype))
        judge("output", out, expected, report)
        judge(
            "log-sum-exp", lse[..., None], expected_lse[..., None],
            reference.check_lse(lse, expected_lse),
        )  # fmt: skip
    return Told()
