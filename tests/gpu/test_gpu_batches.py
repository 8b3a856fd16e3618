"""Layers of a server's batch, which have a workspace and launches that depend on lengths alone in
common: each gives the bits of a call of its own.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash.integrations._paged import PagedAttention, PagedBatch

from .gpu_cases import same_bits

pytestmark = pytest.mark.gpu

HEADS, HEADS_KV, DIM, PAGE, PAGES = 8, 2, 128, 16, 400
# New rows of each request, and two sets of lengths with them. On 9.0 these have an ordering launch,
# shares of keys that are combined, and a count of the tiles that were taken.
BATCHES: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "a prompt among decoding requests": ((300, 1, 1), ((300, 9, 40), (1900, 1700, 77))),
    "decoding": ((1,) * 4, ((5, 900, 31, 7), (2000, 1, 1400, 600))),
    "a prompt": ((1500,), ((1500,), (1999,))),
}


class Layers:
    """A batch, and queries, caches and outputs of its layers."""

    def __init__(self, kind: str, layers: int = 3) -> None:
        torch.manual_seed(0)
        rows, self.lengths = BATCHES[kind]
        half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = [torch.randn(sum(rows), HEADS, DIM, **half) for _ in range(layers)]
        shape = (PAGES, HEADS_KV, PAGE, 2 * DIM)
        self.caches = [torch.randn(shape, **half) for _ in range(layers)]
        self.out = [torch.empty_like(q) for q in self.q]
        self.of_model = [PagedAttention(HEADS, DIM, DIM**-0.5, HEADS_KV) for _ in range(layers)]
        ends = torch.tensor([0, *rows]).cumsum(0)
        self.batch = PagedBatch(
            num_actual_tokens=sum(rows),
            max_query_len=max(rows),
            query_start_loc=ends.int().cuda(),
            seq_lens=torch.tensor(self.lengths[0], dtype=torch.int32, device="cuda"),
            block_table=torch.stack([torch.randperm(PAGES)[:125] for _ in rows]).int().cuda(),
            slot_mapping=torch.zeros(sum(rows), dtype=torch.int64, device="cuda"),
        )

    def run(self) -> None:
        for layer in range(len(self.q)):
            self.run_layer(layer)

    def run_layer(self, layer: int) -> None:
        of_model = SimpleNamespace(_k_scale=None, _v_scale=None)
        given = (self.q[layer], None, None, self.caches[layer], self.batch, self.out[layer])
        self.of_model[layer].run(of_model, *given)

    def set_lengths(self, which: int) -> None:
        self.batch.seq_lens.copy_(torch.tensor(self.lengths[which]))

    def expected(self, layer: int) -> Tensor:
        cache, batch = self.caches[layer].transpose(1, 2), self.batch
        result: Tensor = archflash.attention_with_kvcache(
            self.q[layer],
            cache[..., :DIM],
            cache[..., DIM:],
            cache_seqlens=batch.seq_lens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            causal=True,
        )
        return result

    def check(self) -> None:
        for layer, out in enumerate(self.out):
            assert same_bits(out, self.expected(layer)), layer
            out.zero_()


@pytest.fixture(params=BATCHES)
def layers(request: pytest.FixtureRequest) -> Any:
    with torch.inference_mode():
        yield Layers(request.param)


def captured(layers: Layers) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run()
    return graph


def test_every_layer_gives_the_bits_of_a_call_of_its_own(layers: Layers) -> None:
    for which in (0, 1, 0):
        layers.set_lengths(which)
        layers.batch.lengths_changed()
        layers.run()
        layers.check()


def test_a_graph_orders_the_lengths_of_its_replay(layers: Layers) -> None:
    layers.run()  # what it has prepared does not belong to a graph
    graphs = [captured(layers), captured(layers)]
    for graph, which in zip(graphs * 2, (1, 1, 0, 1), strict=True):
        layers.set_lengths(which)
        graph.replay()
        layers.check()
    layers.batch.lengths_changed()
    layers.run()
    layers.check()
    graphs[0].replay()
    layers.check()


def test_streams_have_workspaces_of_their_own(layers: Layers) -> None:
    layers.set_lengths(1)
    layers.run()
    layers.check()
    other = torch.cuda.Stream()
    for layer in range(len(layers.q)):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            layers.run_layer(layer)
        torch.cuda.current_stream().wait_stream(other)
        layers.run_layer(layer)
    layers.check()


def test_a_model_may_have_more_layers_than_there_are_counters(layers: Layers) -> None:
    for _ in range(50):
        layers.run()
    layers.check()


def test_threads_may_launch_layers_of_one_batch(layers: Layers) -> None:
    """Python's lock is free while a thread launches: others' layers come in between."""
    stream, begin = torch.cuda.current_stream(), threading.Barrier(len(layers.q))

    def work(layer: int) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            begin.wait()
            for _ in range(100):
                layers.run_layer(layer)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(layers.q))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    layers.check()
