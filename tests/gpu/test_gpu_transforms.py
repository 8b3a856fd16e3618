"""Tracing, transforms and derivatives of calls on a GPU, where kernels serve them or PyTorch's."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import archflash

from .gpu_cases import int32, kernel_dtypes, kernels, qkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:archflash. PyTorch serves this call"),
]
BF16 = torch.bfloat16
FUSED = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
)  # fmt: skip


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_the_formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    if causal:
        nq, nk = weights.shape[-2:]
        weights = weights * torch.ones(nq, nk, device="cuda").tril(nk - nq)
    return weights / weights.sum(-1, keepdim=True) @ v


def assert_near(found: Any, expected: Any, dtype: torch.dtype) -> None:
    """Whether numbers are near those of float64, by the largest of them."""
    if not isinstance(found, Tensor):
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, dtype)
        return
    tolerance = {torch.float32: 2e-4, torch.float16: 1e-2, BF16: 5e-2}[dtype]
    found, expected = found.detach(), expected.detach()
    assert found.isfinite().all()
    error, largest = float((found.double() - expected).abs().max()), float(expected.abs().max())
    assert error <= tolerance * max(1.0, largest), error


def saved_and_loaded(traced: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kernel", [None, *kernels()])
def test_a_traced_call_is_right_for_other_values_and_sizes(
    kernel: str | None, causal: bool
) -> None:
    dtype = next((d for name, d in kernel_dtypes() if name == kernel), BF16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, causal=causal, implementation=kernel) + 1

    traced = torch.jit.trace(call, qkv(65, 129, dtype=dtype), check_trace=False)
    given = qkv(300, 257, dtype=dtype, batch=3)
    for module in (traced, saved_and_loaded(traced)):
        assert torch.equal(module(*given), call(*given))


def test_a_traced_call_on_a_cache_appends_to_the_one_that_it_gets() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, new: Tensor) -> Any:
        return archflash.attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, k_new=new, v_new=new, causal=True
        )

    def given(batch: int, n: int, capacity: int, *lengths: int) -> list[Tensor]:
        rows = [rand(batch, capacity, 2, 64) for _ in "kv"]
        return [rand(batch, n, 4, 64), *rows, int32(*lengths), rand(batch, n, 2, 64)]

    traced = torch.jit.trace(call, tuple(given(2, 1, 64, 3, 9)), check_trace=False)
    one = given(3, 2, 256, 100, 7, 254)
    other = [x.clone() for x in one]
    assert torch.equal(traced(*one), call(*other))
    assert all(map(torch.equal, one, other))


def test_pytorchs_own_attention_is_traced_while_archflash_is_enabled() -> None:
    def call(q: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q, longer = rand(1, 2, 64, 64), rand(2, 2, 256, 64)
    with archflash.enabled():
        traced = torch.jit.trace(call, (q,), check_trace=False)
        found = traced(longer)
    assert_near(found, by_the_formula(*(longer.double(),) * 3, causal=True), BF16)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, *x: grad(f, argnums=(0, 1, 2))(*x),
    "grad of grad": lambda f, *x: grad(lambda *y: grad(f)(*y).square().sum(), argnums=1)(*x),
    "jvp": lambda f, *x: jvp(f, x, x[1:] + x[:1] if x[0].shape == x[1].shape else x)[1],
    "jvp of grad": lambda f, *x: jvp(grad(f), x, x)[1],
    "hessian": lambda f, q, k, v: hessian(f)(q[:1, :2, :3, :4], k[:1, :2, :3, :4], v[:1, :2]),
    "per sample": lambda f, *x: vmap(grad(lambda *y: f(*(z[None] for z in y)), argnums=(0, 1, 2)))(
        *x
    ),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", ["alone", "enabled"])
def test_transforms(way: str, transform: str, dtype: torch.dtype, causal: bool) -> None:
    x = tuple(rand(2, 2, 33, 64, dtype=dtype) for _ in "qkv")
    if transform == "hessian":
        x = (*x[:2], x[2][:, :, :3])

    def loss(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *y: attend(*y, causal=causal).double().square().sum()

    with archflash.enabled() if way == "enabled" else contextlib.nullcontext():
        found = TRANSFORMS[transform](loss(archflash.attention), *x)
    expected = TRANSFORMS[transform](loss(by_the_formula), *(y.double() for y in x))
    assert_near(found, expected, dtype)


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "bool": lambda: {"attn_mask": torch.ones(33, 33, device="cuda").tril(3) > 0},
    "added": lambda: {"attn_mask": torch.randn(2, 1, 33, 33, device="cuda")},
    "window": lambda: {"window": (5, 0)},
    "lists": lambda: {"key_indices": torch.arange(9, device="cuda").int().expand(1, 1, 33, 9)},
}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_vmap_over_one_tensor_of_a_call_with_a_mask(
    name: str, dtype: torch.dtype, which: int
) -> None:
    given, call = [rand(2, 2, 33, 64, dtype=dtype) for _ in "qkv"], MASKS[name]()
    many = rand(3, 2, 2, 33, 64, dtype=dtype)

    def loss(x: Tensor) -> Tensor:
        y = [x if i == which else y for i, y in enumerate(given)]
        return archflash.attention(*y, **call).float().square().sum()  # type: ignore[union-attr]

    for transform in (lambda f: f, grad):
        found = vmap(transform(loss))(many)
        expected = torch.stack([transform(loss)(x) for x in many])
        assert_near(found, expected.double(), dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("transform", ["grad", "per sample"])
def test_transforms_of_pytorchs_own_attention_while_enabled(transform: str, causal: bool) -> None:
    x = tuple(rand(2, 2, 64, 64) for _ in "qkv")

    def loss(*y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*y, is_causal=causal).double().square().sum()

    def formula(*y: Tensor) -> Tensor:
        return by_the_formula(*y, causal=causal).square().sum()

    with archflash.enabled():
        found = TRANSFORMS[transform](loss, *x)
    assert_near(found, TRANSFORMS[transform](formula, *(y.double() for y in x)), BF16)


@pytest.mark.parametrize("backend", [*FUSED, SDPBackend.MATH], ids=lambda x: x.name)
def test_forward_mode_of_pytorchs_own_attention_is_what_pytorch_does_alone(
    backend: SDPBackend,
) -> None:
    q, k, v = (rand(1, 2, 64, 64) for _ in "qkv")

    def tangent() -> Any:
        with forward_ad.dual_level(), sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(forward_ad.make_dual(q, q * q), k, v)
            return forward_ad.unpack_dual(out).tangent

    def outcome() -> Any:
        try:
            return tangent()
        except (RuntimeError, NotImplementedError) as error:
            return type(error)

    alone = outcome()
    with archflash.enabled():
        enabled = outcome()
    if isinstance(alone, Tensor):
        assert torch.equal(enabled, alone)
    else:
        assert enabled is alone


@pytest.mark.parametrize("d", [64, 20], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", FUSED, ids=lambda x: x.name)
def test_gradients_of_gradients_where_pytorchs_fused_kernels_serve(
    backend: SDPBackend, causal: bool, d: int
) -> None:
    if backend != SDPBackend.FLASH_ATTENTION and d % 8:
        pytest.skip("PyTorch pads columns for its flash kernel only")
    x = [rand(1, 2, 64, d) for _ in "qkv"]

    def second(attend: Callable[..., Tensor], leaves: list[Tensor], **call: Any) -> Any:
        out = attend(*leaves, causal=causal, **call)
        first = torch.autograd.grad(out.double().sin().sum(), leaves, create_graph=True)
        return first, torch.autograd.grad(sum(y.double().square().sum() for y in first), leaves)

    with sdpa_kernel(backend):
        found = second(
            archflash.attention, [y.clone().requires_grad_() for y in x], implementation="torch"
        )
    expected = second(by_the_formula, [y.double().requires_grad_() for y in x])
    assert_near(found, expected, BF16)


@pytest.mark.parametrize("backend", FUSED[1:], ids=lambda x: x.name)
def test_gradients_of_gradients_by_a_mask(backend: SDPBackend) -> None:
    q, k, v = (rand(1, 2, 64, 64).requires_grad_() for _ in "qkv")
    bias = rand(1, 2, 64, 64)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel([backend, SDPBackend.MATH]):
        out = archflash.attention(q, k, v, attn_mask=bias, implementation="torch")
        (first,) = torch.autograd.grad(out.double().sin().sum(), q, create_graph=True)
        found = torch.autograd.grad(first.double().square().sum(), (q, k, v))
    scores = (exact[0] @ exact[1].mT / 8 + bias.double()).softmax(-1)
    (first,) = torch.autograd.grad((scores @ exact[2]).sin().sum(), exact[0], create_graph=True)
    assert_near(found, torch.autograd.grad(first.square().sum(), exact), BF16)


@pytest.mark.parametrize(
    "kernel", [None, *(x for x in kernels() if x in ("ampere", "hopper", "simt"))]
)
def test_gradients_of_gradients_through_kernels(kernel: str | None) -> None:
    dtype = torch.float32 if kernel == "simt" else BF16
    x = [rand(1, 2, 65, 64, dtype=dtype) for _ in "qkv"]

    def second(attend: Callable[..., Tensor], leaves: list[Tensor], **call: Any) -> Any:
        out = attend(*leaves, causal=True, **call)
        first = torch.autograd.grad(out.double().sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(y.double().square().sum() for y in first), leaves)

    found = second(
        archflash.attention, [y.clone().requires_grad_() for y in x], implementation=kernel
    )
    assert_near(found, second(by_the_formula, [y.double().requires_grad_() for y in x]), dtype)


def test_vmap_over_what_kernels_read_beside_the_inputs() -> None:
    """A tensor inside of vmap has no address that a kernel could read."""
    q, k, v = (rand(1, 4, 64, 64) for _ in "qkv")
    sinks = torch.randn(3, 4, device="cuda")
    found = vmap(lambda x: archflash.attention(q, k, v, sinks=x))(sinks)
    each = torch.stack([archflash.attention(q, k, v, sinks=x) for x in sinks])
    torch.testing.assert_close(found, each, atol=2e-2, rtol=2e-2)


def test_merging_and_quantising_inside_of_vmap() -> None:
    outs, lses = rand(3, 2, 1, 4, 64, 64), rand(3, 2, 1, 4, 64, dtype=torch.float32)
    found = vmap(archflash.merge_attention)(outs, lses)
    each = [archflash.merge_attention(*x) for x in zip(outs, lses, strict=True)]
    for one, other in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(other), atol=1e-2, rtol=1e-2)
    values, descale = vmap(lambda x: archflash.quantize_fp8(x, per="head"))(outs[:, 0])
    for i in range(3):
        one, its = archflash.quantize_fp8(outs[i, 0], per="head")
        assert torch.equal(values[i].float(), one.float())
        assert torch.equal(descale[i], its)


@pytest.mark.parametrize("backend", FUSED, ids=lambda x: x.name)
def test_operations_are_counted_as_pytorch_counts_its_own(backend: SDPBackend) -> None:
    leaves = [rand(2, 4, 128, 64).requires_grad_() for _ in "qkv"]

    def count(attend: Callable[..., Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(attend(*leaves).sum(), leaves)
        return int(counter.get_total_flops())

    with sdpa_kernel(backend):
        expected = count(F.scaled_dot_product_attention)
        assert expected > 0
        with archflash.enabled():
            assert count(F.scaled_dot_product_attention) == expected
    for kernel in (None, *(x for x in kernels() if x in ("ampere", "hopper"))):
        assert count(lambda *x, n=kernel: archflash.attention(*x, implementation=n)) == expected
