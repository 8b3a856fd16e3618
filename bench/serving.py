"""Measures attention of a server's steps: the calls of a layer that the plug-ins for vLLM and for
SGLang make, over batches that a scheduler makes of a mix of requests.

    python -m bench.serving [--only REGEX] [--rounds N] [--output FOLDER]

Requests, lengths and arrivals come from a seeded generator, and so do the pages; those of
`recorded` from vLLM's own scheduler (tests/servers/vllm/record_steps.py). Several layers of a step
are captured in a CUDA graph with other lengths than those that it is replayed with; one of decoding
also with a page table for the longest request, as servers have it in their graphs. Beside it stand
the peers that serve it, over keys and values without pages: PyTorch's cuDNN kernel, and fa3 where
it is installed. Host times are those of eager calls, in the fastest of a few turns: what else runs
on a host slows it for seconds. Writes <gpu>-serving.json. Exit status 1 when an output was wrong, 2
when nothing can be measured.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bench import environment
from bench.candidates import FLASH_ATTENTION
from bench.results import percentile
from bench.run import short_parser
from bench.timing import enqueue_times_us, round_robin, warm_up

if TYPE_CHECKING:
    import torch

PAGE = 16
TOKENS, REQUESTS = 2048, 64  # of a step, at most: vLLM's chunked prefill
HOST_TURNS = 3
RECORDED = Path(__file__).parent / "recorded_steps.json"


@dataclass(frozen=True)
class Mix:
    """Requests: log-normal lengths of prompts and of answers, and how many come in a step."""

    prompt: tuple[float, float, int]  # median, sigma, longest
    answer: tuple[float, float, int]
    arrivals: float
    requests: int = 400

    def longest(self) -> int:
        """Tokens of a request, at most."""
        return max(prompt + answer for prompt, answer in self.draw())

    def draw(self) -> list[tuple[int, int]]:
        """Lengths of the prompt and of the answer of each request."""
        generator = random.Random(0)

        def length(median: float, sigma: float, longest: int) -> int:
            return max(1, min(longest, round(median * generator.lognormvariate(0, sigma))))

        return [(length(*self.prompt), length(*self.answer)) for _ in range(self.requests)]


@dataclass(frozen=True)
class Layer:
    """The attention of a layer of a model."""

    heads: int
    heads_kv: int
    dim: int
    window: int | None = None
    sinks: bool = False


# Lengths as in conversations that people shared: half of the prompts below 60 tokens, the mean
# above 200; and questions about documents.
MIXES = {
    "chat": Mix((60, 1.6, 4096), (150, 1.0, 1024), 0.3),
    "documents": Mix((5000, 0.6, 16384), (100, 0.8, 512), 0.1, 100),
}
LAYERS = {"llama-8b": Layer(32, 8, 128), "gpt-oss, window": Layer(64, 8, 64, 128, True)}


@dataclass(frozen=True)
class Step:
    """A batch: new rows of each request, its length with them, and its pages where they were
    recorded. Decoding requests come first.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...] = ()

    @property
    def kind(self) -> str:
        one = sum(rows == 1 for rows in self.rows)
        return "decode" if one == len(self.rows) else "mixed" if one else "prefill"


@functools.cache
def steps(mix: Mix) -> tuple[Step, ...]:
    """The batches of a server that gets the requests of a mix: each request that decodes has a row,
    and chunks of prompts fill the rest of `TOKENS`.
    """
    waiting = [[prompt, 0, answer] for prompt, answer in mix.draw()]  # prompt, rows seen, answer
    running: list[list[int]] = []
    batches = []
    came = 0.0
    while waiting or running:
        came += mix.arrivals
        while waiting and came >= 1 and len(running) < REQUESTS:
            running.append(waiting.pop(0))
            came -= 1
        left, rows, lengths = TOKENS, [], []
        for request in sorted(running, key=lambda request: request[1] < request[0]):
            new = 1 if request[1] >= request[0] else min(request[0] - request[1], left)
            if new:
                left -= new
                request[1] += new
                rows.append(new)
                lengths.append(request[1])
        running = [r for r in running if r[1] < r[0] + r[2]]
        if rows:
            batches.append(Step(tuple(rows), tuple(lengths)))
    return tuple(batches)


