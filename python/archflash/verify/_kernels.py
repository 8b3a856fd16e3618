"""A call for each kernel that this GPU would launch: candidates are planned, and those that come to
a kernel of which no earlier one made use are run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _archflash as _native
from archflash import _dispatch, _gradients, _proofs
from archflash._errors import ArchflashError
from archflash.verify import _checks
from archflash.verify._making import FP8, Call, Maker, Tensors, cache_call
from archflash.verify._setup import Item, NotHereError, Setup, Told

_APPROXIMATIONS = {*_dispatch.approximating.NAMES}
DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (384, 384), (512, 512))
# Batch, heads of q and of k, queries, keys: few keys, few rows, enough to fill a GPU several times,
# many keys for few rows, and tall tiles.
SHAPES = (
    (1, 4, 2, 65, 77), (1, 4, 2, 65, 129), (2, 24, 12, 193, 321), (4, 40, 20, 193, 321),
    (12, 48, 24, 193, 321), (4, 40, 20, 193, 77), (4, 40, 20, 1150, 321), (4, 20, 10, 600, 1500),
    (1, 4, 2, 5, 4100), (1, 16, 1, 9, 4100), (1, 4, 1, 1, 9001), (1, 10, 5, 4096, 4096),
)  # fmt: skip
BEFORE_CALL = ": "  # in the name of an item: between the kernel and the call
BYTES_OF_OUTPUT = 50  # of memory that a comparison with float64 takes for an element
SHAPES_OF_GRADIENTS = SHAPES[1:5] + SHAPES[7:8]


@dataclass(frozen=True)
class Candidate:
    """A call that may come to a kernel.

    Attributes:
        name: the call in words.
        plan: plans it.
        run: runs it and compares the result with float64.
        outputs: elements of its output.
    """

    name: str
    plan: Callable[[], _native.LaunchPlan]
    run: Callable[[Setup], Told]
    outputs: int = 0


def kernel_items(kernel: str, dtype: str, of: str, setup: Setup) -> list[Item]:
    """For each kernel of a pass that the GPU would launch for a dtype, a call that comes to it."""
    found = []
    for candidate, new in chosen(kernel, dtype, of, setup):
        name = next((x for x in new if "_attention_" in x), new[-1])
        found.append(Item(f"{name}{BEFORE_CALL}{candidate.name}", candidate.run))
    return found


def items_named(
    kernel: str, dtype: str, of: str, setup: Setup, names: Collection[str]
) -> list[Item]:
    """The items of `kernel_items` with these names, without a plan of any."""
    by_call = {name.partition(BEFORE_CALL)[2]: name for name in names}
    return [
        Item(by_call[candidate.name], candidate.run)
        for candidate in candidates(kernel, dtype, of, setup)
        if candidate.name in by_call
    ]


def candidates(kernel: str, dtype: str, of: str, setup: Setup) -> Iterator[Candidate]:
    """Calls that may come to kernels of a pass."""
    return (backward if of == _proofs.BACKWARD else forward)(kernel, dtype, setup)


def chosen(
    kernel: str, dtype: str, of: str, setup: Setup
) -> Iterator[tuple[Candidate, tuple[str, ...]]]:
    """The candidates that come to kernels which those before do not, with these kernels."""
    seen: set[str] = set()
    for candidate in candidates(kernel, dtype, of, setup):
        if candidate.outputs * BYTES_OF_OUTPUT > setup.memory / 2:
            continue
        try:
            plan = candidate.plan()
        except (ArchflashError, NotHereError):  # the kernel does not serve it
            continue
        if new := tuple(name for name in plan.kernels if name not in seen):
            seen.update(new)
            yield candidate, new


def forward(kernel: str, dtype: str, setup: Setup) -> Iterator[Candidate]:
    """Candidates of a forward pass."""
    takes = {*_native.describe(kernel).features}
    for dims, shape in itertools.product(DIMS, SHAPES):
        for name, options in options_of(dtype, takes):
            yield candidate(kernel, dtype, dims, shape, name, options, setup)
        if dtype in FP8 and "block_scales" in takes:
            yield candidate(kernel, dtype, dims, shape, "block scales", block_scales(dims), setup)
    if dtype not in FP8 and takes & {"kv_cache", "kv_cache_prefill", "qv"}:
        yield from of_caches(kernel, dtype, setup)


Options = Callable[[Maker, tuple[int, int, int, int, int]], Call]


def block_scales(dims: tuple[int, int]) -> Options:
    """Scales of 32 numbers, near 1, for tensors of these head dimensions."""

    def options(make: Maker, shape: tuple[int, int, int, int, int]) -> Call:
        batch, heads, heads_kv, rows, keys = shape
        (d, dv), step = dims, _native.SCALED_NUMBERS
        sizes = {
            "q": (heads, rows, -(-d // step)),
            "k": (heads_kv, keys, -(-d // step)),
            "v": (heads_kv, -(-keys // step), dv),
        }
        powers = {x: (make.rand(batch, *size) + 127).to(torch.uint8) for x, size in sizes.items()}
        return {f"{x}_descale": y.view(torch.float8_e8m0fnu) for x, y in powers.items()}

    return options


def options_of(dtype: str, takes: set[str]) -> Iterator[tuple[str, Options]]:
    """Options that have kernels of their own, with their names."""

    def mask(make: Maker, shape: tuple[int, ...]) -> Call:
        return {"attn_mask": make.rand(1, 1, shape[3], shape[4], dtype=dtype)}

    def ranges(make: Maker, shape: tuple[int, ...]) -> Call:
        return {"key_ranges": make.ranges(shape[3], shape[4])}

    def dropout(make: Maker, shape: tuple[int, ...]) -> Call:
        state = torch.tensor([5, 4], dtype=torch.int64, device=make.device)
        return {"dropout_p": 0.2, "rng_state": state, "causal": True}

    def blocks(make: Maker, shape: tuple[int, ...]) -> Call:
        batch, heads, heads_kv, rows, keys = shape
        count = {"q": (heads, rows), "k": (heads_kv, keys), "v": (heads_kv, keys)}
        return {
            f"{name}_descale": make.rand(batch, n, -(-size // _native.SCALE_ROWS)).abs() + 0.5
            for name, (n, size) in count.items()
        }

    def lists(make: Maker, shape: tuple[int, ...]) -> Call:
        batch, _, heads_kv, rows, keys = shape
        return {"key_indices": make.lists(batch, heads_kv, rows, 90, keys=keys), "causal": True}

    def lists_of_blocks(make: Maker, shape: tuple[int, ...]) -> Call:
        batch, _, heads_kv, rows, keys = shape
        blocks = -(-rows // _native.MASK_BLOCK)
        return {"key_indices": make.lists(batch, heads_kv, blocks, 90, keys=keys)}

    def approximating(name: str, others: Options = lambda make, shape: {}) -> Options:
        return lambda make, shape: others(make, shape) | {"approximate": name}

    yield "causal", lambda make, shape: {"causal": True}
    yield "no mask", lambda make, shape: {}
    yield "softcap", lambda make, shape: {"softcap": 7.0}
    yield "sinks", lambda make, shape: {"sinks": make.rand(shape[1])}
    if dtype in FP8:
        yield "descales by block", blocks
    else:
        for approximation in sorted(_APPROXIMATIONS & takes):
            yield approximation, approximating(approximation)
        for approximation in sorted({"int8", "int8_pv", "fp16_accumulate"} & takes):
            yield f"{approximation}, ranges of keys", approximating(approximation, ranges)
    if "attn_mask" in takes:
        yield "added mask", mask
        yield "ranges of keys", ranges
    if "dropout_p" in takes:
        yield "dropout", dropout
    if "key_indices" in takes and "kv_cache" in takes:  # not of latent rows alone
        yield "listed keys", lists
        yield "keys listed for 64 rows", lists_of_blocks


def candidate(
    kernel: str, dtype: str, dims: tuple[int, int], shape: tuple[int, int, int, int, int],
    what: str, options: Options, setup: Setup,
) -> Candidate:  # fmt: skip
    """A call of attention."""
    batch, heads, heads_kv, rows, keys = shape
    name = f"{dtype} d{dims[0]}/{dims[1]} {batch}x{heads}/{heads_kv} {rows}x{keys} {what}"

    def make(maker: Maker) -> tuple[Tensors, Call]:
        tensors = maker.qkv(dtype, dims, (heads, heads_kv), rows, keys, batch)
        return tensors, options(maker, shape)

    def plan() -> _native.LaunchPlan:
        (q, k, v), call = make(Meta(setup))
        return _checks.planned(kernel, q, k, v, call, setup)

    run = functools.partial(_checks.check_call, kernel, name, make)
    return Candidate(name, plan, run, batch * heads * rows * dims[1])


def of_caches(kernel: str, dtype: str, setup: Setup) -> Iterator[Candidate]:
    """Calls of attention_with_kvcache."""
    made: list[dict[str, Any]] = [
        {"d": d, "lengths": lengths, "nq": nq, "page_size": page, "cache_dtype": kind}
        for d in (64, 96, 128, 192, 256)
        for lengths, nq in (([333, 40, 1], 1), ([700, 300], 200), ([900] * 24, 300), ([9000], 2))
        for page in (0, 16, 64)
        for kind in (dtype, FP8[0])
    ]
    made += [one | {"n_new": one["nq"]} for one in made if one["page_size"] != 16]
    made += [one | {"masked": True} for one in made if one["nq"] < 5 and not one["page_size"]]
    made += [
        {"d": d, "lengths": [6000, 300, 40], "rows": [1, 200, 5], "page_size": 16}
        for d in (64, 128)
    ]
    made += [
        {"latent": True, "lengths": lengths, "heads": (16, 1), "page_size": page, "nq": nq}
        for lengths, nq in (([700, 200], 1), ([9000] * 2, 1), ([600] * 3, 70))
        for page in (0, 64)
    ]
    made += [one | {"listed": True} for one in made if one.get("latent") and one["nq"] == 1]
    for one in made:
        lengths = one["lengths"]
        words = [f"{name} {value}" for name, value in one.items() if value and name != "lengths"]
        name = f"{dtype} cache, {len(lengths)} up to {max(lengths)} rows, {', '.join(words)}"

        def plan(one: dict[str, Any] = one) -> _native.LaunchPlan:
            q, caches, call = cache_call(Meta(setup), dtype, one)
            return _checks.planned(kernel, q, caches[0], caches[1], call, setup)

        run = functools.partial(_checks.check_cache, kernel, name, dtype, one)
        yield Candidate(name, plan, run)


def backward(kernel: str, dtype: str, setup: Setup) -> Iterator[Candidate]:
    """Candidates of a backward pass."""
    takes = {*_native.describe(kernel).features}
    for dims, shape, exact in itertools.product(DIMS, SHAPES_OF_GRADIENTS, (False, True)):
        for what, options in options_of(dtype, takes - _APPROXIMATIONS):
            batch, heads, heads_kv, rows, keys = shape
            words = [f"{dtype} d{dims[0]}/{dims[1]} {batch}x{heads}/{heads_kv} {rows}x{keys}", what]
            name = " ".join([*words, *(["deterministic"] if exact else [])])

            def make(
                maker: Maker, dims: tuple[int, int] = dims, shape: Any = shape,
                options: Options = options,
            ) -> tuple[Tensors, Call]:  # fmt: skip
                tensors = maker.qkv(dtype, dims, shape[1:3], shape[3], shape[4], shape[0])
                return tensors, options(maker, shape)

            def plan(make: Any = make, exact: bool = exact) -> _native.LaunchPlan:
                (q, k, v), call = make(Meta(setup))
                with _gradients.asked_for(exact):
                    return _checks.planned(kernel, q, k, v, call, setup, backward=True)

            more = {"deterministic": True} if exact else {}
            run = functools.partial(_checks.check_gradients, kernel, name, make, more)
            yield Candidate(name, plan, run, 3 * batch * heads * rows * dims[1])


class Meta(Maker):
    """Tensors without memory, for plans. What is computed of meta tensors takes PyTorch long."""

    def __init__(self, setup: Setup) -> None:
        self.device = "meta"

    def rand(self, *shape: int, dtype: str = "float32") -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def ranges(self, rows: int, keys: int) -> Tensor:
        return torch.empty((1, 1, rows, 1, 2), dtype=torch.int32, device="meta")
