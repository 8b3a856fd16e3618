"""Calls at which kernels of PyTorch fail on some GPU (`archflash._pytorch_faults`): through every
way into archflash they give right results, with and without gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import archflash

from .gpu_cases import DEVICE

pytestmark = pytest.mark.gpu
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float | None], Tensor]


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    offset = 0 if causal and q.shape[2] != k.shape[2] else None
    out: Tensor = archflash.attention(
        q, k, v, attn_mask=mask, causal=causal, q_offset=offset, scale=scale
    )
    return out


def by_torch(*call: Any) -> Tensor:
    with archflash.force("torch"):
        return attention(*call)


def drop_in(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    return archflash.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale)


def enabled(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale)


WAYS: dict[str, Attend] = {
    "attention": attention, "torch": by_torch, "drop-in": drop_in, "enable": enabled,
}  # fmt: skip


def exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """In float64, with causal aligned to the top left; 0 for rows that see no key."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * factor
    if causal:
        rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(rows[:, None] < keys, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def assert_right(
    way: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False,
    scale: float | None = None, sequences: list[int] | None = None, tolerance: float = 0.05,
) -> None:  # fmt: skip
    """The output with and without gradients, and the gradients, of some of the sequences."""
    at = slice(None) if sequences is None else sequences
    a, b, c = exact_inputs = [x[at].double().requires_grad_() for x in (q, k, v)]
    expected = exact(a, b, c, mask, causal, scale)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=DEVICE)
    wanted = torch.autograd.grad(expected, exact_inputs, dout[at].double())
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # Under enable() autograd calls the backward operators later: archflash is enabled around both.
    with archflash.enabled() if way == "enable" else torch.enable_grad():
        with torch.no_grad():
            plain = WAYS[way](q, k, v, mask, causal, scale)
        out = WAYS[way](q, k, v, mask, causal, scale)
        found = torch.autograd.grad(out, leaves, dout)
    size = max(float(x.abs().max()) for x in wanted)
    for name, x, y, least in (
        ("out without gradients", plain, expected, 0.1),
        ("out", out, expected, 0.1),
        *((f"d{n}", x, y, size / 4) for n, x, y in zip("qkv", found, wanted, strict=True)),
    ):
        error = (x[at].double() - y).detach().abs().max()
        limit = tolerance * max(float(y.detach().abs().max()), least)
        assert float(error) <= limit, f"{name}: {float(error)} above {limit}"


def qkv(b: int, h: int, nq: int, nk: int, d: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator(device=DEVICE).manual_seed(nq + nk)
    return tuple(
        torch.randn(b, h, n, d, device=DEVICE, generator=generator).to(dtype) for n in (nq, nk, nk)
    )


def of_very_low_scores(q: Tensor, k: Tensor) -> None:
    """All scores become about -200, so that every log-sum-exp is below -88."""
    side = math.sqrt(200) * q.shape[-1] ** 0.25
    q.mul_(0.1)
    k.mul_(0.1)
    q[..., 0], k[..., 0] = side, -side


each_way = pytest.mark.parametrize("way", WAYS)


@each_way
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.125, -1.0])
def test_a_scale_of_0_or_less(way: str, causal: bool, scale: float) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for nq, nk in ((33, 33), (200, 200), (1, 200), (64, 192)):
            q, k, v = qkv(1, 2, nq, nk, 64, dtype)
            assert_right(way, q, k, v, None, causal and nq == nk, scale, tolerance=0.1)
            seen = torch.rand(nq, nk, device=DEVICE) > 0.3
            seen[:, 0] = True
            if not causal:
                assert_right(way, q, k, v, seen, False, scale, tolerance=0.1)


