"""Calls whose node of autograd is in C++: their backward passes do without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import archflash
from archflash import _archflash as _native
from archflash import _autograd, _schemas

from .gpu_cases import int32, kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        _schemas.handle_functions() is None, reason="such nodes need torch 2.11 or newer"
    ),
]
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
NODE, PYTHON_NODE = "ScaledDotProductFlashAttentionForCpuBackward0", "ArchflashAttentionBackward"
BF16 = torch.bfloat16


def leaves(*shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for _ in "qkv"]


def name_of(out: Tensor) -> str:
    assert out.grad_fn is not None
    return out.grad_fn.name()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gradients that were asked of Python."""
    calls: list[Any] = []
    compute: Callable[..., Any] = _autograd._compute

    def noting(*given: Any) -> Any:
        calls.append(given)
        return compute(*given)

    monkeypatch.setattr(_autograd, "_compute", noting)
    _native.clear_cache()
    return calls


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": [8, 0], "softcap": 3.0}, {"scale": 0.3}, {"layout": "bnhd"}],
    ids=str,
)
@pytest.mark.parametrize("kernel", [x for x in kernels() if _native.has_backward(x)])
def test_gradients_are_those_of_the_function_and_python_is_asked_once_if_at_all(
    kernel: str, options: dict[str, Any], asked: list[Any]
) -> None:
    dtype = torch.float32 if kernel == "simt" else BF16
    q, k, v = leaves(2, 3, 65, 64, dtype=dtype)
    if options.get("layout") == "bnhd":
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    options = {**options, "implementation": kernel}
    with torch.no_grad():
        right, lse = archflash.attention(q, k, v, **options, return_lse=True)
        dout = torch.randn_like(right)
        expected = archflash.attention_backward(dout, q, k, v, right, lse, **options)
    transposed = dout.transpose(1, 2).contiguous().transpose(1, 2)
    # The forward pass expects a gradient that lies as its output does.
    for given, count in ((dout, 0), (transposed, 1)):
        for _ in range(3):
            out = archflash.attention(q, k, v, **options)
            assert name_of(out) == NODE
            assert torch.equal(out, right)
            found = torch.autograd.grad(out, (q, k, v), given)
            for one, other in zip(found, expected, strict=False):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()
        assert len(asked) == count


def test_calls_of_one_problem_with_dimensions_in_another_order_are_told_apart() -> None:
    q, k, v = leaves(1, 64, 64, 64)
    for layout in ("bhnd", "bnhd", "bhnd"):
        # Both layouts have equal addresses and strides, but their dimensions mean other things.
        given = [x if layout == "bhnd" else x.transpose(1, 2) for x in (q, k, v)]
        out = archflash.attention(*given, layout=layout, implementation="ampere")
        assert name_of(out) == NODE
        found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        if layout == "bhnd":
            expected = found
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def options_of(kind: str) -> dict[str, Any]:
    """Options with one tensor, of a call of two heads, 64 rows and 64 keys."""
    ends = int32(0, 20, 64)
    return {
        "bool mask": lambda: {"attn_mask": torch.rand(1, 2, 64, 64, device="cuda") > 0.2},
        "added mask": lambda: {"attn_mask": torch.randn(64, 64, device="cuda").to(BF16)},
        "packed": lambda: {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True},
        "sinks": lambda: {"sinks": torch.randn(2, device="cuda")},
        "slopes": lambda: {"alibi_slopes": torch.rand(2, device="cuda")},
        "ranges": lambda: {"key_ranges": int32([[[[[0, 20], [30, 50]]]]])},
        "lists": lambda: {
            "key_indices": torch.arange(64, device="cuda").int().reshape(1, 1, 1, 64)
        },
        "offsets": lambda: {"q_offset": int32([3]), "causal": True},
        "dropout": lambda: {"dropout_p": 0.3, "rng_state": archflash.dropout_state("cuda")},
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["bool mask", "added mask", "packed", "slopes", "sinks", "dropout"]
)
def test_a_node_keeps_one_more_tensor(kind: str, asked: list[Any]) -> None:
    q, k, v = leaves(64, 2, 64) if kind == "packed" else leaves(1, 2, 64, 64)
    for _ in range(3):
        options = options_of(kind)  # of new tensors, whose addresses a kept answer must not have
        with torch.no_grad():
            right, lse = archflash.attention(q, k, v, **options, return_lse=True)
            dout = torch.randn_like(right)
            expected = archflash.attention_backward(dout, q, k, v, right, lse, **options)
        out = archflash.attention(q, k, v, **options)
        assert name_of(out) == NODE
        assert torch.equal(out, right)
        for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=False):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
            assert one.stride() == other.stride()
    assert len(asked) <= 1


