"""PyTorch's own attention operators while archflash is enabled: what they return, who serves them,
and that everything is put back.

PyTorch has these operators for CUDA only. On the simulator a stand-in for PyTorch's own kernel is
registered for tensors on the CPU, and archflash takes its place there.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention as torch_attention
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import (
    _backward_operators,
    _dispatch,
    _fused_kernels,
    _overrides,
    _replacing,
    _schemas,
    reference,
)
from archflash._dispatch import device as devices

from .checks import assert_close
from .executors import executor

on = executor()
aten = torch.ops.aten
NUMBER = 7.0  # what a stand-in for PyTorch's kernel writes

needs_get_kernel = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"),
    reason=f"torch {torch.__version__} cannot call a kernel that was replaced",
)

needs_quantized = pytest.mark.skipif(
    "quantized" not in aten._scaled_dot_product_flash_attention.overloads(),
    reason="this torch has no operator for FP8",
)

on_cpu = pytest.mark.skipif(on.name == "gpu", reason="PyTorch's own kernels may refuse these calls")


def stand_in(operator: str) -> Any:
    """A kernel that returns what PyTorch's promises in shapes and strides, full of NUMBER."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
        if operator.startswith("_cudnn_attention"):  # without a meta kernel
            return tuple(torch.full_like(x, NUMBER) for x in args[:3])
        promised = _schemas.find(operator)(*given, **kwargs)
        return tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(NUMBER)
            if isinstance(x, Tensor)
            else x
            for x in (promised if isinstance(promised, tuple) else (promised,))
        )

    return kernel


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    **scale: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward from output and log-sum-exp, without a mask."""
    factor = scale.get("scale") or 1 / math.sqrt(q.shape[-1])
    grad32, q32, k32, v32 = (x.float() for x in (grad, q, k, v))
    weights = torch.exp(q32 @ k32.mT * factor - lse[..., None])
    scores = weights * (grad32 @ v32.mT - (grad32 * out).sum(-1, keepdim=True))
    dq, dk, dv = scores @ k32 * factor, scores.mT @ q32 * factor, weights.mT @ grad32
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@pytest.fixture(autouse=True)
def kernels_to_replace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    archflash.stats(reset=True)
    if on.name == "gpu":
        yield
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {"_scaled_dot_product_flash_attention_backward": flash_backward}
        for operator in (*_overrides._OPERATORS, "_efficient_attention_forward"):
            if _schemas.find(operator) is not None:
                library.impl(operator, own.get(operator) or stand_in(operator), "CPU")
    # Older versions of PyTorch refuse a second kernel from Python, for which these stand in.
    torch.library._impls.difference_update(library._op_impls)
    monkeypatch.setattr(_replacing, "_KEY", "CPU")
    yield
    archflash.disable()
    library._destroy()


@pytest.fixture
def ampere() -> Iterator[None]:
    """archflash is enabled, and its kernel for every tensor-core GPU is forced."""
    with archflash.enabled(), archflash.force("ampere"):
        yield


def strided(x: Tensor) -> Tensor:
    """The same values with rows before heads in memory, as a model's projections have them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def assert_promised(operator: str, result: Any, *args: Any, **kwargs: Any) -> None:
    """Shapes, strides and dtypes are those that torch.compile reckons with."""
    given = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
    promised = getattr(aten, operator)(*given, **kwargs)
    assert len(result) == len(promised)
    for one, other in zip(result, promised, strict=True):
        if isinstance(other, Tensor) and other.device.type == "meta" and isinstance(one, Tensor):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.stride() == other.stride()
        elif one is None and isinstance(other, Tensor):
            assert operator == "_scaled_dot_product_cudnn_attention"
            assert other.shape[-1:] == (1,)  # PyTorch's kernel too gives it only where it is wanted
            assert not args[4]
        else:
            assert one == other


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_the_flash_operator(layout: str) -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16", batch=2, heads=(4, 2))
    if layout == "strided":
        q, k, v = strided(q), strided(k), strided(v)
    args = (q, k, v, 0.0, True)
    result = aten._scaled_dot_product_flash_attention(*args, scale=0.3)
    assert_promised("_scaled_dot_product_flash_attention", result, *args, scale=0.3)
    assert_close(*result[:2], q, k, v, causal=True, scale=0.3)
    assert archflash.stats().served == {"ampere": 1}


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("operator", ["cudnn", "efficient"])
@pytest.mark.parametrize("rows", [(40, 70), (70, 40)], ids=str)
@pytest.mark.parametrize("want_lse", [False, True], ids=["out", "lse"])
def test_causal_aligns_to_the_top_left(
    operator: str, rows: tuple[int, int], want_lse: bool
) -> None:
    q, k, v = on.qkv(*rows, 32, 16, dtype="float16")
    q = strided(q)
    name = f"_scaled_dot_product_{operator}_attention"
    args = (q, k, v, None, want_lse, 0.0, True)
    result = getattr(aten, name)(*args)
    assert_promised(name, result, *args)
    lse = None
    if want_lse:
        lse = result[1][..., 0] if operator == "cudnn" else result[1]
        assert bool((lse[..., rows[0] :] == math.inf).all())
        lse = lse[..., : rows[0]]
    assert_close(result[0], lse, q, k, v, causal=True, q_offset=0)


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("operator", ["flash", "cudnn", "efficient"])
def test_a_query_that_repeats_rows(operator: str) -> None:
    """The output has the layout of torch.empty_like, which nests repeated rows elsewhere."""
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16", batch=2, heads=(4, 4))
    q = q[:, :1].expand_as(q)
    name = f"_scaled_dot_product_{operator}_attention"
    args = (q, k, v) if operator == "flash" else (q, k, v, None, False)
    result = getattr(aten, name)(*args)
    assert_promised(name, result, *args)
    assert_close(result[0], None, q, k, v)


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("rows", [(40, 70), (70, 40)], ids=str)
def test_a_causal_bias_aligned_to_the_bottom_right(rows: tuple[int, int]) -> None:
    q, k, v = on.qkv(*rows, 32, dtype="bfloat16")
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    unseen = max(rows[0] - rows[1], 0)
    assert bool((lse[..., :unseen] == math.inf).all())  # as PyTorch's kernel
    lse[..., :unseen] = -math.inf
    assert_close(out, lse, q, k, v, causal=True)


