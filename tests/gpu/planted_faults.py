"""Faults that `archflash verify` must find: each is one changed line of a kernel's source.

    python -m tests.gpu.planted_faults FOLDER [--compile]

compiles the faulty kernels into a folder, or runs verify with those that lie there and prints what
it says of each.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench import on_the_spot
from bench.one_kernel import only, source_of

from archflash.verify import _jobs, _run
from archflash.verify._setup import Setup

WORKER = Path(__file__).with_name("planted_worker.py")
AT_A_TIME = 4
LIMIT_S = 30  # of an item: what hangs has to be waited for
FORWARD = "hopper_attention_fwd_bf16_d128_few"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: what is wrong.
        kernel: the kernel that is compiled with it, and its image.
        file: the changed file of src/.
        old, new: its text before and after.
        job: the job of verify that must find it.
        statuses: how the first item that finds it may end.
        said: what its detail must contain.
        where: (name of a map, its parts): that all wrong elements lie in these.
    """

    name: str
    kernel: str
    image: str
    file: str
    old: str
    new: str
    job: str = "first calls: hopper bfloat16"
    statuses: tuple[str, ...] = ("wrong",)
    said: str = ""
    where: tuple[str, tuple[str, ...]] | None = None


FAULTS = (
    Fault(
        "a descriptor steps to the wrong slab", FORWARD, "hopper/fwd_bf16",
        "hopper/forward/products.cuh",
        "VTile::SLABS > 1 ? VTile::SLAB_BYTES : 0;",
        "VTile::SLABS > 1 ? VTile::SLAB_BYTES / 2 : 0;",
        where=("slabs of 64 columns", ("1",)),
    ),
    # In kernels that copy K and V right behind Q these have often landed by then. Where their pages
    # are found by a warp of its own, they have not.
    Fault(
        "nobody waits for K", "hopper_attention_fwd_bf16_d128_few_cache", "hopper/cache_bf16",
        "hopper/forward/mainloop.cuh",
        "ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed",
        "", job="caches: hopper bfloat16", statuses=("wrong", "timeout"),
    ),
    Fault(
        "nobody waits for V", "hopper_attention_fwd_bf16_d128_few_cache", "hopper/cache_bf16",
        "hopper/forward/mainloop.cuh",
        "ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed",
        "", job="caches: hopper bfloat16", statuses=("wrong", "timeout"),
    ),
    Fault(
        "a wrong scale", FORWARD, "hopper/fwd_bf16", "hopper/forward/row_softmax.cuh",
        "fmaf(p, scale, -state.base[0][r])", "fmaf(p, scale * 1.05f, -state.base[0][r])",
        said="output: WRONG",
    ),
    Fault(
        "NaN in rows without keys", FORWARD, "hopper/fwd_bf16", "common/device/online_softmax.cuh",
        "state.base[m][r] = LOWEST;", "state.base[m][r] = MINUS_INFINITY;", said="nan",
    ),
    Fault(
        "K is never handed back", FORWARD, "hopper/fwd_bf16", "hopper/forward/blocks.cuh",
        "  ptx::registers_change<KEYS / 2>(&s_rmem[0][0][0]);\n"
        "  release(barriers.k_empty(k_ring.stage));",
        "  ptx::registers_change<KEYS / 2>(&s_rmem[0][0][0]);",
        statuses=("timeout",), said="no end after",
    ),
    Fault(
        "a mask that is one key wide", FORWARD, "hopper/fwd_bf16", "hopper/forward/scores.cuh",
        "below(visible.last(rows[r]) + 1 - first_key)",
        "below(visible.last(rows[r]) + 2 - first_key)",
    ),
    Fault(
        "outputs beyond all memory", FORWARD, "hopper/fwd_bf16", "common/device/online_softmax.cuh",
        "uint16_t* out_gmem = out.out_gmem(params);",
        "uint16_t* out_gmem = out.out_gmem(params) + (int64_t{1} << 44);",
        statuses=("failed", "crashed"), said="illegal memory access",
    ),
    Fault(
        "a warp exchanges rows", FORWARD, "hopper/fwd_bf16", "common/device/online_softmax.cuh",
        "ptx::st_global_v4_b32(out_gmem + row * params.out_row",
        "ptx::st_global_v4_b32(out_gmem + (row ^ (warp_row % 128 == 32)) * params.out_row",
        where=("lane quarters", ("1", "3")),  # of two tiles of 64 rows
    ),
    Fault(
        "a missing barrier", "ampere_attention_fwd_bf16_d128_large", "ampere/fwd_bf16",
        "common/mma_sync/main_loop.cuh",
        "      ptx::copies_wait_all();\n    }\n    __syncthreads();",
        "      ptx::copies_wait_all();\n    }", job="long calls: ampere",
    ),
    Fault(
        "gradients with the neighbour's sum", "hopper_attention_bwd_bf16_d128", "hopper/bwd_bf16",
        "hopper/backward/backward_scores.cuh", "-(i == 0 ? lse.x : lse.y)", "-lse.x",
        job="gradients: hopper bfloat16", said="dq: WRONG",
    ),
    Fault(
        "additions in any order", "hopper_attention_bwd_bf16_d128", "hopper/bwd_bf16",
        "hopper/backward/backward_dq.cuh",
        "while (ptx::ld_acquire_s32(turn_gmem) < own_turn)", "while (false)",
        job="gradients: hopper bfloat16", said="differ between two runs",
    ),
    Fault(
        "the next row's page", "ampere_attention_fwd_bf16_d128_decode", "ampere/decode_bf16",
        "common/mma_sync/decode_copies.cuh", "return page_shift >= 0 ? row >> page_shift",
        "return page_shift >= 0 ? (row + 16) >> page_shift", job="caches: ampere bfloat16",
    ),
)  # fmt: skip


