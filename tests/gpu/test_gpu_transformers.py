"""archflash.integrations.transformers on a GPU: layers of many rows ask for no tensor of queries
times keys, and packing keeps gradients right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash

from .gpu_cases import DEVICE, rand

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from archflash.integrations import transformers as integration  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ROWS = 4096
MIB = 1 << 20


def layer(*, causal: bool = True) -> torch.nn.Module:
    made = torch.nn.Identity()
    made.is_causal = causal  # type: ignore[assignment]
    return made


def qkv(rows: int = ROWS, batch: int = 2, dtype: str = "bf16") -> list[Tensor]:
    return [rand(batch, 4, rows, 64, seed=seed, dtype=dtype).requires_grad_() for seed in range(3)]


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


def make(**call: Any) -> Tensor | None:
    return integration.make_mask(2, ROWS, ROWS, device=DEVICE, **call)


def padding(side: str) -> Tensor:
    row = torch.arange(ROWS, device=DEVICE)
    kept = [row < n if side == "right" else row >= ROWS - n for n in (ROWS, 3000)]
    return torch.stack(kept)


def masks_of_models() -> dict[str, Callable[[], tuple[Tensor | None, dict[str, Any]]]]:
    utils = transformers.masking_utils
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in (1000, 3096)])[None]
    blocks = (torch.arange(ROWS, device=DEVICE) // 300).expand(2, ROWS)
    return {
        "causal": lambda: (None, {}),
        "padding": lambda: (make(attention_mask=padding("right")), {}),
        "window": lambda: (make(mask_function=utils.sliding_window_causal_mask_function(512)), {}),
        "documents": lambda: (None, {"position_ids": positions}),
        "chunks": lambda: (
            make(
                mask_function=utils.chunked_causal_mask_function(
                    700, torch.zeros(2, dtype=torch.long, device=DEVICE)
                ),
                attention_mask=padding("left"),
            ),
            {},
        ),
        "an unknown function": lambda: (
            make(mask_function=lambda b, h, q, k: (k <= q) | (blocks[b, q] == blocks[b, k])), {},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", masks_of_models() if torch.cuda.is_available() else [""])
def test_no_layer_needs_a_tensor_of_queries_times_keys(name: str, dropout: float) -> None:
    """All that a layer and its backward pass allocate for a mask is less than that."""
    q, k, v = qkv()
    dout = torch.randn_like(q).transpose(1, 2)
    seen, call = masks_of_models()[name]()

    def both() -> Any:
        out, _ = integration.forward(layer(), q, k, v, seen, dropout=dropout, **call)
        return torch.autograd.grad(out, (q, k, v), dout)

    def plain() -> Any:
        drops = {"dropout_p": dropout} if dropout else {}
        out = archflash.attention(q, k, v, causal=True, **drops).transpose(1, 2).contiguous()
        return torch.autograd.grad(out, (q, k, v), dout)

    assert peak(masks_of_models()[name]) < 0.5 * 2 * ROWS * ROWS
    copies = 8 * q.numel() * q.element_size()  # of rows without padding, and of their gradients
    assert peak(both) < peak(plain) + copies + 4 * MIB


@pytest.mark.parametrize("name", masks_of_models() if torch.cuda.is_available() else [""])
def test_values_and_gradients_are_those_of_the_dense_mask(name: str) -> None:
    q, k, v = qkv()
    seen, call = masks_of_models()[name]()
    found = integration.forward(layer(), q, k, v, seen, **call)[0]
    if isinstance(seen, integration.Mask):
        dense = seen.values_()
    else:
        row = torch.arange(ROWS, device=DEVICE)
        dense = row <= row[:, None]
        if call:
            document = (row >= 1000).long()
            dense = dense & (document == document[:, None])
        dense = dense.expand(2, 1, ROWS, ROWS)
    # Queries that are padding may have any values, and no gradient comes from them.
    real = dense[:, 0].any(-1)
    if name == "padding":
        real = padding("right")
    weights = torch.randn_like(found) * real[:, :, None, None]
    gradients = torch.autograd.grad(found, (q, k, v), weights)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense).transpose(1, 2)
    others = torch.autograd.grad(expected, (q, k, v), weights)
    torch.testing.assert_close(found[real], expected[real], atol=2e-2, rtol=2e-2)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, dropout: float) -> None:
    q, k, v = qkv(256, dtype="fp32")
    with torch.autocast("cuda", dtype):
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
        positions.copy_(torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None])
        graph.replay()
        torch.testing.assert_close(out, call(), atol=2e-2, rtol=2e-2)