def recorded() -> tuple[list[Step], int]:
    """Steps of a server of vLLM, by tests/servers/vllm/record_steps.py, and as many keys as its
    page table has room for.
    """

    def table(runs: list[list[int]]) -> tuple[int, ...]:
        return tuple(block for first, count in runs for block in range(first, first + count))

    found = json.loads(RECORDED.read_text())
    made = [
        Step(tuple(x["rows"]), tuple(x["lengths"]), tuple(map(table, x["tables"])))
        for x in found["steps"]
    ]
    return made, found["columns"] * PAGE


def chosen(batches: Sequence[Step], kind: str, number: int = 2) -> list[Step]:
    """Steps of a kind, from the shortest contexts to the longest, of those that fill the server
    most: by requests where they decode, else by rows.
    """

    def size(step: Step) -> int:
        return len(step.rows) if kind == "decode" else sum(step.rows)

    found = [step for step in batches if step.kind == kind]
    most = max(map(size, found), default=0)
    found = sorted((s for s in found if size(s) == most), key=lambda step: sum(step.lengths))
    last = len(found) - 1
    return [found[i * last // max(number - 1, 1)] for i in range(min(number, len(found)))]


class Server:
    """A layer over a paged cache in vLLM's layout, and the batch of a step in persistent tensors,
    as a server has them: `load` changes their numbers only.
    """

    def __init__(self, layer: Layer, step: Step, device: str, longest: int, pages: int) -> None:
        import torch

        from archflash._kvcache import kind_of, values_of
        from archflash.integrations._paged import PagedAttention, PagedBatch, narrowed

        torch.manual_seed(0)
        self.layer = layer
        heads, dim, half = layer.heads, layer.dim, torch.bfloat16
        rows, requests = sum(step.rows), len(step.rows)
        sinks = torch.randn(heads, device=device) if layer.sinks else None
        self.attention = PagedAttention(
            heads, dim, dim**-0.5, layer.heads_kv, sliding_window=layer.window, sinks=sinks
        )
        window = None if layer.window is None else (layer.window - 1, 0)
        self.values = values_of(causal=True, window=window, scale=dim**-0.5, sinks=sinks)
        self.kind, self.prepared = kind_of(self.values), dict[int, Any]()
        self.pages = pages
        cache = torch.randn(pages, PAGE, layer.heads_kv, 2 * dim, device=device, dtype=half)
        self.cache = cache.transpose(1, 2)
        self.q = torch.randn(rows, heads, dim, device=device, dtype=half)
        self.out = torch.empty_like(self.q)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        table = torch.zeros(requests, -(-longest // PAGE), **integers)
        decodes = step.kind == "decode"
        self.batch = PagedBatch(
            num_actual_tokens=rows,
            max_query_len=max(step.rows),
            query_start_loc=torch.zeros(requests + 1, **integers),
            seq_lens=torch.zeros(requests, **integers),
            block_table=narrowed(table, PAGE, None if decodes else max(step.lengths)),
            slot_mapping=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.of_layer = SimpleNamespace(_k_scale=None, _v_scale=None)
        # SGLang's queries of decoding are not packed.
        in_common = self.batch.in_common
        self.in_common = (None, None, *in_common[2:]) if decodes else in_common
        self.rows_of_q = (-1, 1, heads, dim) if decodes else (-1, heads, dim)
        self.flat_q = self.q.flatten(1)

    def load(self, step: Step) -> None:
        """The numbers of a step whose requests have as many rows, and no more keys."""
        import torch

        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(1)).int()
        table = torch.zeros_like(self.batch.block_table, device="cpu")
        at = 0
        for request, length in enumerate(step.lengths):
            count = -(-length // PAGE)
            if step.tables:
                table[request, :count] = torch.tensor(step.tables[request][:count])
            else:
                table[request, :count] = order[torch.arange(at, at + count) % self.pages]
            at += count
        self.batch.block_table.copy_(table)
        self.batch.seq_lens.copy_(torch.tensor(step.lengths))
        self.batch.query_start_loc.copy_(torch.tensor([0, *step.rows]).cumsum(0))
        self.batch.lengths_changed()
        self.prepared.clear()

    def archflash(self) -> torch.Tensor:
        """The call of the plug-in for vLLM."""
        return self.attention.run(
            self.of_layer, self.q, None, None, self.cache, self.batch, self.out
        )

    def sglang(self) -> torch.Tensor:
        """That of the plug-in for SGLang."""
        from archflash._kvcache import serve_flat

        k_cache, v_cache = self.attention.caches(self.cache)
        return serve_flat(
            self.flat_q, self.rows_of_q, k_cache, v_cache, self.values, self.kind, self.prepared,
            self.in_common,
        )  # fmt: skip

    def without_pages(self, step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of all requests one behind the other, and where each request begins."""
        import torch

        tables = [self.batch.block_table[i, : -(-n // PAGE)] for i, n in enumerate(step.lengths)]
        k, v = (
            torch.cat(
                [x[t.long()].flatten(0, 1)[:n] for t, n in zip(tables, step.lengths, strict=True)]
            )
            for x in self.attention.caches(self.cache)
        )
        ends = torch.tensor([0, *step.lengths], device=k.device).cumsum(0).int()
        return k, v, ends

    def peers(self, step: Step) -> dict[str, Callable[[], object]]:
        """What else serves a step."""

        if self.layer.sinks:
            return {}
        longest, scale = (max(step.rows), max(step.lengths)), self.attention.scale
        starts = self.batch.query_start_loc
        k, v, ends = self.without_pages(step)
        calls: dict[str, Callable[[], object]] = {}
        if fa3_module() is not None:
            window = (-1, -1) if self.layer.window is None else (self.layer.window - 1, 0)
            calls["fa3"] = functools.partial(
                fa3_module().flash_attn_varlen_func, self.q, k, v, starts, ends, *longest,
                causal=True, window_size=window, softmax_scale=scale,
            )  # fmt: skip
        # PyTorch's cuDNN kernel for packed sequences aligns a causal mask to the top left, and so
        # cannot have keys before the new rows. Decoding needs no mask, but a first call of 64
        # sequences took longer than 20 s (torch 2.11, H200, 2026-11-28).
        if self.layer.window is None and len(step.rows) == 1 and step.rows == step.lengths:
            calls["torch-cudnn"] = functools.partial(_by_cudnn, self.q, k, v, scale)
        return calls

    def expected(self, request: int, step: Step) -> tuple[slice, torch.Tensor, torch.Tensor]:
        """Rows of a request, and their attention in float64 and in 16 bits."""
        import torch

        from archflash import reference

        start, rows = sum(step.rows[:request]), min(step.rows[request], 4)
        length = step.lengths[request]
        last = start + step.rows[request]
        part = slice(last - rows, last)
        table = self.batch.block_table[request, : -(-length // PAGE)].long()
        k, v = (
            x[table].flatten(0, 1)[:length].transpose(0, 1)[None]
            for x in self.attention.caches(self.cache)
        )
        q = self.q[part].transpose(0, 1)[None]
        call: dict[str, Any] = {"causal": True, "scale": self.attention.scale}
        if self.layer.window is not None:
            call["window"] = (self.layer.window - 1, 0)
        if self.attention.sinks is not None:
            call["sinks"] = self.attention.sinks
        with torch.no_grad():
            exact = reference.attention(q, k, v, **call)[0]
            plain = reference.baseline(q, k, v, **call)
        return part, exact[0].transpose(0, 1), plain[0].transpose(0, 1)

    def are_right(self, step: Step, *outs: torch.Tensor) -> bool:
        """Whether outputs are that of the step, by the last rows of some requests."""
        from archflash import reference

        for request in {0, len(step.rows) // 2, len(step.rows) - 1}:
            part, exact, plain = self.expected(request, step)
            found = [out.view_as(self.q)[part] for out in outs]
            if not all(reference.check(out, exact, plain).ok for out in found):
                return False
        return True


def _by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one sequence by PyTorch's cuDNN kernel."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _as_rows(out: Any) -> torch.Tensor:
    """What a peer returns, as (rows, heads, d)."""
    out = out[0] if isinstance(out, tuple) else out
    return out[0].transpose(0, 1) if out.ndim == 4 else out  # type: ignore[no-any-return]


class Graph:
    """A call in a CUDA graph, for `round_robin`."""

    captured = True
    calls = 8

    def __init__(self, call: Callable[[], object]) -> None:
        import torch

        call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self.calls):
                self.result: Any = call()

    def enqueue(self) -> Any:
        from bench.timing import CudaMark

        return CudaMark(self._graph.replay)

    def replayed(self) -> torch.Tensor:
        """The output of a replay, as (rows, heads, d). It is cleared before: a call that computes
        nothing in a replay would leave what an earlier one has written.
        """
        rows = _as_rows(self.result)
        rows.zero_()
        self.enqueue().wait()
        return rows


@functools.cache
def fa3_module() -> Any:
    """FlashAttention-3's module, or None where it is not installed."""
    for name in FLASH_ATTENTION[0][1]:
        with contextlib.suppress(Exception):  # a broken installation fails in its own way
            return importlib.import_module(name)
    return None


def measure(layer: Layer, step: Step, longest: int, rounds: int) -> dict[str, Any]:
    """Medians in microseconds for a step.

    Args:
        longest: keys of a request, at most.
    """
    import torch

    pages = min(sum(-(-n // PAGE) for n in step.lengths), 40_000)
    pages = max([pages, *(1 + max(table) for table in step.tables)])
    server = Server(layer, step, "cuda", longest, pages)
    server.load(Step(step.rows, step.rows, step.tables))  # captured while every request is short
    graphs = {"archflash": Graph(server.archflash), "sglang": Graph(server.sglang)}
    server.load(step)
    for name, call in server.peers(step).items():
        peer = Graph(call)
        if server.are_right(step, peer.replayed()):  # else its time says nothing
            graphs[name] = peer
        else:
            print(f"{name} gives wrong numbers: {step}"[:200], flush=True)
    outs = [graphs[name].replayed() for name in ("archflash", "sglang")]
    right = server.are_right(step, *outs)
    warm_up(graphs, 0.05)
    calls = {"host_us": server.archflash, "sglang_host_us": server.sglang}
    loops = {name: (call, [()]) for name, call in calls.items()}
    samples: dict[str, list[float]] = {}
    host: dict[str, list[list[float]]] = {}
    for _ in range(HOST_TURNS):
        for name, us in round_robin(graphs, -(-rounds // HOST_TURNS)).items():
            samples.setdefault(name, []).extend(us)
        for name, us in enqueue_times_us(loops, 100, torch.cuda.synchronize).items():
            host.setdefault(name, []).append(us)
    times = samples | {name: min(turns, key=statistics.median) for name, turns in host.items()}
    return {
        "kind": step.kind,
        "requests": len(step.rows),
        "rows": sum(step.rows),
        "keys": sum(step.lengths),
        "right": right,
        **{name: round(percentile(us, 0.5), 2) for name, us in times.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    parser = short_parser("bench.serving", __doc__, "layers and mixes whose name matches")
    options = parser.parse_args(argv)
    if environment.measures_nothing():
        return 2

    import torch

    facts = environment.run_facts(environment.open_nvml())
    found: dict[str, list[dict[str, Any]]] = {}
    kinds = ("prefill", "mixed", "decode")
    batches: dict[str, tuple[Sequence[Step], int]] = {
        name: ([step for kind in kinds for step in chosen(steps(mix), kind)], mix.longest())
        for name, mix in MIXES.items()
    }
    batches["recorded"] = recorded()
    with torch.inference_mode():  # as servers do
        for (of_layer, layer), (of_mix, mix) in itertools.product(LAYERS.items(), batches.items()):
            name = f"{of_layer}, {of_mix}"
            if options.only and not re.search(options.only, name):
                continue
            found[name] = []
            for step in mix[0]:
                row = measure(layer, step, mix[1], options.rounds)
                print(name, row, flush=True)
                found[name].append(row)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{environment.gpu_slug(facts['gpu'])}-serving.json"
    path.write_text(json.dumps({**facts, "steps": found}, indent=2) + "\n")
    return 0 if all(row["right"] for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
