"""bench.serving: the batches of its server, and a layer's call on the CPU."""

from __future__ import annotations

import pytest
import torch
from bench import serving


@pytest.mark.parametrize("name", serving.MIXES)
def test_every_row_of_every_request_is_in_one_batch(name: str) -> None:
    mix = serving.MIXES[name]
    batches = list(serving.steps(mix))
    assert sum(sum(step.rows) for step in batches) == sum(map(sum, mix.draw()))
    assert max(len(step.rows) for step in batches) <= serving.REQUESTS
    assert max(sum(step.rows) for step in batches) <= serving.TOKENS
    for step in batches:
        assert all(rows <= length for rows, length in zip(step.rows, step.lengths, strict=True))
    for kind in ("prefill", "mixed", "decode"):
        few, most = serving.chosen(mix, kind)[0], serving.chosen(mix, kind)[-1]
        assert few.kind == most.kind == kind
        assert sum(few.lengths) <= sum(most.lengths)


@pytest.mark.parametrize("layer", [serving.Layer(4, 2, 16), serving.Layer(4, 2, 16, 8, True)])
def test_a_batch_that_is_loaded_later_is_computed(layer: serving.Layer) -> None:
    shape, step = serving.Step((1, 1, 5), (1, 1, 5)), serving.Step((1, 1, 5), (40, 17, 21))
    server = serving.Server(layer, shape, "cpu", 48, 8)
    with torch.no_grad():
        server.load(shape)
        server.archflash()
        assert server.is_right(shape)
        server.load(step)
        assert not server.is_right(step)
        server.archflash()
    assert server.is_right(step)