def varlen_with_a_mask() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """PyTorch's module for packed sequences, a mask as it is given there, and as archflash's."""
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen")
    if "window_size" in inspect.signature(varlen.varlen_attn).parameters:
        return varlen, {"window_size": (9, 0)}, {"window": (9, 0)}
    return varlen, {"is_causal": True}, {"causal": True}  # torch 2.10


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
def test_packed_sequences_through_varlen_attn() -> None:
    varlen, mask, same_mask = varlen_with_a_mask()
    q, k, v = (on.rand(60, 2, 32, seed=i, dtype="bfloat16") for i in range(3))
    ends_q, ends_k = on.cu_seqlens([25, 0, 30, 5]), on.cu_seqlens([20, 10, 30, 0])
    packed = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, **same_mask}
    out, lse = varlen.varlen_attn(
        q, k, v, ends_q, ends_k, 30, 30, return_aux=varlen.AuxRequest(lse=True), **mask
    )
    unseen = torch.zeros(60, dtype=torch.bool, device=on.device)
    unseen[:5] = unseen[55:] = True  # more queries than keys, and a sequence without keys
    assert bool((lse[:, unseen] == math.inf).all())  # as PyTorch's kernel
    assert_close(out, lse.masked_fill(lse == math.inf, -math.inf), q, k, v, **packed)
    assert archflash.stats().served == {"ampere": 1}


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
@pytest.mark.skipif(on.name == "gpu", reason="it asks the simulator what was launched")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0), (0, 3)], ids=str)
def test_one_tensor_of_lengths_leaves_no_row_without_keys(window: tuple[int, int]) -> None:
    """Nothing is launched then that gives such rows the log-sum-exp of PyTorch's kernel."""
    q, k, v = (on.rand(60, 2, 32, seed=i, dtype="bfloat16") for i in range(3))
    ends = on.cu_seqlens([25, 0, 30, 5])
    launched: list[list[str]] = []

    def simulate(plan: _native.LaunchPlan, tensors: dict[str, Any]) -> None:
        launched.append(list(plan.kernels))
        archflash._simulate(plan, tensors)

    _native.set_simulate(simulate)
    try:
        for ends_k in (ends, ends.clone(), ends):
            out, lse, *_ = aten._flash_attention_forward(
                q, k, v, ends, ends_k, 30, 30, 0.0, False, False,
                window_size_left=window[0], window_size_right=window[1],
            )  # fmt: skip
            options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends_k}
            sides = tuple(None if side < 0 else side for side in window)
            assert_close(out, lse, q, k, v, window=sides, **options)
    finally:
        _native.set_simulate(archflash._simulate)
    same, others, again = launched
    assert same == again
    assert others == [*same, "copy_lse_for_pytorch"]


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
@pytest.mark.skipif("ampere" not in on.kernels("kv_cache"), reason="ampere serves no cache yet")
def test_pages_of_a_cache_through_varlen_attn() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this torch has no block_table")
    q = on.rand(7, 2, 32, seed=0, dtype="bfloat16")
    pages = [on.rand(6, 16, 2, 32, seed=i, dtype="bfloat16") for i in (1, 2)]
    ends, used, table = on.cu_seqlens([3, 4]), [5, 21], on.int32(4, 0, 5, 2).view(2, 2)
    out = varlen.varlen_attn(
        q, *pages, ends, None, 4, 32, window_size=(-1, 0), seqused_k=on.int32(*used),
        block_table=table,
    )  # fmt: skip
    k, v = (
        torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table.long(), used, strict=True)])
        for x in pages
    )
    ends_k = on.cu_seqlens(used)
    assert_close(out, None, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends_k, causal=True)
    assert archflash.stats().served == {"ampere": 1}


