"""Measures calls with a KV cache: decoding over caches of several kinds beside plain attention and
PyTorch's kernels, prefills and decodes in one call beside two, and the host's time of a call.

    python -m bench.kvcache [--only REGEX] [--rounds N] [--output FOLDER]

The rows of decoding go to <gpu>.csv, in the columns of every other row, with `cache=` among their
features; the rest to <gpu>-kvcache.json. Exit status: 0 when all is measured, 1 when a result was
wrong, 2 when nothing can be measured.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench import environment
from bench.candidates import Candidate, our_candidates, torch_candidates
from bench.cases import Case, choose_cases, load_cases
from bench.results import append_rows, percentile
from bench.run import cases_to_run, open_results, run_case, short_parser, summary
from bench.timing import CudaLab, enqueue_times_us, round_robin, warm_up

if TYPE_CHECKING:
    import torch

CACHE = "cache="  # word in `features`; "contiguous", "pages:64" or "e4m3" stand behind it
IMPLEMENTATION = "ampere"
BESIDE = ("ampere", "hopper", "torch-cudnn", "torch-flash")

# --- decoding ---


@dataclass
class CacheCalls:
    """A kind of cache: makes it of k and v, once for each, and calls the kernel with it.

    Args:
        page_size: rows of a page, the pages in no order; None for contiguous sequences.
        fp8: whether the cache holds float8_e4m3fn.
    """

    page_size: int | None = None
    fp8: bool = False
    caches: dict[int, dict[str, Any]] = field(default_factory=dict)

    def make(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
        """The arguments of the call for keys and values (batch, heads, rows, d)."""
        import torch

        batch, heads, rows, _ = k.shape
        call: dict[str, Any] = {}
        caches = [x.transpose(1, 2).contiguous() for x in (k, v)]
        if self.fp8:
            caches = [x.to(torch.float8_e4m3fn) for x in caches]
        if self.page_size is not None:
            pages = batch * -(-rows // self.page_size)
            order = torch.randperm(pages, device=k.device)
            bits = torch.uint8 if self.fp8 else torch.int16  # PyTorch indexes no FP8 numbers
            for i, x in enumerate(caches):
                paged = x.view(bits).reshape(pages, self.page_size, heads, x.shape[-1])
                caches[i] = torch.empty_like(paged).index_copy_(0, order, paged).view(x.dtype)
            call["page_table"] = order.reshape(batch, -1).int()
        call["cache_seqlens"] = torch.full((batch,), rows, dtype=torch.int32, device=k.device)
        return {"k_cache": caches[0], "v_cache": caches[1], **call}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        import archflash

        arguments = self.caches.get(k.data_ptr())
        if arguments is None:
            arguments = self.caches[k.data_ptr()] = self.make(k, v)
        out: torch.Tensor = archflash.attention_with_kvcache(
            q.transpose(1, 2), **arguments, implementation=IMPLEMENTATION
        )
        return out.transpose(1, 2)


KINDS: dict[str, Callable[[], CacheCalls]] = {
    "contiguous": CacheCalls,
    "pages:64": functools.partial(CacheCalls, 64),
    "pages:16": functools.partial(CacheCalls, 16),
    "pages:1": functools.partial(CacheCalls, 1),
    "e4m3": functools.partial(CacheCalls, fp8=True),
}


def cache_candidates(case: Case, sets: Sequence[tuple[torch.Tensor, ...]]) -> list[Candidate]:
    """One candidate for each kind of cache, whose caches of a case's inputs are made here: a CUDA
    graph must not make them.
    """
    import archflash

    found = []
    for kind, make in KINDS.items():
        if case.nk % (make().page_size or 1):
            continue
        calls = make()
        for q, k, v in sets:
            calls(q, k, v)

        def bind(case: Case, calls: CacheCalls = calls) -> CacheCalls:
            return calls

        name = f"{IMPLEMENTATION}-{kind.replace(':', '')}"
        found.append(
            Candidate(
                name, archflash.__version__, True, bind, features=f"{CACHE}{kind}",
                exact=not calls.fp8,
            )
        )  # fmt: skip
    return found


class FixedInputs(CudaLab):
    """A lab whose inputs of a case are made once."""

    def __init__(self) -> None:
        super().__init__()
        self.sets: list[Any] = []

    def inputs(self, case: Case) -> list[Any]:
        return self.sets

    def make_inputs(self, case: Case) -> list[Any]:
        self.sets = super().inputs(case)
        return self.sets


def gbps(case: Case, p50_us: float, fp8: bool) -> float:
    """What memory moves at least, in GB/s: half of the bytes of K and V for a cache of 8 bits."""
    saved = case.b * case.hkv * case.nk * (case.d + case.dv) if fp8 else 0
    return (case.bytes() - saved) / p50_us / 1e3


# --- prefills and decodes in one call ---

HEADS, HEADS_KV, HEAD_DIM, PAGE = 32, 8, 128, 64
PREFILLS = tuple(range(512, 4097, 512))  # rows, each with as many keys
DECODES, FEWEST_KEYS, MOST_KEYS = 64, 1024, 8192


@dataclass
class Mixed:
    """Prefills of new sequences and decodes over a paged cache, together and apart."""

    device: str
    prefills: Sequence[int] = PREFILLS
    decodes: int = DECODES
    keys: tuple[int, int] = (FEWEST_KEYS, MOST_KEYS)

    def __post_init__(self) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        few, most = self.keys
        lengths = [*self.prefills]
        lengths += [few + (most - few) * i // max(self.decodes - 1, 1) for i in range(self.decodes)]
        pages = [-(-n // PAGE) for n in lengths]
        order = torch.randperm(sum(pages), generator=generator).int()
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        start = 0
        for number, count in enumerate(pages):
            table[number, :count] = order[start : start + count]
            start += count

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, torch.bfloat16)

        self.rows = sum(self.prefills)
        self.q = rand(self.rows + self.decodes, HEADS, HEAD_DIM)
        self.caches = [rand(sum(pages), PAGE, HEADS_KV, HEAD_DIM) for _ in "kv"]
        self.table = table.to(self.device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        rows = [0, *self.prefills, *[1] * self.decodes]
        self.ends = torch.tensor(rows).cumsum(0).int().to(self.device)

    def _serve(self, q: torch.Tensor, first: int, last: int, **call: Any) -> torch.Tensor:
        import archflash

        out: torch.Tensor = archflash.attention_with_kvcache(
            q, *self.caches, cache_seqlens=self.lengths[first:last],
            page_table=self.table[first:last], causal=True, implementation=IMPLEMENTATION, **call,
        )  # fmt: skip
        return out

    def together(self) -> torch.Tensor:
        every = len(self.prefills) + self.decodes
        longest = max(self.prefills)
        return self._serve(self.q, 0, every, cu_seqlens_q=self.ends, max_seqlen_q=longest)

    def prefill(self) -> torch.Tensor:
        count = len(self.prefills)
        ends, longest = self.ends[: count + 1], max(self.prefills)
        return self._serve(self.q[: self.rows], 0, count, cu_seqlens_q=ends, max_seqlen_q=longest)

    def decode(self) -> torch.Tensor:
        count = len(self.prefills)
        q = self.q[self.rows :].unsqueeze(1)
        return self._serve(q, count, count + self.decodes).squeeze(1)

    def apart(self) -> torch.Tensor:
        import torch

        return torch.cat([self.prefill(), self.decode()])


class Calls:
    """Some calls of a function in a CUDA graph, for `round_robin`."""

    captured = True

    def __init__(self, call: Callable[[], object], calls: int = 2) -> None:
        import torch

        self.calls = calls
        call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(calls):
                call()

    def enqueue(self) -> Any:
        from bench.timing import CudaMark

        return CudaMark(self._graph.replay)


def measure_mixed(rounds: int) -> dict[str, float]:
    """Microseconds of the calls of `Mixed`, and how large the largest difference of their outputs
    is.
    """
    mixed = Mixed("cuda")
    worst = float((mixed.together().float() - mixed.apart().float()).abs().max())
    calls: dict[str, Callable[[], object]] = {
        "together": mixed.together,
        "prefill": mixed.prefill,
        "decode": mixed.decode,
        "apart": lambda: (mixed.prefill(), mixed.decode()),  # without the copy of both
    }
    timed = {name: Calls(call) for name, call in calls.items()}
    warm_up(timed, 0.1)
    samples = round_robin(timed, rounds)
    found = {name: round(percentile(us, 0.5), 2) for name, us in samples.items()}
    return {**found, "largest_difference": worst}


# --- the host's time ---


def host_loops(device: str) -> dict[str, tuple[Callable[..., object], list[tuple[Any, ...]]]]:
    """Decoding calls over a paged cache, whose lengths grow on the device and whose page table
    grows by a column at a time.
    """
    import torch

    import archflash

    caches = [
        torch.randn(256, PAGE, HEADS_KV, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for _ in "kv"
    ]

    def decode(q: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> object:
        return archflash.attention_with_kvcache(q, *caches, cache_seqlens=lengths, page_table=table)

    loops = {}
    for batch in (1, 64):
        q = torch.randn(batch, 1, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        table = torch.arange(batch * 64, dtype=torch.int32, device=device).reshape(batch, 64) % 256
        steps = [torch.full((batch,), n, dtype=torch.int32, device=device) for n in range(90, 106)]
        loops[f"{batch} sequences, lengths growing"] = (decode, [(q, table, n) for n in steps])
        wider = [(q, table[:, :n], steps[0]) for n in range(2, 65)]
        loops[f"{batch} sequences, page tables growing"] = (decode, wider)
    return loops


def measure_host(count: int) -> dict[str, dict[str, float]]:
    """Microseconds until a call returns: p20, p50 and p80."""
    import torch

    times = enqueue_times_us(host_loops("cuda"), count, torch.cuda.synchronize)
    return {
        name: {f"p{p}": round(percentile(us, p / 100), 2) for p in (20, 50, 80)}
        for name, us in times.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    parser = short_parser("bench.kvcache", __doc__, "decoding cases whose name matches")
    options = parser.parse_args(argv)
    cases = cases_to_run(lambda: choose_cases(load_cases(), options.only, "decode"))
    if cases is None:
        return 2

    import torch

    lab = FixedInputs()
    facts, path = open_results(lab, options.output)
    slug = environment.gpu_slug(facts["gpu"])
    beside = [c for c in (*our_candidates(), *torch_candidates()) if c.name in BESIDE]
    results = {}
    with torch.no_grad():
        for case in cases:
            candidates = [*beside, *cache_candidates(case, lab.make_inputs(case))]
            result = run_case(lab, case, candidates, facts, rounds=options.rounds)
            for row in result.rows:
                row["gbps"] = f"{gbps(case, float(row['p50_us']), 'e4m3' in row['features']):.1f}"
            del candidates
            lab.sets = []
            lab.release()
            append_rows(path, result.rows)
            results[case.name] = result
        print(summary(cases, results))
        record = {**facts, "mixed_us": measure_mixed(options.rounds), "host_us": measure_host(2000)}
    text = json.dumps(record, indent=2) + "\n"
    print(text)
    (options.output / f"{slug}-kvcache.json").write_text(text)
    return 1 if any(r.wrong for r in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