def test_other_calls_have_a_node_in_python() -> None:
    q, k, v = leaves(1, 2, 64, 64)
    ends = int32(0, 20, 64)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    mask, slopes = options_of("added mask"), options_of("slopes")
    results = [
        archflash.attention(q, k, v, return_lse=True)[0],
        archflash.attention(q, k, v, sinks=torch.zeros(2, device="cuda", requires_grad=True)),
        archflash.attention(q, k, v, **mask, **slopes),
        archflash.attention(q, k, v, attn_mask=mask["attn_mask"].clone().requires_grad_()),
        archflash.attention(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends.clone()),
        archflash.attention(q, k, v, **mask),
        archflash.attention(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends),
    ]
    assert [name_of(out) for out in results] == [PYTHON_NODE] * 5 + [NODE] * 2


def test_strides_of_the_gradient_and_moved_tensors_are_read() -> None:
    q, k, v = leaves(1, 2, 64, 64)
    dout = torch.randn(1, 64, 2, 64, device="cuda", dtype=BF16).transpose(1, 2)
    expected = torch.autograd.grad(archflash.attention(q, k, v), (q, k, v), dout.contiguous())

    def moved(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() == 4 else x.clone()

    with saved_tensors_hooks(lambda x: x, moved):
        out = archflash.attention(q, k, v)
    for one, other in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    ones = torch.autograd.grad(archflash.attention(q, k, v), q, torch.ones_like(q))
    assert torch.equal(torch.autograd.grad(archflash.attention(q, k, v).sum(), q)[0], ones[0])


def test_hooks_of_saved_tensors_may_make_calls() -> None:
    q, k, v = leaves(1, 2, 64, 64)
    expected = torch.autograd.grad(archflash.attention(q, k, v).float().sum(), (q, k, v))

    def pack(x: Tensor) -> Tensor:
        with torch.enable_grad(), saved_tensors_hooks(lambda y: y, lambda y: y):
            assert name_of(archflash.attention(v, q, k)) == NODE
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = archflash.attention(q, k, v)
    again = checkpoint(archflash.attention, q, k, v, use_reentrant=False)
    for result in (out, again):
        found = torch.autograd.grad(result.float().sum(), (q, k, v))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_a_changed_tensor_is_an_error() -> None:
    q, k, v = leaves(1, 2, 64, 64)
    out = archflash.attention(q, k, v)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


def test_a_dispatch_mode_sees_the_backward_pass() -> None:
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = leaves(1, 2, 64, 64)
    for _ in range(2):
        out = archflash.attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        out = archflash.attention(q, k, v)
        seen.clear()
        with Watching():
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert any(name.startswith("archflash.attention_backward") for name in seen)


def test_a_tangent_of_the_gradient_is_not_dropped() -> None:
    q, k, v = leaves(1, 2, 64, 64, dtype=torch.float32)
    out = archflash.attention(q, k, v)
    assert name_of(out) == NODE
    dout, tangent = torch.randn_like(out), torch.randn_like(out)
    expected = torch.autograd.grad(out, v, tangent, retain_graph=True)[0]
    with forward_ad.dual_level():
        (dv,) = torch.autograd.grad(out, v, forward_ad.make_dual(dout, tangent))
        found = forward_ad.unpack_dual(dv).tangent
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_deterministic_algorithms_are_another_kind(asked: list[Any]) -> None:
    q, k, v = leaves(1, 2, 64, 64)

    def both_kinds() -> int:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                out = archflash.attention(q, k, v)
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            finally:
                torch.use_deterministic_algorithms(False)
        return len(asked)

    count = both_kinds()
    assert count > 0  # the forward pass expects one of them only
    assert both_kinds() == count


def test_gradients_of_more_lengths_than_are_kept() -> None:
    longest = 1100  # of 1,024 calls it is kept how their gradients are computed
    whole = [x.detach() for x in leaves(1, 2, longest, 64)]

    def gradients(length: int) -> tuple[Tensor, ...]:
        inputs = [x[:, :, :length].requires_grad_() for x in whole]
        out = archflash.attention(*inputs)
        return torch.autograd.grad(out, inputs, out.detach())

    first = {length: gradients(length) for length in range(1, longest + 1)}
    for length in (1, 77, 500, longest):
        for again, before in zip(gradients(length), first[length], strict=True):
            assert again.shape == before.shape
            torch.testing.assert_close(again, before)


def test_the_operator_is_for_the_function_alone() -> None:
    q, k, v = leaves(1, 2, 64, 64)
    with pytest.raises(RuntimeError, match=r"serves archflash\.attention alone"):
        getattr(torch.ops.aten, OPERATOR)(q, k, v)


def test_a_gradient_of_the_output_that_is_negated_or_undefined() -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> None:
            return None

    inputs = leaves(1, 2, 70, 64)
    out = archflash.attention(*inputs)
    assert name_of(out) == NODE
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    negated = torch.autograd.grad(out, inputs, torch._neg_view(-dout))
    for one, other in zip(negated, expected, strict=True):
        assert torch.equal(one, other)
    Stop.apply(archflash.attention(*inputs)).sum().backward()
    for x in inputs:
        assert x.grad is None or not x.grad.any()


class Doubled(Tensor):
    """Means twice what its memory holds."""

    meant: Tensor

    @staticmethod
    def of(x: Tensor) -> Doubled:
        made: Doubled = Tensor._make_subclass(Doubled, x.detach().div(2))  # type: ignore[attr-defined]
        made.meant = x.detach()
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map(lambda x: x.meant if isinstance(x, cls) else x, args)
        return function(*given, **(kwargs or {}))


@pytest.mark.parametrize("saved", [False, True])
def test_subclasses_handle_gradients_and_saved_tensors(saved: bool) -> None:
    inputs = leaves(1, 2, 70, 64)
    dout = torch.randn(1, 2, 70, 64, device="cuda", dtype=BF16)
    expected = torch.autograd.grad(archflash.attention(*inputs), inputs, dout)
    with saved_tensors_hooks(lambda x: x, Doubled.of if saved else lambda x: x):
        out = archflash.attention(*inputs)
    assert name_of(out) == NODE
    given = dout if saved else Doubled.of(dout)
    for one, other in zip(torch.autograd.grad(out, inputs, given), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_modes_of_torch_functions_and_others_do_not_meet_the_operator() -> None:
    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    inputs = leaves(1, 2, 70, 64)
    with Noting():
        out = archflash.attention(*inputs)
    assert name_of(out) == PYTHON_NODE
    assert getattr(torch._C._VariableFunctions, OPERATOR) not in seen
    lse = torch.zeros(1, 2, 70, device="cuda")
    backward = getattr(torch.ops.aten, OPERATOR + "_backward")
    with pytest.raises((RuntimeError, NotImplementedError), match=r"archflash\.attention alone"):
        backward(out.detach(), *(x.detach() for x in inputs), out.detach(), lse, 0.0, False)
