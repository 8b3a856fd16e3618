"""Tensors that are not plain ones on a GPU: no kernel gets a null address."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import archflash
from archflash import _archflash as _native

from ..wrapped_cases import CALLS, Wrapper, assert_same

pytestmark = pytest.mark.gpu


def on_gpu(x: Any) -> Any:
    return x.cuda() if isinstance(x, Tensor) else x


def given_on_gpu(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    call, given, named = CALLS[name]
    return call, tuple(map(on_gpu, given)), {n: on_gpu(x) for n, x in named.items()}


def wrapped(x: Any) -> Any:
    return Wrapper(x.clone()) if isinstance(x, Tensor) else x


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_wrappers_and_a_compiled_one(name: str) -> None:
    call, given, named = given_on_gpu(name)

    def copies() -> tuple[tuple[Any, ...], dict[str, Any]]:
        copied = [x.clone() if isinstance(x, Tensor) else x for x in (*given, *named.values())]
        return tuple(copied[: len(given)]), dict(zip(named, copied[len(given) :], strict=True))

    args, kwargs = copies()
    expected = call(*args, **kwargs)
    found = call(*map(wrapped, given), **{n: wrapped(x) for n, x in named.items()})
    found = [
        x.inner if isinstance(x, Wrapper) else x for x in torch.utils._pytree.tree_leaves(found)
    ]
    assert_same(found, expected)
    torch._dynamo.reset()
    args, kwargs = copies()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(compiled(*args, **kwargs), expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_launch_nothing(name: str) -> None:
    call, given, named = CALLS[name]
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            if isinstance(x, Tensor)
            else x
            for x in (*given, *named.values())
        ]
        call(*fakes[: len(given)], **dict(zip(named, fakes[len(given) :], strict=True)))
    torch.cuda.synchronize()
    assert float(torch.ones(8, device="cuda").sum()) == 8


@pytest.mark.parametrize("name", ["merge_attention", "quantize_fp8", "attention_backward"])
def test_the_runtime_refuses_each_operand_without_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: list[tuple[_native.LaunchPlan, dict[str, Tensor]]] = []
    launch = _native.launch
    monkeypatch.setattr(_native, "launch", lambda *given: (caught.append(given), launch(*given)))
    call, given, named = given_on_gpu(name)
    call(*given, **named)
    plan, tensors = caught[-1]
    for operand, x in tensors.items():
        with pytest.raises(ValueError, match=f"^{operand} is a tensor without memory"):
            launch(plan, tensors | {operand: Wrapper(x)})
    launch(plan, tensors)
    torch.cuda.synchronize()


def test_training_with_fake_tensors() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        out = archflash.attention(q, q, q, causal=True)
        assert isinstance(out, Tensor)
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    torch.cuda.synchronize()
