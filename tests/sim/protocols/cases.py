"""Programs of TMA, mbarriers, multicast and wgmma that a card and the simulator both run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from archflash import sim

from .. import test_cluster, test_mbarrier, test_tma, test_wgmma
from ..hashed import wide
from ..ptx import program
from .samples.kernels import samples

Argument = Tensor | sim.TensorMap | bytes


@dataclass(frozen=True)
class Case:
    """One launch of a kernel `test`.

    Attributes:
        name: unique name of the case.
        text: PTX for sm_90a, which also states the size of a cluster.
        arguments: makes new arguments for each run.
        output: index of the argument that is compared.
        block, grid, cluster: threads of a CTA, CTAs, CTAs of a cluster, along x.
        shared_bytes: bytes of dynamic shared memory.
    """

    name: str
    text: str
    arguments: Callable[[], list[Argument]]
    output: int
    block: int = 32
    grid: int = 1
    cluster: int = 1
    shared_bytes: int = 0

    @property
    def key(self) -> str:
        """A hash of everything that the result depends on, except the card."""
        digest = hashlib.sha256(f"{self.text}{self.block}{self.grid}{self.cluster}".encode())
        for argument in self.arguments():
            tensor = argument.tensor if isinstance(argument, sim.TensorMap) else argument
            raw = tensor if isinstance(tensor, bytes) else tensor.cpu().contiguous()
            if isinstance(raw, Tensor):
                raw = raw.reshape(-1).view(torch.uint8).numpy().tobytes()
            digest.update(raw)
            if isinstance(argument, sim.TensorMap):
                digest.update(repr((argument.box, argument.swizzle, argument.dims)).encode())
        return digest.hexdigest()[:16]


def _loads() -> Iterator[Case]:
    places = [
        (64, [0, 0], 0), (64, [8, 3], 0), (8, [16, 1], 0), (64, [-8, -3], 0),
        (64, [216, 30], 0), (64, [304, 2], 0), (64, [8, 3], 384),
    ]  # fmt: skip
    for swizzle in (0, 32, 64, 128):
        for width, at, offset in places:
            box = [min(width, swizzle // 2 or width), 16]

            def arguments(box: list[int] = box, swizzle: int = swizzle) -> list[Argument]:
                source = test_tma.tensor(40, 256)[:, :250].view(torch.float16)
                out = torch.zeros(test_tma.SHARED, dtype=torch.uint8)
                return [sim.TensorMap(source, box, swizzle), out]

            body = test_tma.load_body(2, at, box[0] * box[1] * 2, offset)
            name = f"load-{swizzle}-{width}-{at[0]}-{at[1]}-{offset}"
            yield Case(name, test_tma.kernel(body), arguments, 1, shared_bytes=test_tma.SHARED)
    for rank in (1, 3, 4, 5):
        box = [16, 4, 3, 2, 2][:rank]
        size = 2
        for extent in box:
            size *= extent

        def ranked(rank: int = rank, box: list[int] = box) -> list[Argument]:
            source = test_tma.tensor(*[3, 4, 5, 6, 32][-rank:])
            out = torch.zeros(test_tma.SHARED, dtype=torch.uint8)
            return [sim.TensorMap(source, box, 32), out]

        body = test_tma.load_body(rank, [8, 3, 2, 1, 2][:rank], size)
        yield Case(f"load-{rank}d", test_tma.kernel(body), ranked, 1, shared_bytes=test_tma.SHARED)


def _stores() -> Iterator[Case]:
    for swizzle in (0, 32, 64, 128):
        width = min(64, swizzle // 2 or 64)
        text = test_tma.kernel(test_tma.STORE.format(words=width * 4, at=f"{256 - width // 2}, 4"))

        def arguments(width: int = width, swizzle: int = swizzle) -> list[Argument]:
            target = torch.zeros(16, 256, dtype=torch.int16)
            return [
                sim.TensorMap(target, [width, 8], swizzle, dims=[250, 10]),
                torch.zeros(8, dtype=torch.int32),
            ]

        yield Case(f"store-{swizzle}", text, arguments, 0, shared_bytes=test_tma.SHARED)


def _others() -> Iterator[Case]:
    steps = "".join(
        step + test_mbarrier.PROBE.format(place=4 * i) for i, step in enumerate(test_mbarrier.STEPS)
    )
    yield Case(
        "mbarrier-phases",
        program(steps, shared=16),
        lambda: [torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)],
        0,
        block=1,
    )
    clustered = ".reqnctapercluster 2, 1, 1\n{\n.reg .pred"
    yield Case(
        "multicast",
        test_tma.kernel(test_cluster.MULTICAST).replace("{\n.reg .pred", clustered, 1),
        lambda: [
            sim.TensorMap(test_tma.tensor(32, 64), [64, 16]),
            torch.zeros(2, 32, 64, dtype=torch.int16),
        ],
        1,
        grid=2,
        cluster=2,
        shared_bytes=test_tma.SHARED,
    )
    yield Case(
        "cluster-exchange",
        test_cluster.HEADER + test_cluster.EXCHANGE.replace("{\n.reg .pred", clustered, 1),
        lambda: [torch.zeros(128, dtype=torch.int32)],
        0,
        grid=2,
        cluster=2,
    )
    yield Case(
        "store-async",
        test_cluster.HEADER + test_cluster.STORE_ASYNC.replace("{\n.reg .pred", clustered, 1),
        lambda: [torch.zeros(256, dtype=torch.int32)],
        0,
        grid=2,
        cluster=2,
    )


# (operation, type). Sums of f16 and bf16 are rounded after each addition.
REDUCTIONS = [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("add.noftz", "f16"), ("add.noftz", "bf16"),
    ("add", "f32"), ("add", "f64"), ("min", "s32"), ("max", "u32"), ("min", "u64"), ("max", "s64"),
    ("min", "f16"), ("max", "bf16"), ("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"),
    ("xor", "b32"), ("and", "b64"),
]  # fmt: skip
REDUCED = 128  # bytes of each reduction
_TYPES = {
    "32": torch.int32, "64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip


def _elements(stream: int) -> Tensor:
    """REDUCED bytes for each reduction. Elements of two streams are close, to test comparisons."""
    generator = torch.Generator().manual_seed(stream)
    parts = []
    for number, (_, name) in enumerate(REDUCTIONS):
        dtype = _TYPES.get(name) or _TYPES[name[1:]]
        count = REDUCED // dtype.itemsize
        values = (
            wide((count,), 2 * number + stream) * 100
            if dtype.is_floating_point
            else torch.randint(-8, 8, (count,), generator=generator)
        )
        parts.append(values.to(dtype).view(torch.uint8))
    return torch.cat(parts)


def _reductions() -> Case:
    size = REDUCED * len(REDUCTIONS)
    wait = test_tma.WAIT.format(n=0, parity=0)
    stores = "".join(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{name} "
        f"[%out+{REDUCED * i}], [%r31+{REDUCED * i}], {REDUCED};\n"
        for i, (operation, name) in enumerate(REDUCTIONS)
    )
    body = f"""
