"""bench.serving: the batches of its server, and a layer's call on the CPU."""

from __future__ import annotations

import pytest
import torch
from bench import serving

from archflash import reference


@pytest.mark.parametrize("name", serving.MIXES)
def test_every_row_of_every_request_is_in_one_batch(name: str) -> None:
    mix = serving.MIXES[name]
    batches = serving.steps(mix)
    assert sum(sum(step.rows) for step in batches) == sum(map(sum, mix.draw()))
    assert max(len(step.rows) for step in batches) <= serving.REQUESTS
    assert max(sum(step.rows) for step in batches) <= serving.TOKENS
    for step in batches:
        assert all(rows <= length for rows, length in zip(step.rows, step.lengths, strict=True))
    for kind in ("prefill", "mixed", "decode"):
        found = serving.chosen(batches, kind)
        few, most = found[0], found[-1]
        assert few.kind == most.kind == kind
        assert sum(few.lengths) <= sum(most.lengths)


@pytest.mark.parametrize("layer", [serving.Layer(4, 2, 16), serving.Layer(4, 2, 16, 8, True)])
def test_a_batch_that_is_loaded_later_is_computed(layer: serving.Layer) -> None:
    shape, step = serving.Step((1, 1, 5), (1, 1, 5)), serving.Step((1, 1, 5), (40, 17, 21))
    server = serving.Server(layer, step, "cpu", 48, 8)
    with torch.inference_mode():
        for call in (server.archflash, server.sglang):
            server.load(shape)
            out = call()
            assert server.are_right(shape, out)
            server.load(step)
            assert not server.are_right(step, out)
            assert server.are_right(step, call())


def test_peers_get_the_rows_without_pages() -> None:
    layer, step = serving.Layer(4, 2, 16), serving.Step((1, 1), (40, 17))
    server = serving.Server(layer, serving.Step((1, 1), (1, 1)), "cpu", 48, 8)
    server.load(step)
    k, v, ends = server.without_pages(step)
    assert ends.tolist() == [0, 40, 57]
    assert k.shape == v.shape == (57, 2, 16)
    _, expected, _ = server.expected(1, step)
    q = server.q[1:2].transpose(0, 1)[None]
    part = slice(40, 57)
    mine, _ = reference.attention(q, *(x[part].transpose(0, 1)[None] for x in (k, v)))
    torch.testing.assert_close(mine[0].transpose(0, 1), expected)
