"""Times attention of one sequence over several GPUs: ours by every method, and its peers.

    torchrun --nproc-per-node 4 -m bench.distributed --out bench/results/distributed-h200.csv

Each candidate is compared with float64 on samples before it is timed; one that is wrong or refuses
is listed and has no row. Weak scaling has the same rows on each GPU for 2, 4, ... of them, strong
scaling the same rows altogether. The time of a call is that of the slowest rank. `ideal_percent` is
the speed of a GPU over that of one GPU alone in a call of the same kind of mask: of the same work
for weak scaling, of the whole sequence for strong. `--time` stops after so many seconds, whatever
is left then.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import archflash
import archflash.distributed as afd
from archflash.distributed._cost import pairs_of
from archflash.distributed._mask import Mask
from bench.environment import git_state
from bench.results import percentile

COLUMNS = (
    "date", "commit", "gpu", "torch", "gpus", "scaling", "tokens", "n", "mask", "passes",
    "candidate", "hq", "hkv", "d", "dtype", "p20_ms", "p50_ms", "p80_ms", "tflops_per_gpu",
    "ideal_percent", "max_err",
)  # fmt: skip
HEADS, HEADS_KV, D = 64, 8, 128
FLOPS_OF_BOTH = 3.5  # of the call and its gradients, over those of the call
SAMPLES = 16  # rows that are compared with float64
# Rows of a sequence up to which gradients of keys are compared: they need float64 of all rows.
MOST_ROWS = 32768
ERROR = 2e-2  # the largest difference from float64, over the largest number


@dataclass
class Problem:
    """A call on the whole sequence, and this rank's tensors "bhnd" of it for one way of sharing."""

    n: int
    mask: str
    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype

    @functools.cached_property
    def ends(self) -> list[int] | None:
        """Documents of 256 to 16,384 rows, the logarithm of which is uniform."""
        if self.mask != "documents":
            return None
        generator, ends = torch.Generator().manual_seed(1), [0]
        while ends[-1] < self.n:
            length = 2 ** float(torch.empty(1).uniform_(8, 14, generator=generator))
            ends.append(min(self.n, ends[-1] + int(length)))
        return ends

    @property
    def causal(self) -> bool:
        return self.mask != "none"

    @functools.cached_property
    def of_plan(self) -> Mask:
        ends = None if self.ends is None else tuple(self.ends)
        return Mask(self.n, None, 0 if self.causal else None, ends)

    @functools.cached_property
    def flops(self) -> float:
        """Of the forward pass, on all GPUs."""
        return 4.0 * D * HEADS * pairs_of(self.of_plan, [(0, self.n)])

    def shards(self, name: str) -> afd.Shards:
        if name == "documents":
            assert self.ends is not None
            return afd.Shards.documents(self.ends, self.ranks)
        return getattr(afd.Shards, name)(self.n, self.ranks)

    @functools.cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """k and v of the whole sequence, the same on every rank."""
        return self._normal(1, HEADS_KV), self._normal(2, HEADS_KV)

    @functools.cached_property
    def queries(self) -> tuple[Tensor, Tensor]:
        """q and the gradient of the output of the whole sequence, for one rank's rows at a time."""
        return self._normal(3, HEADS), self._normal(4, HEADS)

    def _normal(self, seed: int, heads: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.empty(1, heads, self.n, D, device=self.device, dtype=self.dtype)
        return made.normal_(generator=generator)


# q, k, v of local rows, as leaves -> the output
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Candidate:
    name: str
    shards: str
    # makes the call; a context is open while it is used
    open: Callable[[Problem, list[Tensor]], Any]
    replays: bool = False  # as a CUDA graph: nothing waits for the host


def ours(method: str, problem: Problem, shards: str) -> Attend:
    held = problem.shards(shards)
    where: dict[str, Any] = {"group": problem.group}
    if method == "hybrid":
        where = {"mesh": _mesh_of(problem, (2, problem.ranks // 2))}
    ends = None if problem.ends is None else torch.tensor(problem.ends, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if ends is not None:
            q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        out: Tensor = afd.attention(
            q, k, v, shards=held, causal=problem.causal, cu_seqlens=ends, method=method, **where
        )
        return out if ends is None else out.transpose(0, 1)[None]

    return attend


@functools.cache
def _mesh(ranks: tuple[int, ...], sizes: tuple[int, ...], device: str) -> DeviceMesh:
    return DeviceMesh(device, torch.tensor(ranks).reshape(sizes))


def _mesh_of(problem: Problem, sizes: tuple[int, ...]) -> DeviceMesh:
    ranks = tuple(dist.get_process_group_ranks(problem.group or dist.group.WORLD))
    return _mesh(ranks, sizes, problem.device.type)


@contextlib.contextmanager
def our_call(
    method: str, shards: str, problem: Problem, tensors: list[Tensor]
) -> Iterator[tuple[Attend, list[Tensor]]]:
    yield ours(method, problem, shards), tensors


@contextlib.contextmanager
def gathered(problem: Problem, tensors: list[Tensor]) -> Iterator[tuple[Attend, list[Tensor]]]:
    """One all-gather of k and v, and one call of our kernels for neighbouring rows."""
    group = problem.group or dist.group.WORLD
    first = problem.shards("contiguous").pieces[problem.rank][0][0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = [collectives.all_gather_tensor_autograd(x, 2, group) for x in (k, v)]
        end = first + q.shape[2] if problem.causal else problem.n
        k, v = (x[:, :, :end] for x in keys)
        out: Tensor = archflash.attention(q, k, v, causal=problem.causal)
        return out

    yield attend, tensors


@contextlib.contextmanager
def by_torch(
    enabled: bool, problem: Problem, tensors: list[Tensor]
) -> Iterator[tuple[Attend, list[Tensor]]]:
    """PyTorch's context_parallel, whose kernels take as many heads of k and v as of q. enabled:
    archflash serves its calls of PyTorch's operators.
    """
    from torch.distributed.tensor.experimental import _attention, context_parallel

    q, k, v = (
        x.repeat_interleave(HEADS // x.shape[1], 1) for x in (problem.queries[0], *problem.keys)
    )
    mesh = _mesh_of(problem, (problem.ranks,))
    # It deals rows in zigzag, which some versions refuse without a causal mask.
    _attention._cp_options.enable_load_balance = problem.causal
    sharing = context_parallel(
        mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3, no_restore_buffers={q, k, v}
    )
    with archflash.enabled() if enabled else contextlib.nullcontext(), sharing:
        shared = HEADS // HEADS_KV

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

        yield attend, [q, k[:, ::shared].contiguous(), v[:, ::shared].contiguous()]


def candidates(problem: Problem) -> list[Candidate]:
    if problem.ranks == 1:
        return []
    even = {"causal": "zigzag", "none": "contiguous", "documents": "documents"}[problem.mask]
    made = [
        Candidate(f"archflash {method}", shards, functools.partial(our_call, method, shards))
        for method, shards in (
            ("all-gather", even), ("ring", even), ("ulysses", "contiguous"),
            *([("hybrid", "contiguous" if even == "documents" else even)] if problem.ranks % 2 == 0
              and problem.ranks > 2 else []),
        )
    ]  # fmt: skip
    if problem.device.type == "cuda":
        call = functools.partial(our_call, "all-gather", even)
        made.insert(1, Candidate("archflash all-gather, CUDA graph", even, call, replays=True))
    if problem.mask != "documents":
        made.append(Candidate("all-gather, then our kernels", "contiguous", gathered))
        for name, enabled in (("", False), (", archflash.enable()", True)):
            call = functools.partial(by_torch, enabled)
            made.append(Candidate(f"torch context_parallel{name}", even, call))
    return made


# --- correctness, on samples ---


def difference(problem: Problem, pieces: afd.Shards, out: Tensor, grads: list[Tensor]) -> float:
    """The largest difference from float64 over the largest number, of some rows of one head: of the
    output and of the gradient of q; and of sequences up to MOST_ROWS, of those of some keys.
    """
    rows = pieces.positions(problem.rank).to(problem.device)
    if not len(rows):
        return 0.0
    picked = torch.linspace(0, len(rows) - 1, SAMPLES, device=problem.device).long()
    head, shared = HEADS - 1, HEADS // HEADS_KV
    q, dout = (x[0, head] for x in problem.queries)
    k, v = (x[0, head // shared].double() for x in problem.keys)
    found = [out[0, head, picked]]
    weights, wanted = _rows(problem, rows[picked], q, k, v)
    expected = [wanted]
    if grads:
        given = dout[rows[picked]].double()
        delta = (given * wanted).sum(-1, keepdim=True)
        expected.append(weights * (given @ v.T - delta) @ k * D**-0.5)
        found.append(grads[0][0, head, picked])
    if grads and problem.n <= MOST_ROWS:
        # The gradients of keys need all rows of the heads that share them.
        dk, dv = torch.zeros(2, SAMPLES, D, dtype=torch.float64, device=problem.device)
        for h in range(head - shared + 1, head + 1):
            for some in torch.arange(problem.n, device=problem.device).split(2048):
                q, dout = problem.queries[0][0, h], problem.queries[1][0, h][some].double()
                weights, wanted = _rows(problem, some, q, k, v)
                delta = (dout * wanted).sum(-1, keepdim=True)
                here = weights[:, rows[picked]]
                dv += here.T @ dout
                scores = here * (dout @ v[rows[picked]].T - delta)
                dk += scores.T @ q[some].double() * D**-0.5
        expected += [dk, dv]
        found += [x[0, head // shared, picked] for x in grads[1:]]
    return max(
        float((x.double() - y).abs().max() / y.abs().max())
        for x, y in zip(found, expected, strict=True)
    )


def _rows(problem: Problem, rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and output of some global rows of a head."""
    begin, end = problem.of_plan.row_bounds(rows)
    scores = q[rows].double() @ k.T * D**-0.5
    key = torch.arange(problem.n, device=problem.device)
    scores = scores.masked_fill((key < begin[:, None]) | (key >= end[:, None]), -math.inf)
    weights = scores.softmax(-1)
    return weights, weights @ v


# --- time ---


class Clock:
    """Seconds that are left, on which the ranks of a group agree."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._end, self._device = time.monotonic() + seconds, device

    def is_over(self, group: dist.ProcessGroup | None = None) -> bool:
        over = torch.tensor(float(time.monotonic() > self._end), device=self._device)
        dist.all_reduce(over, op=dist.ReduceOp.MAX, group=group)
        return bool(over.item())


def timed(
    calls: Sequence[Callable[[], Any]], group: dist.ProcessGroup | None, samples: int
) -> list[list[float]]:
    """Milliseconds of each call, of the slowest rank. The calls take turns, in rows of up to 80 ms,
    because a GPU that is hot is slower; of calls that take a second there is one sample.
    """
    on_gpu = torch.cuda.is_available()
    taken: list[list[float]] = [[] for _ in calls]
    rows = [1] * len(calls)
    for sample in range(-2, samples):  # the first call of all takes longer
        for i, call in enumerate(calls):
            if sum(taken[i]) * rows[i] > 1000:
                continue
            dist.barrier(group)
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rows[i]):
                call()
            if on_gpu:
                torch.cuda.synchronize()
            passed = (time.perf_counter() - start) * 1e3 / rows[i]
            slowest = torch.tensor(passed, device="cuda" if on_gpu else "cpu")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            if sample < 0:
                rows[i] = max(1, min(100, int(80 / slowest.item())))
            else:
                taken[i].append(slowest.item())
    return taken


def alone(problem: Problem, both: bool, scaling: str) -> tuple[Callable[[], None], float]:
    """The whole call on one GPU, or for weak scaling one of as much work as each GPU has; and its
    operations.
    """
    parts = problem.ranks if problem.mask == "documents" else math.sqrt(problem.ranks)
    n = problem.n
    if scaling == "weak" and n > 1024:
        n = round(n / parts / 128) * 128
    one = Problem(n, problem.mask, None, 0, 1, problem.device, problem.dtype)
    tensors = [one.queries[0], *one.keys]
    options: dict[str, Any] = {"causal": one.causal}
    if one.ends is not None:
        ends = torch.tensor(one.ends, dtype=torch.int32, device=problem.device)
        tensors = [x[0].transpose(0, 1).contiguous() for x in tensors]
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    if both:
        tensors = [x.requires_grad_() for x in tensors]

    def call() -> None:
        out = archflash.attention(*tensors, **options)
        if both:
            torch.autograd.grad(out, tensors, out.detach())

    return call, one.flops * (FLOPS_OF_BOTH if both else 1)


def measure(
    problem: Problem, candidate: Candidate, both: bool, samples: int,
    others: Sequence[Callable[[], Any]],
) -> tuple[list[list[float]], float]:  # fmt: skip
    """Times of a candidate and of other calls, and its error; it raises for one that is wrong."""
    pieces = problem.shards(candidate.shards)
    tensors = [
        afd.shard(x, pieces, dim=2, group=problem.group)
        for x in (problem.queries[0], *problem.keys, problem.queries[1])
    ]
    dout = tensors.pop()
    with candidate.open(problem, tensors) as (attend, local):
        leaves = [x.detach().requires_grad_(both) for x in local]

        def call() -> list[Tensor]:
            out = attend(*leaves)
            if not both:
                return [out]
            return [out, *torch.autograd.grad(out, leaves, dout)]

        if candidate.replays:
            call = captured(call)
        out, *grads = (x.detach() for x in call())
        worst = torch.tensor(difference(problem, pieces, out, grads), device=problem.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=problem.group)
        error = worst.item()
        if not error < ERROR:
            raise ValueError(f"it is off by {error:.1e}")
        return timed([call, *others], problem.group, samples), error


def captured(call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """The call as a CUDA graph, which gives the same tensors each time."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        results = call()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def sizes_up_to(ranks: int) -> list[int]:
    found = [ranks]
    while found[-1] > 2:
        found.append(found[-1] // 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    words = functools.partial(lambda kind, text: [kind(x) for x in text.split(",")])
    parser.add_argument("--tokens", type=functools.partial(words, int), default=[8192, 131072],
                        help="rows of each GPU")  # fmt: skip
    parser.add_argument("--masks", type=functools.partial(words, str),
                        default=["causal", "none", "documents"])  # fmt: skip
    parser.add_argument("--passes", type=functools.partial(words, str), default=["forward", "both"])
    parser.add_argument("--scaling", type=functools.partial(words, str), default=["weak", "strong"])
    parser.add_argument("--gpus", type=functools.partial(words, int), help="numbers of GPUs")
    parser.add_argument("--only", type=functools.partial(words, str), default=[""],
                        help="candidates whose name has one of these")  # fmt: skip
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--time", type=float, default=3600.0, help="seconds at most")
    parser.add_argument("--out", type=Path, metavar="CSV", help="append rows to it")
    asked = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world, me = dist.get_world_size(), dist.get_rank()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", me % torch.cuda.device_count())
        torch.cuda.set_device(device)
    clock = Clock(asked.time, device)
    sizes = asked.gpus or sizes_up_to(world)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    for size in sizes:  # meshes are made by all ranks
        if size % 2 == 0 and size > 2:
            _mesh(tuple(range(size)), (2, size // 2), device.type)
        _mesh(tuple(range(size)), (size,), device.type)
    commit = git_state()[0]
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "commit": commit,
        "gpu": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__,
        "hq": HEADS, "hkv": HEADS_KV, "d": D, "dtype": "bf16",
    }  # fmt: skip
    for tokens, size, mask, passes in itertools.product(
        asked.tokens, sizes, asked.masks, asked.passes
    ):
        # With all GPUs, weak and strong scaling have the same length: it is timed once.
        by_n: dict[int, list[str]] = {}
        for scaling in asked.scaling:
            by_n.setdefault(tokens * (size if scaling == "weak" else world), []).append(scaling)
        for n, scalings in by_n.items():
            if clock.is_over():
                break
            if me < size:
                problem = Problem(n, mask, groups[size], me, size, device, torch.bfloat16)
                row = facts | {
                    "gpus": size, "tokens": tokens, "n": n, "mask": mask, "passes": passes,
                }  # fmt: skip
                compare(problem, passes == "both", scalings, row, asked, clock)
            dist.barrier()
    dist.destroy_process_group()
    return 0


def compare(
    problem: Problem, both: bool, scalings: Sequence[str], row: dict[str, Any],
    asked: argparse.Namespace, clock: Clock,
) -> None:  # fmt: skip
    """Prints and writes the rows of all candidates."""
    factor = FLOPS_OF_BOTH if both else 1
    ones = {scaling: alone(problem, both, scaling) for scaling in scalings}
    ideals: dict[str, float] = {}  # TFLOP/s of one GPU, where calls are so long that one will do
    if problem.rank == 0:
        print(f"{problem.ranks} GPUs, {problem.n} rows, {problem.mask}, {row['passes']}")
    for candidate in candidates(problem):
        if not any(x in candidate.name for x in asked.only):
            continue
        if clock.is_over(problem.group):
            break
        asked_for = [scaling for scaling in scalings if scaling not in ideals]
        others = [ones[scaling][0] for scaling in asked_for]
        try:
            (times, *of_one), error = measure(problem, candidate, both, asked.samples, others)
        except Exception as trouble:
            if problem.rank == 0:
                print(f"  {candidate.name:30} not measured: {str(trouble)[:200]}")
            continue
        p20, p50, p80 = (percentile(times, x) for x in (0.2, 0.5, 0.8))
        speed = problem.flops * factor / p50 / 1e9 / problem.ranks
        found = dict(zip(asked_for, (percentile(x, 0.5) for x in of_one), strict=True))
        speeds = {scaling: ones[scaling][1] / time / 1e9 for scaling, time in found.items()}
        ideals |= {scaling: x for scaling, x in speeds.items() if found[scaling] > 100}
        for scaling, ideal in (ideals | speeds).items():
            if problem.rank != 0:
                continue
            made = row | {
                "scaling": scaling, "candidate": candidate.name, "p20_ms": f"{p20:.3f}",
                "p50_ms": f"{p50:.3f}", "p80_ms": f"{p80:.3f}", "tflops_per_gpu": f"{speed:.1f}",
                "ideal_percent": f"{100 * speed / ideal:.1f}", "max_err": f"{error:.1e}",
            }  # fmt: skip
            print(
                f"  {candidate.name:30} {p50:9.3f} ms  {speed:6.1f} TFLOP/s a GPU  "
                f"{made['ideal_percent']:>5}% of one GPU's {ideal:.1f} ({scaling})  "
                f"error {made['max_err']}",
                flush=True,
            )
            if asked.out is not None:
                append(asked.out, made)


def append(path: Path, row: dict[str, Any]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
