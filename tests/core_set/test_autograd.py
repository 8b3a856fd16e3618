"""Calls that autograd differentiates, through a forced kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import archflash
from archflash import reference

from .executors import executor
from .gradients import dtypes_with_gradients, kernels_with_gradients

on = executor()
KERNELS = kernels_with_gradients(on)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
pytestmark = pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")


def leaves(kernel: str) -> dict[str, Tensor]:
    """q, k, v and sinks of a call with two query heads on one of keys."""
    dtype = dtypes_with_gradients(on, kernel)[0]
    q, k, v = on.qkv(6, 9, 32, dtype=dtype, heads=(2, 1))
    found = {"q": q, "k": k, "v": v, "sinks": on.rand(2, seed=8, dtype=dtype)}
    return {name: x.requires_grad_() for name, x in found.items()}


def loss_of(kernel: str) -> Callable[..., Tensor]:
    """A loss of the output and of the log-sum-exp."""

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = archflash.attention(
            q, k, v, sinks=sinks, causal=True, return_lse=True, implementation=kernel
        )
        return (out.float() * weight(out.shape)).sum() + (lse * weight(lse.shape)).sum()

    return loss


def weight(shape: Any) -> Tensor:
    """Numbers of both signs; torch.compile traces no generator."""
    count = math.prod(shape)
    return torch.sin(torch.arange(count, device=on.device) * 3.7).reshape(shape)


def expected(given: dict[str, Tensor]) -> tuple[reference.Gradients, reference.Gradients]:
    q, k, v, sinks = (x.detach() for x in given.values())
    dout, dlse = weight(q.shape).to(q.dtype), weight(q.shape[:-1])
    call = {"dlse": dlse, "sinks": sinks, "causal": True}
    return (
        reference.attention_backward(dout, q, k, v, **call),
        reference.baseline_backward(dout, q, k, v, **call),
    )


def check(found: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    exact, rounded = expected(given)
    for name, x in found.items():
        assert x.dtype == given[name].dtype
        report = reference.check(
            x, getattr(exact, f"d{name}"), getattr(rounded, f"d{name}").double()
        )
        assert report.ok, f"{name}: {report}"


def through_autograd(loss: Callable[..., Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss(*given.values()), list(given.values()))
    return dict(zip(given, found, strict=True))


@each_kernel
def test_autograd_differentiates_by_q_k_v_sinks_and_through_the_log_sum_exp(kernel: str) -> None:
    given = leaves(kernel)
    check(through_autograd(loss_of(kernel), given), given)


@each_kernel
def test_checkpointed_calls_have_the_same_gradients(kernel: str) -> None:
    given = leaves(kernel)
    plain = through_autograd(loss_of(kernel), given)

    def recomputed(*inputs: Tensor) -> Tensor:
        result: Tensor = checkpoint(loss_of(kernel), *inputs, use_reentrant=False)
        return result

    for name, x in through_autograd(recomputed, given).items():
        assert torch.equal(x, plain[name])


@each_kernel
def test_torch_compile_takes_a_call_and_its_gradients_whole(kernel: str) -> None:
    given = leaves(kernel)
    plain = through_autograd(loss_of(kernel), given)
    torch._dynamo.reset()
    traced = torch.compile(loss_of(kernel), backend="aot_eager", fullgraph=True)
    for name, x in through_autograd(traced, given).items():
        torch.testing.assert_close(x, plain[name])


@each_kernel
def test_only_some_inputs_need_gradients_and_the_output_is_an_expanded_sum(kernel: str) -> None:
    """The gradient of a sum is one number that all elements share: it has no rows to read."""
    given = leaves(kernel)
    q, k, v = (given[name].detach() for name in "qkv")
    k.requires_grad_()
    out = archflash.attention(q, k, v, implementation=kernel)
    out.sum().backward()
    ones = torch.ones_like(out)
    exact = reference.attention_backward(ones, q, k.detach(), v)
    rounded = reference.baseline_backward(ones, q, k, v)
    assert k.grad is not None
    report = reference.check(k.grad, exact.dk, rounded.dk.double())
    assert report.ok, report


@each_kernel
def test_gradients_of_gradients_are_those_of_the_formula(kernel: str) -> None:
    given = leaves(kernel)
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}

    def second(kernel: str, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        loss = loss_of(kernel)(*leaves.values())
        (dq,) = torch.autograd.grad(loss, leaves["q"], create_graph=True)
        return torch.autograd.grad(dq.double().square().sum(), list(leaves.values()))

    tolerance = 1e-4 if given["q"].dtype == torch.float32 else 5e-2
    for one, other in zip(second(kernel, given), second("torch", exact), strict=True):
        error = (one.double() - other).abs().max()
        assert error <= tolerance * max(1.0, float(other.abs().max())), float(error)


@each_kernel
def test_the_function_gives_what_autograd_gives(kernel: str) -> None:
    given = leaves(kernel)
    plain = through_autograd(loss_of(kernel), given)
    q, k, v, sinks = (x.detach() for x in given.values())
    call: dict[str, Any] = {"sinks": sinks, "causal": True, "implementation": kernel}
    out, lse = archflash.attention(q, k, v, return_lse=True, **call)
    dout, dlse = weight(out.shape).to(out.dtype), weight(lse.shape)
    dq, dk, dv, dsinks = archflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **call)
    for name, x in zip("qkv", (dq, dk, dv), strict=True):
        assert torch.equal(x, plain[name])
    assert torch.equal(dsinks.to(sinks.dtype), plain["sinks"])


@each_kernel
@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "packed"])
def test_an_output_that_is_summed_over_its_rows(kernel: str, layout: str) -> None:
    """As models that pool do: the gradient of the output repeats one row in memory."""
    dtype = dtypes_with_gradients(on, kernel)[0]
    options: dict[str, Any] = {"implementation": kernel}
    if layout == "packed":
        q, k, v = (on.rand(14, 2, 32, seed=seed, dtype=dtype) for seed in range(3))
        ends = on.cu_seqlens((5, 9))
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    else:
        q, k, v = on.qkv(6, 9, 32, dtype=dtype, heads=(2, 1))
        options["layout"] = layout
        if layout == "bnhd":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = archflash.attention(*inputs, **options)
    pooled = out.sum({"packed": 0, "bnhd": 1, "bhnd": 2}[layout])
    dpooled = weight(pooled.shape).to(pooled.dtype)
    found = torch.autograd.grad(pooled, inputs, dpooled, retain_graph=True)
    dim = {"packed": 0, "bnhd": 1, "bhnd": 2}[layout]
    dout = dpooled.unsqueeze(dim).expand_as(out).contiguous()
    wanted = torch.autograd.grad(out, inputs, dout)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-2, rtol=1e-2)


@each_kernel
def test_no_batches_with_sinks_and_an_expanded_gradient(kernel: str) -> None:
    dtype = dtypes_with_gradients(on, kernel)[0]
    q, k, v = (x[:0].requires_grad_() for x in on.qkv(6, 9, 32, dtype=dtype, heads=(2, 1)))
    sinks = on.rand(2, seed=8, dtype=dtype).requires_grad_()
    archflash.attention(q, k, v, sinks=sinks, implementation=kernel).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.tolist() == [0.0, 0.0]


@each_kernel
def test_a_window_that_its_owner_changes_before_the_backward_pass(kernel: str) -> None:
    given = leaves(kernel)
    q, k, v = (given[name] for name in "qkv")
    window = [1, 0]
    out = archflash.attention(q, k, v, window=window, implementation=kernel)
    window[0] = 5
    dout = weight(out.shape).to(out.dtype)
    found = torch.autograd.grad(out, (q, k, v), dout)
    again = archflash.attention(q, k, v, window=(1, 0), implementation=kernel)
    for mine, right in zip(found, torch.autograd.grad(again, (q, k, v), dout), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-3, rtol=1e-3)