@!%p0 bra DONE;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], {size};
ld.param.u64 %rd5, [from];
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r31], [%rd5], {size}, [%r30];
{wait}
{stores}
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
    return Case(
        "reductions",
        test_tma.kernel(body, parameters=", .param .u64 from"),
        lambda: [
            sim.TensorMap(test_tma.tensor(8, 8), [8, 8]),
            _elements(0).view(torch.int32),
            _elements(1).view(torch.int32),
        ],
        1,
        shared_bytes=test_tma.SHARED,
    )


def _runs() -> Iterator[Case]:
    """Plain bulk copies, reductions, and mbarriers with several warps."""
    yield _reductions()
    yield Case(
        "bulk-plain",
        test_tma.kernel(test_tma.FLAT, parameters=", .param .u64 from"),
        lambda: [
            sim.TensorMap(test_tma.tensor(8, 8), [8, 8]),
            torch.full((256,), 7, dtype=torch.int32),
            torch.arange(256, dtype=torch.int32),
        ],
        1,
        shared_bytes=test_tma.SHARED,
    )
    yield Case(
        "store-add",
        test_tma.kernel(test_tma.STORE.format(words=256, at="0, 8")).replace(
            "cp.async.bulk.tensor.2d.global.shared::cta.tile",
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile",
        ),
        lambda: [
            sim.TensorMap(torch.ones(16, 32, dtype=torch.int32), [32, 8]),
            torch.zeros(8, dtype=torch.int32),
        ],
        0,
        shared_bytes=test_tma.SHARED,
    )
    yield Case(
        "mbarrier-states",
        program(test_mbarrier.STATES, shared=16),
        lambda: [torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)],
        0,
        block=1,
    )
    for wait in (".try_wait.", ".test_wait."):
        yield Case(
            f"mbarrier-ring-{wait.strip('.')}",
            test_mbarrier.ring(**{".WAIT.": wait}),
            lambda: [torch.zeros(128, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)],
            0,
            block=64,
        )
    for noinc in (False, True):
        yield Case(
            f"mbarrier-copies{'-noinc' if noinc else ''}",
            test_mbarrier.copies(noinc),
            lambda: [torch.arange(256, dtype=torch.int32) * 3, torch.zeros(256, dtype=torch.int32)],
            1,
        )


