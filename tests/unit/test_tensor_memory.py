"""Tensors whose memory does not hold their values: lazy ones are resolved, freed ones refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import sim


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded() -> dict[str, Any]:
    q, k, v = rand(2, 2, 5, 16), rand(2, 2, 9, 16), rand(2, 2, 9, 16)
    return {"q": q, "k": k, "v": v, "q_offset": ends(3, 4), "sinks": rand(2), "causal": True}


def packed() -> dict[str, Any]:
    call: dict[str, Any] = {"q": rand(7, 2, 16), "k": rand(9, 2, 16), "v": rand(9, 2, 16)}
    return call | {"cu_seqlens_q": ends(0, 3, 7), "cu_seqlens_k": ends(0, 4, 9)}


def fp8() -> dict[str, Any]:
    call = {name: rand(1, 2, 9, 16).to(torch.float8_e4m3fn) for name in "qkv"}
    return call | {f"{name}_descale": torch.tensor([0.5, 2.0]) for name in "qkv"}


def masked() -> dict[str, Any]:
    call = padded()
    return {name: call[name] for name in "qkv"} | {"attn_mask": rand(5, 9)}


# (makes a call, the name of one of its tensors, the implementation). None stands for PyTorch.
PLACES = [
    *[(padded, name, kernel) for name in ("q", "k", "v", "q_offset", "sinks")
      for kernel in (None, "simt")],
    *[(packed, name, kernel) for name in ("q", "cu_seqlens_q", "cu_seqlens_k")
      for kernel in (None, "simt")],
    *[(fp8, f"{name}_descale", None) for name in "qkv"],
    (masked, "attn_mask", None),
]  # fmt: skip
every_place = pytest.mark.parametrize(
    ("make", "name", "kernel"), PLACES, ids=lambda x: getattr(x, "__name__", str(x))
)


@pytest.fixture(params=[True, False], ids=["table", "attributes"], autouse=True)
def _both_ways_to_read_a_tensor(request: pytest.FixtureRequest) -> Iterator[None]:
    native.use_exchange_table(request.param)
    yield
    native.use_exchange_table(True)


def test_gradients_of_tensors_that_differ_in_shape() -> None:
    q, k, v = (x.requires_grad_() for x in (rand(1, 4, 5, 16), rand(1, 1, 7, 16), rand(1, 1, 7, 8)))
    found = torch.autograd.grad(
        archflash.attention(q, k, v, implementation="simt").sum(), (q, k, v)
    )
    wanted = torch.autograd.grad(archflash.attention(q, k, v).sum(), (q, k, v))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def negative_view(x: Tensor) -> Tensor:
    """A view with the values of x: its memory has -x, and its negative bit is set."""
    return torch._neg_view(-x)


def imaginary(x: Tensor) -> Tensor:
    """The values of a float32 x as the imaginary part of a conjugate: a strided, negated view."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


@every_place
def test_a_tensor_with_the_negative_bit_is_read_as_its_values(
    make: Callable[[], dict[str, Any]], name: str, kernel: str | None
) -> None:
    call = make()
    expected = archflash.attention(**call, implementation=kernel)
    for lazy in (negative_view, imaginary):
        if lazy is imaginary and name not in ("q", "k", "v", "attn_mask"):
            continue  # integers have no imaginary part, and the others must be contiguous
        given = lazy(call[name])
        assert given.is_neg()
        out = archflash.attention(**call | {name: given}, implementation=kernel)
        assert torch.equal(out, expected)


@every_place
def test_a_zero_tensor_is_read_as_zeros(
    make: Callable[[], dict[str, Any]], name: str, kernel: str | None
) -> None:
    call = make()
    if name == "cu_seqlens_q":  # all sequences become empty, so that q may have no rows
        call = {key: x[:0] if key == "q" else x for key, x in call.items()}
    zeros = torch.zeros_like(call[name])
    expected = archflash.attention(**call | {name: zeros}, implementation=kernel)
    lazy = torch._efficientzerotensor(zeros.shape, dtype=zeros.dtype)
    out = archflash.attention(**call | {name: lazy}, implementation=kernel)
    assert torch.equal(out, expected)


def test_gradients_pass_through_a_negative_view() -> None:
    call = padded()
    expected = call["q"].clone().requires_grad_()
    archflash.attention(**call | {"q": expected}).sum().backward()
    q = call["q"].clone().requires_grad_()
    archflash.attention(**call | {"q": torch._neg_view(-q)}).sum().backward()
    assert q.grad is not None
    assert expected.grad is not None
    torch.testing.assert_close(q.grad, expected.grad)


