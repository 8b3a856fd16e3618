"""The ways of a call beside the plain eager one: modes, subclasses, transforms, compile, out=."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.wrapped_cases import Wrapper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import archflash
from archflash import _archflash as _native
from archflash import _dispatch, _key_lists


class Watch(TorchDispatchMode):
    """Lets everything through: calls go by the operator instead of straight to the runtime."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def qkv(requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=requires_grad) for n in (5, 7, 7))
    return q, k, v


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "window-of-three": ({"window": (1, 2, 3)}, TypeError, "window"),
    "layout": ({"layout": "xyz"}, ValueError, "layout"),
    "nan-scale": ({"scale": float("nan")}, ValueError, "scale"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap"),
    "causal": ({"causal": 1}, TypeError, "causal"),
    "cu-seqlens": ({"cu_seqlens_q": torch.tensor([0, 5])}, ValueError, "cu_seqlens_k"),
    "descale": ({"q_descale": torch.ones(())}, ValueError, "q_descale"),
    "out-dtype": ({"out_dtype": torch.int32}, TypeError, "out_dtype"),
    "out": ({"out": torch.empty(2, 4, 5, 8, dtype=torch.float16)}, TypeError, "out"),
    "out-shape": ({"out": torch.empty(6, 4, 5, 8)}, ValueError, "out"),
    "max-seqlen": ({"max_seqlen_q": 4}, ValueError, "max_seqlen"),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_under_a_mode_too(name: str, requires_grad: bool) -> None:
    options, error, word = WRONG[name]
    q, k, v = qkv(requires_grad)
    with Watch(), pytest.raises(error, match=word):
        archflash.attention(q, k, v, **options)


def test_an_unknown_name_is_refused_after_torch_was_forced() -> None:
    q, k, v = qkv()
    archflash.attention(q, k, v, implementation="torch")
    for name in ("typo", "", 0):
        with pytest.raises(archflash.ForcedImplementationError, match="no implementation"):
            archflash.attention(q, k, v, implementation=name)


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager")


@pytest.mark.parametrize("way", ["mode", "compile", "functorch"])
def test_a_forced_kernel_refuses_gradients_on_every_way(way: str) -> None:
    q, k, v = qkv(requires_grad=True)

    def call() -> None:
        if way == "mode":
            with Watch():
                archflash.attention(q, k, v)
        elif way == "compile":
            compiled(lambda *x: archflash.attention(*x))(q, k, v)
        else:
            torch.func.grad(lambda x: archflash.attention(x, k, v).sum())(q.detach())

    with archflash.force("hopper"), pytest.raises(Exception, match="hopper is forced"):
        call()


def test_a_gradient_of_the_sinks_alone_is_not_lost() -> None:
    q, k, v = qkv()
    sinks = torch.zeros(4, requires_grad=True)
    decision = archflash.explain(q, k, v, sinks=sinks, device="H200")
    assert decision.problem.needs_grad
    assert "it has a backward pass" in decision.why
    archflash.attention(q, k, v, sinks=sinks).sum().backward()
    expected = sinks.grad
    sinks.grad = None
    with Watch():
        archflash.attention(q, k, v, sinks=sinks).sum().backward()
    assert expected is not None
    assert expected.abs().max() > 0
    torch.testing.assert_close(sinks.grad, expected)


def test_transforms_go_through_pytorch() -> None:
    q, k, v = qkv()
    torch.testing.assert_close(
        torch.vmap(lambda *x: archflash.attention(*(y[None] for y in x), causal=True)[0])(q, k, v),
        archflash.attention(q, k, v, causal=True),
    )

    def loss(attend: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: attend(x, k, v).square().sum()

    torch.testing.assert_close(
        torch.func.grad(loss(archflash.attention))(q),
        torch.func.grad(loss(F.scaled_dot_product_attention))(q),
    )


def test_a_wrapped_tensor_anywhere_in_the_call_goes_to_its_dispatcher() -> None:
    q, k, v = qkv()
    sinks = torch.randn(4)
    expected = archflash.attention(q, k, v, sinks=sinks)
    torch.testing.assert_close(archflash.attention(q, k, v, sinks=Wrapper(sinks)), expected)
    torch.testing.assert_close(archflash.attention(Wrapper(q), k, v, sinks=sinks), expected)


class Plain(Tensor):
    """A subclass that changes nothing."""


def test_a_plain_subclass_is_served() -> None:
    q, k, v = qkv()
    mask = torch.ones(5, 7, dtype=torch.bool).as_subclass(Plain)
    out = archflash.attention(q.as_subclass(Plain), k, v, attn_mask=mask)
    torch.testing.assert_close(out.as_subclass(Tensor), archflash.attention(q, k, v))


@pytest.fixture
def _a_plan_that_launches_nothing() -> Iterator[None]:
    empty = torch.empty(1, 1, 0, 8, device="meta")
    plan = archflash.explain(empty, empty, empty, device="H200").plan
    _native.set_decide(lambda problem, index, name: plan)
    _native.clear_cache()
    yield
    _native.set_decide(_dispatch.decide)
    _native.clear_cache()


@pytest.mark.usefixtures("_a_plan_that_launches_nothing")
def test_autograd_notices_that_a_kernel_wrote_out() -> None:
    q, k, v = qkv()
    out = torch.ones(2, 4, 5, 8)
    weight = torch.ones(2, 4, 5, 8, requires_grad=True)
    product = (weight * out).sum()
    try:
        archflash.attention(q, k, v, out=out)
    except RuntimeError:
        pytest.skip("a build of torch without CUDA has no stream to ask for")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"out": torch.empty(2, 4, 5, 8).requires_grad_()}, ValueError, "requires a gradient"),
        ({"out": torch.empty(999).as_strided((2, 4, 5, 8), (32, 8, 8, 1))}, ValueError, "overlap"),
        ({"scale": torch.tensor(0.5)}, TypeError, "scale is a torch.Tensor"),
        ({"scale": True}, TypeError, "scale is True"),
        ({"window": (True, None)}, TypeError, "window left is True"),
        ({"q_offset": True}, TypeError, "q_offset is True"),
        ({"q_offset": 2**61}, ValueError, "2\\^60"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_more_wrong_calls(options: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        archflash.attention(*qkv(), **options)


def test_nested_and_sparse_tensors_are_refused_with_a_sentence() -> None:
    _, k, v = qkv()
    nested = torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 5, 8)])
    for wrong in (nested, torch.eye(4).to_sparse()):
        with pytest.raises(TypeError, match="nested or sparse"):
            archflash.attention(wrong, k, v)


def test_sdpa_follows_autocast() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.scaled_dot_product_attention(q, k, v.bfloat16())
        ours = archflash.scaled_dot_product_attention(q, k, v.bfloat16())
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)


def test_warnings_come_once_per_kind_of_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch.explain, "_noted", set())
    with pytest.warns(UserWarning, match="stride of 20 bytes"):
        _dispatch.note_fallback("simt: q has a row stride of 20 bytes")
    _dispatch.note_fallback("simt: q has a row stride of 24 bytes")
    with pytest.warns(UserWarning, match="gradient"):
        _dispatch.note_fallback("simt: no backward, a gradient is needed")


@pytest.mark.parametrize("value", ["Error", "1", "raise"])
def test_unknown_values_of_variables_are_told(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", value)
    with pytest.raises(ValueError, match=rf"ARCHFLASH_FALLBACK is '{value}': it must be 'error'"):
        _dispatch.note_fallback("simt: q has a row stride of 28 bytes")
    assert [_key_lists._asks_for_checks(x) for x in ("", "0", "1")] == [False, False, True]
    with pytest.raises(ValueError, match=r"ARCHFLASH_CHECK is 'true': it must be 1"):
        _key_lists._asks_for_checks("true")
