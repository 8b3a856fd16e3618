"""archflash.integrations.transformers on a GPU: layers of many rows ask for no tensor of queries
times keys, and packing keeps gradients right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .gpu_cases import DEVICE, rand

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from archflash.integrations import transformers as integration  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROWS = 8192  # for memory: a mask of bools takes 128 MiB
NAMES = ("causal", "padding", "window", "documents", "chunks", "an unknown function")


def layer() -> torch.nn.Module:
    made = torch.nn.Identity()
    made.is_causal = True  # type: ignore[assignment]
    return made


def qkv(rows: int, dtype: str = "bfloat16") -> list[Tensor]:
    return [rand(2, 1, rows, 64, seed=seed, dtype=dtype).requires_grad_() for seed in range(3)]


def peak(f: Callable[[], Any]) -> int:
    """Bytes that a call needs beyond what is there before it."""
    f()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def padding(side: str, rows: int) -> Tensor:
    row = torch.arange(rows, device=DEVICE)
    kept = [row < n if side == "right" else row >= rows - n for n in (rows, rows * 3 // 4)]
    return torch.stack(kept)


def mask_of_a_model(name: str, rows: int) -> tuple[Tensor | None, dict[str, Any]]:
    """What a layer gets: its mask, and what else says which keys a query sees."""
    utils = transformers.masking_utils

    def make(**call: Any) -> Tensor | None:
        return integration.make_mask(2, rows, rows, device=DEVICE, **call)

    if name == "causal":
        return None, {}
    if name == "padding":
        return make(attention_mask=padding("right", rows)), {}
    if name == "window":
        return make(mask_function=utils.sliding_window_causal_mask_function(rows // 8)), {}
    if name == "documents":
        lengths = (rows // 4, rows - rows // 4)
        return None, {
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
        }
    if name == "chunks":
        chunks = utils.chunked_causal_mask_function(
            rows // 6, torch.zeros(2, dtype=torch.long, device=DEVICE)
        )
        return make(mask_function=chunks, attention_mask=padding("left", rows)), {}
    blocks = (torch.arange(rows, device=DEVICE) // (rows // 14)).expand(2, rows)
    return make(mask_function=lambda b, h, q, k: (k <= q) | (blocks[b, q] == blocks[b, k])), {}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_no_layer_needs_a_tensor_of_queries_times_keys(name: str, dropout: float) -> None:
    """All that making a mask, a layer and its backward pass allocate is less than half of one."""
    q, k, v = qkv(ROWS)
    dout = torch.randn_like(q).transpose(1, 2)
    seen, call = mask_of_a_model(name, ROWS)

    def both() -> Any:
        out, _ = integration.forward(layer(), q, k, v, seen, dropout=dropout, **call)
        return torch.autograd.grad(out, (q, k, v), dout)

    assert peak(lambda: mask_of_a_model(name, ROWS)) < ROWS * ROWS
    assert peak(both) < ROWS * ROWS


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_the_dense_mask(name: str) -> None:
    rows = 1024
    q, k, v = qkv(rows)
    seen, call = mask_of_a_model(name, rows)
    found = integration.forward(layer(), q, k, v, seen, **call)[0]
    if isinstance(seen, integration.Mask):
        dense = seen.values_()
    else:
        row = torch.arange(rows, device=DEVICE)
        document = (row >= rows // 4).long() if call else torch.zeros_like(row)
        dense = (row <= row[:, None]) & (document == document[:, None])
        dense = dense.expand(2, 1, rows, rows)
    # Queries that are padding may have any values, and no gradient comes from them.
    real = padding("right", rows) if name == "padding" else dense[:, 0].any(-1)
    weights = torch.randn(found.shape, device=DEVICE) * real[:, :, None, None]
    gradients = torch.autograd.grad(found, (q, k, v), weights.to(found.dtype))
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *exact, dense | ~real[:, None, :, None]
    ).transpose(1, 2)
    others = torch.autograd.grad(expected, exact, weights)
    torch.testing.assert_close(found[real].float(), expected[real], atol=2e-2, rtol=2e-2)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one.float(), other, atol=6e-2, rtol=5e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, dropout: float) -> None:
    q, k, v = qkv(256, "float32")
    with torch.autocast(torch.device(DEVICE).type, dtype):
        out = integration.forward(layer(), q, k, v.to(dtype), None, dropout=dropout)[0]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v.to(dtype), None, 0.0, True
        ).transpose(1, 2)
    assert out.dtype == expected.dtype == dtype
    if not dropout:
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    for x in torch.autograd.grad(out.float().sum(), (q, k, v)):
        assert x.dtype == torch.float32
        assert x.isfinite().all()


def test_a_captured_call_isolates_documents() -> None:
    """Nothing can be read on the host there, so ranges of keys say where documents begin."""
    q, k, v = (x.detach() for x in qkv(256))
    positions = torch.arange(256, device=DEVICE)[None].clone()

    def call() -> Tensor:
        with torch.no_grad():
            return integration.forward(layer(), q, k, v, None, position_ids=positions)[0]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ((256,), (100, 156)):
        positions.copy_(torch.cat([torch.arange(n) for n in lengths])[None])
        graph.replay()
        torch.testing.assert_close(out, call(), atol=2e-2, rtol=2e-2)