def test_the_operator_reads_a_negative_view_as_its_values() -> None:
    q, k, v = (padded()[name] for name in "qkv")

    def operator(q: Tensor) -> Any:
        attention = torch.ops.archflash.attention
        options = {argument.name: None for argument in attention.default._schema.arguments[3:]}
        options |= {"causal": False, "layout": "bhnd", "implementation": "simt"}
        return attention(q, k, v, **options | {"return_lse": False, "needs_grad": False})[0]

    assert torch.equal(operator(negative_view(q)), operator(q))


@pytest.mark.parametrize("kernel", ["simt", "torch", None])
def test_a_lazy_output_is_refused(kernel: str | None) -> None:
    call = padded()
    for out in (torch._neg_view(call["q"]), torch._efficientzerotensor(call["q"].shape)):
        with pytest.raises(ValueError, match="out has the negative bit or is a zero tensor"):
            archflash.attention(**call | {"out": out}, implementation=kernel)


def test_a_plan_refuses_lazy_tensors() -> None:
    call = {name: padded()[name] for name in "qkv"}
    plan = archflash.explain(**call, device="A100", implementation="simt").plan
    lazy = call | {"k": torch._neg_view(call["k"])}
    with pytest.raises(ValueError, match=r"k has the negative bit.*pass a clone"):
        sim.run(**lazy, implementation="simt", plan=plan)
    with pytest.raises(ValueError, match=r"k has the negative bit.*pass a clone"):
        native.launch(plan, {"k": lazy["k"]})


@pytest.mark.parametrize("implementation", ["torch", "ada"])
def test_quantize_reads_lazy_tensors_as_their_values(implementation: str) -> None:
    x = rand(1, 2, 9, 16)
    for lazy, value in ((negative_view(x), x), (torch._efficientzerotensor(x.shape), x * 0)):
        got = archflash.quantize_fp8(lazy, implementation=implementation)
        expected = archflash.quantize_fp8(value, implementation=implementation)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.float(), b.float())


# --- freed and shrunk storages ---


def freed(x: Tensor, offset: int) -> Tensor:
    """A tensor like x that starts at `offset` elements of a storage that was freed."""
    held = torch.empty(offset + x.numel(), dtype=x.dtype)
    view = held[offset:].view(x.shape)
    held.untyped_storage().resize_(0)
    return view


@every_place
@pytest.mark.parametrize("offset", [0, 16])
def test_a_tensor_without_data_is_refused_by_name(
    make: Callable[[], dict[str, Any]], name: str, kernel: str | None, offset: int
) -> None:
    call = make()
    with pytest.raises(ValueError, match=rf"^{name} has shape .* but no data: its storage is empt"):
        archflash.attention(**call | {name: freed(call[name], offset)}, implementation=kernel)


@pytest.mark.parametrize("kernel", ["simt", "torch", None])
def test_an_output_without_data_is_refused(kernel: str | None) -> None:
    call = padded()
    with pytest.raises(ValueError, match=r"out has shape .* but no data"):
        archflash.attention(**call, out=freed(call["q"], 0), implementation=kernel)


def test_a_plan_and_quantize_refuse_tensors_without_data() -> None:
    call = {name: padded()[name] for name in "qkv"}
    plan = archflash.explain(**call, device="A100", implementation="simt").plan
    call["v"] = freed(call["v"], 8)
    with pytest.raises(ValueError, match=r"v has shape .* but no data"):
        sim.run(**call, implementation="simt", plan=plan)
    with pytest.raises(ValueError, match=r"v has shape .* but no data"):
        native.launch(plan, {"v": call["v"]})
    with pytest.raises(ValueError, match=r"x has shape .* but no data"):
        archflash.quantize_fp8(call["v"])


def test_a_tensor_without_elements_needs_no_data() -> None:
    q, empty = rand(1, 2, 3, 16), torch.empty(1, 2, 0, 16)
    assert empty.data_ptr() == 0
    for kernel in ("simt", None):
        out = archflash.attention(q, empty, empty, implementation=kernel)
        assert torch.equal(out, torch.zeros_like(q))


def test_the_simulator_refuses_a_tensor_that_reaches_beyond_its_storage() -> None:
    call = padded()
    call["k"] = call["k"].clone()
    call["k"].untyped_storage().resize_(100)
    with pytest.raises(archflash.LaunchError, match="k reaches byte 2304 of a storage of 100"):
        archflash.attention(**call, implementation="simt")