@each_way
@pytest.mark.parametrize("kind", ["none", "all", "bool", "added"])
@pytest.mark.parametrize(
    ("nq", "nk"), [(64, 64), (192, 192), (704, 704), (200, 192), (1, 64), (1, 128), (1, 192)],
    ids=str,
)  # fmt: skip
def test_gradients_of_rows_of_very_low_scores(way: str, nq: int, nk: int, kind: str) -> None:
    q, k, v = qkv(1, 2, nq, nk, 64)
    of_very_low_scores(q, k)
    seen = torch.ones(1, 1, nq, nk, dtype=torch.bool, device=DEVICE)
    if kind in ("bool", "added"):
        seen[..., nk // 2 :] = torch.rand(nq, nk - nk // 2, device=DEVICE) > 0.5
    mask = None if kind == "none" else seen
    if kind == "added":
        mask = torch.where(seen, 0.0, -math.inf).to(q.dtype)
    # The large column of k makes much of the rounding to 16 bits; the faults are NaN.
    assert_right(way, q, k, v, mask, tolerance=0.5)


@each_way
@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ((32768, 12, 1, 64), 1),
        ((16385, 16, 1, 40), 3),
        ((65536, 1, 4, 32), 4),
        ((70000, 8, 16, 40), 16),
        ((1, 65536, 4, 32), 4),
        ((1, 70000, 1, 32), 16),
    ],
    ids=str,
)
def test_many_sequences_or_heads(way: str, shape: tuple[int, int, int, int], keys: int) -> None:
    b, h, nq, d = shape
    if torch.cuda.mem_get_info()[0] < 60 << 30 and b * h > 1 << 19:
        pytest.skip("the workspace takes tens of gigabytes")
    q, k, v = qkv(b, h, nq, keys, d)
    sequences = sorted({0, b // 2, b - 1, min(b - 1, 65535), min(b - 1, 65536)})
    assert_right(way, q, k, v, sequences=sequences)
    torch.cuda.empty_cache()


def masks(nq: int, nk: int, dtype: torch.dtype) -> dict[str, Tensor]:
    numbers = torch.randn(2, 1, 2 * nk, 2 * nk, device=DEVICE)
    own = numbers.to(dtype)
    return {
        "fp32": numbers[:, :, :nq, :nk].contiguous(),
        "one for all keys": own[:, :, :nq, :1],
        "a number": own[:1, :, :1, :1],
        "every other": own[:, :, :nq, ::2],
        "turned": own[:, :, :nk, :nq].mT,
        "shifted": own[:, :, :nq, 1 : nk + 1],
        "bool, one for all keys": own[:, :, :nq, :1] > -9,
        "bool, shifted": own[:, :, :nq, 1 : nk + 1] > -1,
    }


@each_way
@pytest.mark.parametrize(
    "name",
    [
        "fp32", "one for all keys", "a number", "every other", "turned", "shifted",
        "bool, one for all keys", "bool, shifted",
    ],
)  # fmt: skip
def test_masks_in_all_layouts(way: str, name: str) -> None:
    for nq, nk in ((33, 33), (64, 64), (40, 97), (200, 200)):
        q, k, v = qkv(2, 4, nq, nk, 64)
        assert_right(way, q, k, v, masks(nq, nk, q.dtype)[name])


@each_way
@pytest.mark.parametrize("layout", ["odd rows", "shifted"])
def test_rows_at_odd_addresses(way: str, layout: str) -> None:
    wide = qkv(2, 4, 100, 100, 65)
    if layout == "odd rows":
        q, k, v = (x[..., :64] for x in wide)
    else:
        q, k, v = (x.flatten()[1 : 1 + 2 * 4 * 100 * 64].view(2, 4, 100, 64) for x in wide)
    seen = torch.ones(100, 100, dtype=torch.bool, device=DEVICE).tril()
    for mask, causal in ((None, False), (None, True), (seen, False)):
        assert_right(way, q, k, v, mask, causal)


@each_way
def test_expanded_heads_under_a_mask_of_32_keys_and_one(way: str) -> None:
    for nk, d in itertools.product((65, 97), (64, 512)):
        q, k, v = qkv(2, 4, 33, nk, d)
        k, v = (x[:, :1].expand(2, 4, nk, d) for x in (k, v))
        seen = torch.ones(33, nk, dtype=torch.bool, device=DEVICE).tril(nk - 33)
        with archflash.enabled() if way == "enable" else torch.enable_grad(), torch.no_grad():
            out = WAYS[way](q, k, v, seen, False, None)
        expected = exact(q.double(), k.double(), v.double(), seen, False, None)
        torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("way", ["attention", "torch", "drop-in"])
def test_only_the_mask_needs_a_gradient(way: str) -> None:
    q, k, v = qkv(1, 2, 64, 64, 64)
    mask = torch.randn(1, 1, 64, 64, device=DEVICE, dtype=q.dtype, requires_grad=True)
    out = WAYS[way](q, k, v, mask, False, None)
    (gradient,) = torch.autograd.grad(out.float().sum(), mask)
    assert bool(gradient.isfinite().all())
    assert bool((gradient != 0).any())


@pytest.mark.parametrize("scale", [None, -0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_code(masked: bool, scale: float | None) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 192, 192, 64))
    mask = torch.ones(192, 192, dtype=torch.bool, device=DEVICE).tril() if masked else None
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v, mask, False, scale)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    a, b, c = inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = exact(a, b, c, mask, False, scale)
    wanted = torch.autograd.grad(expected.sum(), inputs)
    for x, y in zip((out, *grads), (expected, *wanted), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05 * float(y.abs().max()))


@pytest.mark.parametrize("way", ["torch", "drop-in"])
def test_repeated_queries_beside_values_of_other_columns(way: str) -> None:
    q = torch.randn(1, 2, 3, 64, dtype=torch.bfloat16, device=DEVICE).expand(2, 2, 3, 64)
    k = torch.randn(2, 2, 128, 64, dtype=torch.bfloat16, device=DEVICE)
    v = torch.randn(2, 2, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    mask = torch.ones(2, 2, 3, 128, dtype=torch.bool, device=DEVICE)
    assert_right(way, q, k, v, mask)