def _products() -> Iterator[Case]:
    def values(rows: int, columns: int, dtype: torch.dtype, stream: int) -> Tensor:
        if dtype == torch.int8:
            generator = torch.Generator().manual_seed(stream)
            return torch.randint(-128, 128, (rows, columns), generator=generator).to(dtype)
        return wide((rows, columns), stream).to(dtype)

    def case(name: str, types: str, dtype: torch.dtype, n: int, **options: object) -> Case:
        k = 32 // dtype.itemsize

        def made() -> tuple[str, list[Argument]]:
            return test_wgmma.problem(
                values(64, k, dtype, 1), values(n, k, dtype, 2), types, twice=True, **options
            )

        return Case(
            name, made()[0], lambda: made()[1], 1, block=128, shared_bytes=test_wgmma.SHARED
        )

    for a_major in (True, False, None):
        for b_major in (True, False):
            for span in (0, 32, 64, 128):
                trans = "" if a_major is None else f", {int(not a_major)}"
                a_name = {True: "k", False: "mn", None: "registers"}[a_major]
                yield case(
                    f"wgmma-{a_name}-{'k' if b_major else 'mn'}-{span}",
                    "f32.bf16.bf16",
                    torch.bfloat16,
                    128,
                    a_major=a_major,
                    b_major=b_major,
                    a_span=span,
                    b_span=span,
                    tail=f", 1, 1{trans}, {int(not b_major)}",
                )
    for types, dtype, tail in (
        ("f32.f16.f16", torch.float16, ", 1, 1, 0, 0"),
        ("f16.f16.f16", torch.float16, ", 1, 1, 0, 0"),
        ("f32.tf32.tf32", torch.float32, ", 1, 1"),
        ("f32.e4m3.e4m3", torch.float8_e4m3fn, ", 1, 1"),
        ("f32.e5m2.e5m2", torch.float8_e5m2, ", 1, 1"),
        ("s32.s8.s8", torch.int8, ""),
        ("f32.bf16.bf16", torch.bfloat16, ", -1, 1, 0, 0"),
    ):
        yield case(
            f"wgmma-{types}{'-negated' if '-1' in tail else ''}", types, dtype, 64, tail=tail
        )


def sample_cases() -> list[Case]:
    """The cases of the sample kernels, for sm_90a and sm_120f."""
    return [
        Case(
            sample.name, sample.text, sample.arguments, sample.OUTPUT,
            block=sample.block, grid=sample.grid, shared_bytes=sample.shared_bytes,
        )
        for sample in samples()
    ]  # fmt: skip


def cases() -> list[Case]:
    """All cases that a card of capability 9.0 runs."""
    for_90 = [case for case in sample_cases() if ".target sm_90a" in case.text]
    return [*_loads(), *_stores(), *_others(), *_runs(), *_products(), *for_90]