has_packed_cudnn = pytest.mark.skipif(
    not _backward_operators.HAS_PACKED_CUDNN,
    reason="this torch calls no cuDNN operator for packed sequences",
)


@has_packed_cudnn
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("same", [True, False], ids=["same lengths", "other lengths"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_packed_sequences_through_the_cudnn_operators(causal: bool, same: bool) -> None:
    q, k, v, grad = (on.rand(60, 2, 32, seed=i, dtype="bfloat16") for i in range(4))
    ends_q = on.cu_seqlens([25, 0, 30, 5])
    ends_k = ends_q if same else on.cu_seqlens([20, 10, 25, 5])
    packed = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "causal": causal, "q_offset": 0}
    longest = (30, 30, True, 0.0, causal)
    out, lse, *rest = aten._cudnn_attention_forward(q, k, v, None, ends_q, ends_k, *longest)
    assert lse.shape == (2, 60)
    assert_close(out, lse, q, k, v, **packed)
    written = torch.empty_like(q)
    again = aten._cudnn_attention_forward_no_dropout_inplace(
        written, q, k, v, ends_q, ends_k, 30, 30, causal
    )
    assert torch.equal(written, out)
    assert torch.equal(again, lse)
    gradients = aten._cudnn_attention_backward(
        grad, q, k, v, out, lse, *rest[4:6], None, ends_q, ends_k, 30, 30, 0.0, causal
    )
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = archflash.attention(*leaves, **{**packed, "implementation": "torch"})
    exact.backward(grad.double())
    for one, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(one.double(), leaf.grad, atol=0.05, rtol=0.05)
    assert archflash.stats().served == {"ampere": 3}


@has_packed_cudnn
@pytest.mark.usefixtures("ampere")
def test_pages_of_a_cache_through_the_cudnn_operator() -> None:
    q = on.rand(7, 2, 32, seed=0, dtype="bfloat16")
    pages = [on.rand(6, 16, 2, 32, seed=i, dtype="bfloat16") for i in (1, 2)]
    ends, used, table = on.cu_seqlens([3, 4]), [5, 21], on.int32(4, 0, 5, 2).view(2, 2)
    out, lse, *_ = aten._cudnn_attention_forward(
        q, *pages, None, ends, None, 4, 32, True, 0.0, True, seqused_k=on.int32(*used),
        block_table=table,
    )  # fmt: skip
    k, v = (
        torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table.long(), used, strict=True)])
        for x in pages
    )
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": on.cu_seqlens(used)}
    assert_close(out, lse, q, k, v, causal=True, **packed)