def file_of(fault: Fault, folder: Path) -> Path:
    """Where the machine code of a faulty kernel lies."""
    return folder / f"{fault.name.replace(' ', '_')}.cubin"


def compile_fault(fault: Fault, nvcc: str, folder: Path) -> None:
    """Writes the machine code of a faulty kernel for 9.0."""
    with tempfile.TemporaryDirectory() as place:
        sources = Path(shutil.copytree(on_the_spot.SOURCES, Path(place) / "src"))
        changed = sources / fault.file
        text = changed.read_text()
        assert fault.old in text, f"{fault.file} has changed: {fault.name}"
        changed.write_text(text.replace(fault.old, fault.new))
        file, image = source_of(fault.image)
        short = Path(place) / file.name
        one = only(fault.kernel, on_the_spot.text_for(file, image), image)
        assert fault.kernel in one
        short.write_text(one)
        command = [nvcc, "-std=c++20", "-O3", "-arch=sm_90a", "-cubin", "-I", str(sources)]
        out = file_of(fault, folder)
        done = subprocess.run([*command, "-o", out, short], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def find(fault: Fault, folder: Path, setup: Setup) -> list[_run.Row]:
    """What verify says of a faulty kernel."""
    (job,) = (job for job in _jobs.make_jobs(setup) if job.name == fault.job)
    items = tuple(dataclasses.replace(item, limit_s=LIMIT_S) for item in job.items)
    worker = (str(WORKER), fault.kernel, str(file_of(fault, folder)))
    rows: list[_run.Row] = []
    limited = dataclasses.replace(job, make=lambda: items)
    _run.Runner(setup, rows.append, worker=worker).run([limited])
    return rows


def first_bad(fault: Fault, rows: list[_run.Row]) -> _run.Row | None:
    """The row by which a fault is found; None where none says what it must."""
    for row in rows:
        if row.status not in fault.statuses or fault.said not in row.detail:
            continue
        if fault.where is None:
            return row
        parts = {*row.where.get(fault.where[0], ())}
        if parts and parts <= {*fault.where[1]}:
            return row
    return None


def find_all(folder: Path, setup: Setup) -> Iterator[tuple[Fault, list[_run.Row]]]:
    """What verify says of each fault; some of them are tried at the same time."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = pool.map(lambda fault: find(fault, folder, setup), FAULTS)
        yield from zip(FAULTS, found, strict=True)


def compile_all(nvcc: str, folder: Path, at_a_time: int) -> None:
    """Writes the machine code of all faulty kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(lambda fault: compile_fault(fault, nvcc, folder), FAULTS))


def main() -> int:
    folder = Path(sys.argv[1])
    if "--compile" in sys.argv[2:]:
        nvcc = on_the_spot.find_nvcc()
        assert nvcc is not None
        compile_all(nvcc, folder, 1)
        return 0
    from .test_gpu_verify import make_setup

    missed = 0
    for fault, rows in find_all(folder, make_setup()):
        row = first_bad(fault, rows)
        missed += row is None
        said = "MISSED" if row is None else f"{row.item}: {row.status}: {row.detail[:150]}"
        print(f"{fault.name}: {said}", flush=True)
        if row is None:
            for each in rows:
                if each.status != "ok":
                    print(f"    {each.item}: {each.status}: {each.detail[:150]} {each.where}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