@needs_get_kernel
@needs_quantized
@pytest.mark.skipif("hopper" not in on.kernels(), reason="hopper has no code for this GPU")
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_fp8_through_the_quantized_operators(packed: bool) -> None:
    shape = (60, 4, 64) if packed else (2, 4, 60, 64)
    q, k, v = (on.rand(*shape, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    descales = [on.rand(1 if packed else 2, 4, seed=i).abs() + 0.5 for i in (3, 4, 5)]
    options = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    with archflash.enabled(), archflash.force("hopper"):
        if packed:
            ends = on.cu_seqlens([60])
            options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            out, lse, *_ = aten._flash_attention_forward.quantized(
                q, k, v, ends, ends, 60, 60, 0.0, True, False, *descales
            )
        else:
            result = aten._scaled_dot_product_flash_attention.quantized(
                q, k, v, *descales, 0.0, True
            )
            out, lse, *_ = result
    assert out.dtype == torch.bfloat16
    assert_close(out, lse, q, k, v, ran_on=("hopper", (9, 0)), causal=True, **options)
    assert archflash.stats().served == {"hopper": 1}


def gradients_of(
    operator: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, dropout_p: float = 0.0,
) -> tuple[str, tuple[Any, ...]]:  # fmt: skip
    """The whole name of a backward operator of SDPA and its arguments, for a call whose log-sum-exp
    is (B, H, Nq) here.
    """
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    nq, nk = q.shape[2], k.shape[2]
    first, states = (grad, q, k, v), (state, state)
    if operator == "flash":
        args = (*first, out, lse, None, None, nq, nk, dropout_p, causal, *states)
    else:
        column = lse[..., None]
        args = (*first, out, column, *states, None, None, None, nq, nk, dropout_p, causal)
    return f"_scaled_dot_product_{operator}_attention_backward", args


def assert_gradients(
    found: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> None:
    expected = reference.attention_backward(grad, q, k, v, **call)
    rounded = reference.baseline_backward(grad, q, k, v, **call)
    for name, x in zip(("dq", "dk", "dv"), found, strict=False):
        report = reference.check(x, getattr(expected, name), getattr(rounded, name).double())
        assert report.ok, f"{name}: {report}"


def assert_calls(count: int) -> None:
    """`count` calls were counted. On a GPU autograd computes gradients in another thread, where
    nothing is forced.
    """
    counted = archflash.stats()
    assert sum(counted.served.values()) + sum(counted.declined.values()) == count
    assert on.name == "gpu" or counted.served == {"ampere": count}


# With as many queries as keys, and with more of either, which align causal to another corner.
ROWS_OF = {"flash": [(40, 40), (40, 70), (70, 40)], "cudnn": [(40, 70), (70, 40)]}


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize(
    ("operator", "rows"), [(name, rows) for name in ROWS_OF for rows in ROWS_OF[name]], ids=str
)
def test_a_backward_operator(operator: str, rows: tuple[int, int], layout: str) -> None:
    q, k, v = on.qkv(*rows, 32, dtype="bfloat16", batch=2, heads=(4, 2))
    grad = on.rand(*q.shape, seed=9, dtype="bfloat16")
    if layout == "strided":
        grad, q, k, v = (strided(x) for x in (grad, q, k, v))
    call = {"causal": True, "scale": 0.3} | ({} if operator == "flash" else {"q_offset": 0})
    out, lse = reference.attention(q, k, v, **call)
    out, lse = _as_of_pytorch(q, out, lse)
    name, args = gradients_of(operator, grad, q, k, v, out, lse, causal=True)
    for _ in range(2):  # the second call is decided as the first one was
        found = getattr(aten, name)(*args, scale=0.3)
        assert_promised(name, found, *args, scale=0.3)
        assert_gradients(found, grad, q, k, v, **call)
    assert archflash.stats().served == {"ampere": 2}


def _as_of_pytorch(q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Exact results in the dtypes of PyTorch's kernels, whose log-sum-exp is infinity where a query
    sees no key.
    """
    return out.to(q.dtype), lse.masked_fill(lse == -math.inf, math.inf).float().contiguous()


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
def test_a_gradient_that_is_one_number_everywhere() -> None:
    """As sum() gives it, with strides of 0."""
    q, k, v = on.qkv(40, 40, 32, dtype="float16")
    grad = torch.ones((), dtype=q.dtype, device=q.device).expand_as(q)
    name, args = gradients_of(
        "flash", grad, q, k, v, *_as_of_pytorch(q, *reference.attention(q, k, v)), False
    )
    assert_gradients(getattr(aten, name)(*args), grad, q, k, v)
    assert archflash.stats().served == {"ampere": 1}


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
def test_gradients_of_packed_sequences_through_varlen_attn() -> None:
    varlen, mask, same_mask = varlen_with_a_mask()
    q, k, v = (on.rand(60, 2, 32, seed=i, dtype="bfloat16").requires_grad_() for i in range(3))
    grad = on.rand(60, 2, 32, seed=9, dtype="bfloat16")
    ends_q, ends_k = on.cu_seqlens([25, 0, 30, 5]), on.cu_seqlens([20, 10, 30, 0])
    packed = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, **same_mask}
    out = varlen.varlen_attn(q, k, v, ends_q, ends_k, 30, 30, **mask)
    found = torch.autograd.grad(out, (q, k, v), grad)
    assert_gradients(found, grad, *(x.detach() for x in (q, k, v)), **packed)
    assert_calls(2)


@pytest.mark.skipif("ada" not in on.kernels(), reason="ada has no code for this GPU")
def test_pytorchs_backward_takes_output_and_log_sum_exp() -> None:
    """The forced implementation has no backward pass: PyTorch computes the gradients."""
    q, k, v = (x.requires_grad_() for x in on.qkv(40, 40, 32, dtype="float16"))
    grad = on.rand(*q.shape, seed=9, dtype="float16")
    with archflash.enabled(), archflash.force("ada"):
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
        found = torch.autograd.grad(out, (q, k, v), grad)
    assert_gradients(found, grad, *(x.detach() for x in (q, k, v)))
    assert archflash.stats().served["ada"] == 1


@needs_get_kernel
@on_cpu
@pytest.mark.parametrize("operator", ["flash", "cudnn"])
def test_a_backward_operator_that_is_handed_back(operator: str) -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    lse = torch.zeros(1, 2, 40)
    name, args = gradients_of(operator, q, q, k, v, q, lse, False, dropout_p=0.5)
    with archflash.enabled():
        getattr(aten, name)(*args)
        assert archflash.stats() == archflash.Stats({}, {"gradients of a call with dropout": 1})
        with (
            archflash.force("ampere"),
            pytest.raises(archflash.ForcedImplementationError, match="dropout"),
        ):
            getattr(aten, name)(*args)


@pytest.mark.usefixtures("ampere")
def test_a_compiled_graph_calls_the_same_operator() -> None:
    q, k, v = (strided(x) for x in on.qkv(40, 40, 32, dtype="bfloat16"))

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * aten._scaled_dot_product_flash_attention(q, k, v)[0].transpose(1, 2).flatten(2)

    torch._dynamo.reset()
    result = torch.compile(twice, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(result, twice(q, k, v))
    assert archflash.stats().served == {"ampere": 2}


@needs_get_kernel
@pytest.mark.usefixtures("ampere")
def test_a_compiled_graph_calls_the_backward_operator() -> None:
    q, k, v = (strided(x).requires_grad_() for x in on.qkv(40, 40, 32, dtype="bfloat16"))

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * aten._scaled_dot_product_flash_attention(q, k, v)[0]

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    grad = on.rand(*q.shape, seed=9, dtype="bfloat16")
    results = [torch.autograd.grad(run(q, k, v), (q, k, v), grad) for run in (twice, compiled)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert_calls(4)


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("operator", ["efficient", pytest.param("cudnn", marks=needs_get_kernel)])
def test_a_mask_is_served_where_no_gradients_are_needed(operator: str) -> None:
    q, k, v = on.qkv(40, 48, 32, dtype="bfloat16")
    bias = on.rand(1, 1, 40, 48, seed=4, dtype="bfloat16").expand(1, 2, -1, -1)
    attend = getattr(aten, f"_scaled_dot_product_{operator}_attention")
    out = attend(q, k, v, bias, False)[0]
    assert_close(out, None, q, k, v, attn_mask=bias)
    assert archflash.stats().served == {"ampere": 1}


DECLINED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "dropout": ("_scaled_dot_product_flash_attention", (0.5,), {}, "dropout"),
    "weights": ("_scaled_dot_product_flash_attention", (0.0, False, True), {}, "return_debug_mask"),
    "gradients of a mask": (
        "_scaled_dot_product_efficient_attention", (torch.zeros(40, 40), True), {}, "a mask",
    ),
    "dropout of an overload": (
        "_scaled_dot_product_flash_attention.quantized", (None, None, None, 0.5), {}, "dropout",
    ),
    "used keys": (
        "_flash_attention_forward", (None, None, 40, 40, 0.0, False, False),
        {"seqused_k": torch.ones(1, dtype=torch.int32)}, "seqused_k",
    ),
}  # fmt: skip


@needs_get_kernel
@on_cpu
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[needs_quantized] * ("overload" in x)) for x in DECLINED]
)
def test_pytorchs_own_kernel_serves_what_archflash_does_not(name: str) -> None:
    operator, args, kwargs, reason = DECLINED[name]
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    with archflash.enabled():
        result = _schemas.find(operator)(q, k, v, *args, **kwargs)
        assert bool((result[0] == NUMBER).all())
        counted = archflash.stats()
        assert counted.served == {}
        assert list(counted.declined.values()) == [1]
        assert reason in next(iter(counted.declined))
        with (
            archflash.force("ampere"),
            pytest.raises(archflash.ForcedImplementationError, match=reason),
        ):
            _schemas.find(operator)(q, k, v, *args, **kwargs)


@on_cpu
def test_a_replaced_kernel_is_reached_through_another_operator_where_need_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.library, "get_kernel", raising=False)  # as in older versions
    q, k, v = (strided(x) for x in on.qkv(40, 40, 32, dtype="bfloat16"))
    flash, efficient = ((0.5,), (None, True, 0.5))  # with dropout
    with archflash.enabled():
        for name, args in (("flash", flash), ("efficient", efficient)):
            operator = f"_scaled_dot_product_{name}_attention"
            result = getattr(aten, operator)(q, k, v, *args)
            assert bool((result[0] == NUMBER).all())
            assert_promised(operator, result, q, k, v, *args)
        assert list(archflash.stats().declined.values()) == [2]
        aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)  # not replaced
        assert list(archflash.stats().declined.values()) == [2]
        with archflash.force("ampere"):
            out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert_close(out, None, q, k, v)


@pytest.mark.skipif(
    on.name == "gpu" or not _fused_kernels.cudnn_comes_first((9, 0)),
    reason="another GPU decides otherwise, and older versions of PyTorch prefer other kernels",
)
@pytest.mark.usefixtures("cudnn_is_fastest")
def test_dispatch_decides_for_the_call_without_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch's own kernel had been measured to be the fastest on an H200: it gives the
    log-sum-exp at no cost. On an A100 ampere is asked first, but not for head dimension 999.
    """
    many = on.qkv(2048, 77, 64, dtype="bfloat16", batch=2, heads=(8, 8))
    one = on.qkv(1, 40, 128, dtype="bfloat16")
    for device, (q, k, v), served in (("H200", many, {}), ("A100", one, {"ampere": 1})):
        known = archflash._api.find_device(device)
        monkeypatch.setattr(
            _overrides, "_device_of", lambda problem, index, known=known: (known, None)
        )
        _native.clear_cache()
        archflash.stats(reset=True)
        with archflash.enabled():
            aten._scaled_dot_product_flash_attention(q, k, v)
        assert archflash.stats().served == served
    odd = on.qkv(9, 40, 999, dtype="bfloat16")
    with archflash.enabled():
        for _ in range(2):
            aten._scaled_dot_product_flash_attention(*odd)
    (reason, count), *others = archflash.stats().declined.items()
    assert count == 2
    assert not others
    assert "999" in reason
    assert reason in str(archflash.stats())
    _native.clear_cache()


def test_everything_is_put_back() -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    own = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    with archflash.force("ampere"):
        with archflash.enabled():
            with archflash.enabled():
                pass
            aten._scaled_dot_product_flash_attention(q, k, v)
        again = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert torch.equal(own, again)
    assert sum(archflash.stats().served.values()) == 1
    archflash.disable()  # nothing is active, and nothing happens


needs_runtime = pytest.mark.skipif(
    not _replacing.runtime_serves(), reason="with this torch only Python stands before operators"
)


@needs_runtime
@pytest.mark.parametrize(
    "function", ["alloc_tensor_by_stealing_from_void_ptr", "unsafe_alloc_void_ptrs_from_tensors"]
)
def test_python_alone_serves_where_pytorch_lacks_a_private_function(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def install(*_: object) -> None:
        raise AssertionError("the runtime was asked")

    monkeypatch.setattr(_native, "install_operator", install)
    monkeypatch.delattr(torch._C._aoti, function)
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    with archflash.enabled(), archflash.force("ampere"):
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert_close(out, None, q, k, v)
    assert archflash.stats().served == {"ampere": 1}


@needs_runtime
def test_what_was_installed_is_removed_where_something_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    own = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    installed: list[str] = []

    def install(operator: str, *rest: Any) -> None:
        if installed:
            raise RuntimeError("there is no room")
        installed.append(operator)
        real_install(operator, *rest)

    real_install = _native.install_operator
    monkeypatch.setattr(_native, "install_operator", install)
    with pytest.raises(RuntimeError, match="no room"):
        archflash.enable()
    assert installed == ["_scaled_dot_product_flash_attention"]
    assert _overrides._active() is None
    with archflash.force("ampere"):
        again = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert torch.equal(own, again)
    assert archflash.stats().served == {}


def test_the_environment_variable_enables(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, active in (("", None), ("0", None), ("1", "archflash")):
        monkeypatch.setenv("ARCHFLASH_SDPA", value)
        _overrides.enable_if_asked()
        assert _overrides._active() == active
    archflash.disable()
    monkeypatch.setenv("ARCHFLASH_SDPA", "yes")
    with pytest.raises(ValueError, match="it must be 1"):
        _overrides.enable_if_asked()
    assert _overrides._active() is None


@pytest.mark.skipif(not _overrides._HAS_REGISTRY, reason="this torch has no registry of providers")
def test_another_provider_is_active_again_afterwards() -> None:
    class Handle:
        removed = False

        def remove(self) -> None:
            self.removed = True

    handles: list[Handle] = []

    def register() -> Handle:
        handles.append(Handle())
        return handles[-1]

    torch_attention.register_flash_attention_impl("another", register_fn=register)
    assert "archflash" in torch_attention.list_flash_attention_impls()
    torch_attention.activate_flash_attention_impl("another")
    try:
        with archflash.enabled():
            assert handles[0].removed
            assert torch_attention.current_flash_attention_impl() == "archflash"
        assert torch_attention.current_flash_attention_impl() == "another"
        archflash.disable()  # it is not archflash that is active
        assert torch_attention.current_flash_attention_impl() == "another"
    finally:
        torch_attention.restore_flash_attention_impl()
    assert _dispatch.forced() is None


def test_torch_is_pytorchs_own_where_it_is_forced() -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16", heads=(2, 2))
    with archflash.enabled(), archflash.force("ampere"):
        archflash.attention(q, k, v, implementation="torch")
    assert archflash.stats().served == {}


@needs_get_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad], ids=["no_grad", "grad"])
@pytest.mark.parametrize("want_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("operator", ["flash", "cudnn", "efficient"])
def test_a_call_like_an_earlier_one_gives_the_same(
    operator: str, want_lse: bool, mode: Any
) -> None:
    """On a GPU the runtime serves it without asking Python again."""
    q, k, v = (strided(x) for x in on.qkv(40, 72, 32, dtype="bfloat16", heads=(4, 4)))
    name = f"_scaled_dot_product_{operator}_attention"
    args = (q, k, v) if operator == "flash" else (q, k, v, None, want_lse)
    forced = contextlib.nullcontext() if on.name == "gpu" else archflash.force("ampere")
    with archflash.enabled(), forced, mode():
        first, second, third = (getattr(aten, name)(*args) for _ in range(3))
    for result in (first, second, third):
        assert_promised(name, result, *args)
    own_results = 2 if operator == "flash" or want_lse else 1
    for one, other in ((first, second), (first, third)):
        for x, y in zip(one[:own_results], other[:own_results], strict=True):
            assert torch.equal(x, y)
            assert x.data_ptr() != y.data_ptr()
    assert_close(first[0], None, q, k, v)
    counted = archflash.stats()
    assert sum(counted.served.values()) + sum(counted.declined.values()) == 3


@pytest.mark.skipif(on.name != "gpu", reason="it takes PyTorch's own kernels")
@pytest.mark.parametrize("operator", ["flash", "cudnn", "efficient"])
def test_calls_that_are_handed_back_have_pytorchs_own_bits(operator: str) -> None:
    q, k, v = (strided(x) for x in on.qkv(72, 72, 64, dtype="bfloat16", heads=(4, 4)))
    args = (0.3,) if operator == "flash" else (None, True, 0.3)

    def call() -> Any:
        torch.manual_seed(3)
        return getattr(aten, f"_scaled_dot_product_{operator}_attention")(q, k, v, *args)

    own = call()
    with archflash.enabled():
        for found in (call(), call(), call()):
            for x, y in zip(found, own, strict=True):
                if not isinstance(x, Tensor):
                    assert x == y
                    continue
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            assert torch.equal(found[0], own[0])
    assert list(archflash.stats().declined.values()) == [3]


def test_exceptions_keep_their_type_on_the_way_through_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")

    def fail(*_: object) -> None:
        raise KeyError("a reason")

    monkeypatch.setattr(_overrides, "_device_of", fail)
    monkeypatch.setattr(devices, "device_of", fail)  # on a GPU it is asked first, for an order
    _native.clear_cache()
    with archflash.enabled(), pytest.raises(KeyError, match="a reason"):
        aten._scaled_dot_product_flash_attention(q, k, v)


@pytest.mark.usefixtures("ampere")
def test_nothing_keeps_the_results_of_a_call() -> None:
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    result = aten._scaled_dot_product_flash_attention(q, k, v)
    results = [weakref.ref(x) for x in result[:2]]
    del result
    gc.collect()
    assert [x() for x in results] == [None, None]


@pytest.mark.skipif(not hasattr(Tensor, "_use_count"), reason="this torch has no _use_count")
@pytest.mark.usefixtures("ampere")
def test_nothing_keeps_the_arguments_of_a_call() -> None:
    """Memory that a tensor of PyTorch's C++ code keeps is seen by no reference of Python's."""
    q, k, v = on.qkv(40, 40, 32, dtype="bfloat16")
    before = [x._use_count() for x in (q, k, v)]
    aten._scaled_dot_product_flash_attention(q, k, v)
    gc.collect()
    assert [x._use_count() for x in (q, k, v)] == before


STATES = {"flash": ((), 6), "efficient": ((None, True), 2), "cudnn": ((None, True), 6)}


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    "name", ["flash", "efficient", pytest.param("cudnn", marks=needs_get_kernel)]
)
def test_states_are_new_in_calls_that_a_compiled_graph_may_make(name: str) -> None:
    """A graph of torch.compile, which runs without gradients, may give their memory to other
    results. Autograd keeps them, which it could not if they came from inference mode.
    """
    args, place = STATES[name]
    q, k, v = on.qkv(40, 40, 32, dtype="float16")

    def states() -> tuple[Tensor, ...]:
        result = getattr(aten, f"_scaled_dot_product_{name}_attention")(q, k, v, *args)
        assert_promised(f"_scaled_dot_product_{name}_attention", result, q, k, v, *args)
        kept: tuple[Tensor, ...] = result[place : place + 2]
        return kept

    def addresses(*pairs: tuple[Tensor, ...]) -> list[int]:
        return [x.data_ptr() for pair in pairs for x in pair]

    with torch.no_grad():
        one, other = states(), states()
    assert len(set(addresses(one, other))) == 4
    with torch.inference_mode():
        states()
    q.requires_grad_()
    one, other = states(), states()
    assert addresses(one) == addresses(other)
    assert not any(x.is_inference() for x in one)
