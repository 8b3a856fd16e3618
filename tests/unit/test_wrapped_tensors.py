"""Tensors that are not plain ones: subclasses, fake, functional and sparse tensors in every
argument of every public function.

A call with one goes through an operator, or is refused before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.wrapped_cases import (
    CALLS,
    LSE,
    MASK,
    OPTIONS,
    OUT,
    K,
    Q,
    Tagged,
    V,
    Wrapper,
    assert_same,
    forced,
    int32,
    plain,
    rand,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import archflash
from archflash import _archflash as _native
from archflash import masks, sim

WAYS: dict[str, Callable[[Tensor], Any]] = {
    "wrapper": Wrapper,
    "tagged": lambda x: x.as_subclass(Tagged),  # type: ignore[no-untyped-call]
}


ARGUMENTS = [
    (name, argument)
    for name, (_, given, named) in CALLS.items()
    for argument, x in (*enumerate(given), *named.items())
    if isinstance(x, Tensor)
]


def run(
    name: str, wrap: Callable[[Any, Tensor], Any], function: Callable[..., Any] | None = None
) -> Any:
    """What a call gives, and what is in its tensors afterwards, all of it plain. `wrap` gets the
    place of an argument and the tensor, and makes a copy of it.
    """
    call, given, named = CALLS[name]

    def prepared(place: Any, x: Any) -> Any:
        return wrap(place, x) if isinstance(x, Tensor) else x

    given = tuple(prepared(i, x) for i, x in enumerate(given))
    named = {n: prepared(n, x) for n, x in named.items()}
    answer = (function or call)(*given, **named)
    return pytree.tree_map(plain, (answer, given, named))


def copied(place: Any, x: Tensor) -> Tensor:
    return x.clone()


_expected: dict[str, Any] = {}


def expected(name: str) -> Any:
    if name not in _expected:
        _expected[name] = run(name, copied)
    return _expected[name]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=str)
def test_a_wrapper_in_any_argument(name: str, argument: int | str) -> None:
    found = run(name, lambda place, x: Wrapper(x.clone()) if place == argument else x.clone())
    assert_same(found, expected(name))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_every_tensor_of_a_call_wrapped(name: str, way: str) -> None:
    assert_same(run(name, lambda place, x: WAYS[way](x.clone())), expected(name))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_the_shapes_of_real_ones(name: str, device: str) -> None:
    def fake(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    if device == "cuda" and torch.backends.cuda.is_built() and not torch.cuda.is_available():
        pytest.skip("a PyTorch for CUDA asks its libraries, which need a GPU")
    real = expected(name)[0]
    call, given, named = CALLS[name]
    with FakeTensorMode():
        given, named = pytree.tree_map_only(Tensor, fake, (given, named))
        try:
            answer = call(*given, **named)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
            pytest.skip("a PyTorch without CUDA does not index fake tensors of it")
    for x, y in zip(pytree.tree_leaves(answer), pytree.tree_leaves(real), strict=True):
        steps = [
            [step for size, step in zip(z.shape, z.stride(), strict=True) if size > 1]
            for z in (x, y)
        ]
        assert (x.shape, x.dtype, steps[0]) == (y.shape, y.dtype, steps[1])
        assert x.device.type == device


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_function_in_a_compiled_graph(name: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(CALLS[name][0], backend="aot_eager", fullgraph=True)
    assert_same(run(name, copied, call), expected(name))


def test_a_symbolic_trace_keeps_the_operators() -> None:
    def chain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = archflash.attention(q, k, v, return_lse=True)
        merged, _ = archflash.merge_attention([out, out], [lse, lse])
        return archflash.quantize_fp8(merged, per="head", dtype=torch.float8_e5m2)[1]

    q, k, v = (x.float() for x in (Q, K, V))
    traced = make_fx(chain, tracing_mode="symbolic")(q, k, v)
    kept = {str(node.target) for node in traced.graph.nodes}
    operators = ("attention", "merge_attention", "quantize_fp8")
    assert {f"archflash.{name}.default" for name in operators} <= kept
    torch.testing.assert_close(traced(q, k, v), chain(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["merge", "four bits", "eight bits", "latent cache", "mask"])
def test_sizes_stay_symbols_where_arguments_are_checked(name: str) -> None:
    x, rows = torch.randn(2, 3, 5, 32), torch.randn(2, 3, 5)
    calls: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
        "merge": (lambda x, lse: archflash.merge_attention([x, x], [lse, lse])[0], (x, rows)),
        "four bits": (lambda x: archflash.quantize_nvfp4(x)[0], (x,)),
        "eight bits": (lambda x: archflash.quantize_fp8(x)[0].float(), (x,)),
        "latent cache": (
            lambda x, n: archflash.attention_with_kvcache(x, x[:, :, :1], cache_seqlens=n, dv=16),
            (x, torch.tensor([3, 2], dtype=torch.int32)),
        ),
        "mask": (
            lambda ids: archflash.masks.documents(ids),
            (torch.tensor([[0, 0, 1], [0, 1, 1]]),),
        ),
    }
    call, given = calls[name]
    traced = make_fx(call, tracing_mode="symbolic")(*given)
    first = next(node for node in traced.graph.nodes if node.op == "placeholder").meta["val"]
    assert not any(isinstance(size, int) for size in first.shape)
    torch.testing.assert_close(traced(*given), call(*given))


OF_LISTS = torch.ops.archflash.merge_attention.default
OF_ONE = torch.ops.archflash.quantize_fp8.default


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        (OF_LISTS, ([OUT.float(), Q.float()], [LSE, LSE], 1, None)),
        (OF_LISTS, ([Q.float().transpose(1, 2)] * 2, [LSE, LSE], 2, None)),
        (OF_ONE, (Q, 2, torch.float8_e4m3fn, 1, None)),
        (OF_ONE, (Q.transpose(1, 2), 1, torch.float8_e5m2, 2, None)),
    ],
    ids=["merge", "merge-bnhd", "quantize", "quantize-bnhd"],
)
def test_opcheck(operator: Any, given: tuple[Any, ...]) -> None:
    assert set(torch.library.opcheck(operator, given).values()) == {"SUCCESS"}


# --- sizes that a compiled graph does not know ---


def rows(x: Tensor, n: Tensor) -> Tensor:
    length = n.item()
    torch._check(length >= 2)
    torch._check(length <= x.shape[2])
    return x[:, :, :length]


def chosen(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep.nonzero().squeeze(1)]


CUT, KEEP = torch.tensor(4), torch.tensor([True, True, False, True, True])
UNBACKED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "attention": (
        lambda q, k, n: archflash.attention(
            rows(q, n), rows(k, n), rows(k, n), causal=True, return_lse=True
        ),
        (Q, K, CUT),
    ),
    "bnhd": (
        lambda q, keep: archflash.attention(*[chosen(q[0], keep)[None]] * 3, layout="bnhd"),
        (rand(1, 5, 2, 8), KEEP),
    ),
    "packed": (
        lambda q, keep, ends: archflash.attention(
            *[chosen(q, keep)] * 3, cu_seqlens_q=ends, cu_seqlens_k=ends,
            max_seqlen_q=ends.diff().max().item(), window=(ends[1].item(), 0),
        ),
        (rand(5, 2, 8), KEEP, int32(0, 2, 4)),
    ),
    "backward": (
        lambda q, k, lse, n: archflash.attention_backward(
            rows(q, n), rows(q, n), rows(k, n), rows(k, n), rows(q, n), rows(lse, n)
        ),
        (Q, K, LSE, CUT),
    ),
    "kvcache": (
        lambda q, k, ends, keep, lengths: archflash.attention_with_kvcache(
            chosen(q, keep), k, k, cache_seqlens=lengths, cu_seqlens_q=ends, causal=True
        ),
        (rand(5, 2, 16), rand(2, 8, 2, 16), int32(0, 2, 4), KEEP, int32(3, 8)),
    ),
    "prefix": (
        lambda q, k, n, lengths: archflash.attention_with_shared_prefix(
            rows(q, n).transpose(1, 2), k[:1], k[:1], k, k, cache_seqlens=lengths
        ),
        (rand(2, 2, 5, 16), rand(2, 8, 2, 16), CUT, int32(3, 8)),
    ),
    "merge": (
        lambda q, lse, n: archflash.merge_attention([rows(q, n)] * 2, [rows(lse, n)] * 2),
        (Q, LSE, CUT),
    ),
    "quantize": (
        lambda q, n: archflash.quantize_fp8(rows(q, n), per="block")[1], (Q, CUT),
    ),
    "sdpa": (
        lambda q, n: archflash.scaled_dot_product_attention(*[rows(q, n)] * 3, is_causal=True),
        (Q.float(), CUT),
    ),
    "sdpa of fewer keys": (
        lambda q, n: archflash.scaled_dot_product_attention(
            q, rows(q, n), rows(q, n), is_causal=True
        ),
        (Q.float(), CUT),
    ),
    "documents": (lambda ids, n: masks.documents(ids[: n.item()]), (int32(1, 1, 2, 2, 3), CUT)),
}  # fmt: skip


# The calls that PyTorch before 2.9 traces, too: it cannot slice a tensor by such a number.
SELECTED = ("packed", "bnhd", "kvcache")


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBACKED)
def test_sizes_that_are_known_on_the_device_only(name: str) -> None:
    if name not in SELECTED and TorchVersion(torch.__version__) < (2, 9):
        pytest.skip("this PyTorch cannot slice by a number that it does not know")
    call, given = UNBACKED[name]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    assert_same(compiled, call(*given))


# --- the runtime itself ---


def plan_and_tensors(name: str) -> tuple[_native.LaunchPlan, dict[str, Tensor]]:
    """What a call has launched, caught on its way to the simulator."""
    caught: list[Any] = []
    _native.set_simulate(lambda plan, tensors: caught.append((plan, dict(tensors))))
    try:
        run(name, copied)
    finally:
        _native.set_simulate(archflash._simulate)
    plan, tensors = caught[-1]
    return plan, tensors


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "attention_backward",
        "attention_with_kvcache",
        "merge_attention",
        "quantize_fp8",
    ],
)
def test_the_runtime_refuses_each_operand_without_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, tensors = plan_and_tensors(name)
    _native.set_simulate(lambda *_: pytest.fail("launched"))
    try:
        with FakeTensorMode() as mode:
            for operand, x in tensors.items():
                for other in (Wrapper(x), mode.from_tensor(x), torch._to_functional_tensor(x)):
                    with pytest.raises(ValueError, match=f"^{operand} is a tensor without memory"):
                        _native.launch(plan, tensors | {operand: other})
    finally:
        _native.set_simulate(archflash._simulate)


@pytest.mark.parametrize(
    "argument", ["q", "k", "v", *(n for n in OPTIONS if isinstance(OPTIONS[n], Tensor))]
)
def test_a_given_plan_refuses_each_tensor_without_memory(argument: str) -> None:
    plan, _ = plan_and_tensors("attention")
    given = dict(zip("qkv", (Q, K, V), strict=True)) | OPTIONS | {"return_lse": True}
    given[argument] = Wrapper(given[argument])
    with pytest.raises(ValueError, match=f"^{argument} is a tensor without memory"):
        sim.run(**given, plan=plan, implementation="ampere")


def test_the_simulator_refuses_a_null_address() -> None:
    program = sim.load(
        ".version 8.0 .target sm_80 .address_size 64 .entry f(.param .u64 p) { ret; }"
    )
    for x in (Wrapper(torch.ones(4)), FakeTensorMode().from_tensor(torch.ones(4))):
        with pytest.raises(archflash.LaunchError, match="without memory of its own"):
            sim.launch(program, "f", [x])


def test_a_tensor_without_elements_needs_no_memory() -> None:
    empty = torch.empty(2, 4, 0, 8)
    assert empty.data_ptr() == 0
    q = rand(2, 4, 5, 8)
    for k in (empty, Wrapper(empty)):
        out = archflash.attention(q, k, k, implementation="simt")
        assert torch.equal(plain(out), torch.zeros_like(q))


def test_a_mask_inside_vmap_has_no_address() -> None:
    stacked = torch.stack([MASK, MASK * 2])
    found = torch.vmap(lambda m: archflash.attention(Q, K, V, attn_mask=m))(stacked)
    for x, m in zip(found, stacked, strict=True):
        torch.testing.assert_close(x, archflash.attention(Q, K, V, attn_mask=m))


# --- the rest ---


@pytest.mark.parametrize(
    "name", ["attention", "attention_backward", "merge_attention", "quantize_fp8"]
)
def test_functional_tensors(name: str) -> None:
    call, given, named = CALLS[name]
    tensors = {n: x.clone() for n, x in named.items() if isinstance(x, Tensor)}
    others = {n: x for n, x in named.items() if n not in tensors}
    if name == "attention":  # inside a transform it is PyTorch's operations
        del others["implementation"]
    found = torch.func.functionalize(lambda *x, **y: call(*x, **y, **others))(*given, **tensors)
    assert_same(found, expected(name)[0])


def test_gradients_of_subclasses() -> None:
    for wrap in (lambda x: x.as_subclass(Tagged), torch.nn.Parameter):  # type: ignore[no-untyped-call]
        leaves = [wrap(x.float()).requires_grad_() for x in (Q, K, V)]
        archflash.attention(*leaves, causal=True).sum().backward()
        others = [x.float().requires_grad_() for x in (Q, K, V)]
        archflash.attention(*others, causal=True).sum().backward()
        for x, y in zip(leaves, others, strict=True):
            torch.testing.assert_close(plain(x.grad), y.grad)


def test_a_gradient_of_merged_wrappers() -> None:
    out = OUT.float().requires_grad_()
    merged, _ = archflash.merge_attention([out.as_subclass(Tagged), Q.float()], [LSE, LSE])
    merged.sum().backward()
    assert out.grad is not None
    torch.testing.assert_close(plain(out.grad), torch.full_like(out, 0.5))
    with pytest.raises(archflash.ForcedImplementationError, match="requires a gradient"):
        archflash.merge_attention([out.as_subclass(Tagged)] * 2, [LSE] * 2, **forced("ampere"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_in_float32_where_an_operator_serves(accumulate: bool) -> None:
    """As context parallelism asks for them, here under a mode and compiled: not rounded between."""

    def gradients() -> tuple[Tensor, ...]:
        into = {name: torch.ones(x.shape) for name, x in (("dq", Q), ("dk", K), ("dv", V))}
        return archflash.attention_backward(
            OUT, Q, K, V, OUT, LSE, **into, accumulate=accumulate, implementation="ampere"
        )

    plain_ones = gradients()
    assert plain_ones[0].dtype == torch.float32
    with FlopCounterMode(display=False):
        assert_same(gradients(), plain_ones)
    torch._dynamo.reset()
    assert_same(torch.compile(gradients, backend="aot_eager", fullgraph=True)(), plain_ones)
    rounded = archflash.attention_backward(Wrapper(OUT), Q, K, V, OUT, LSE, dq=torch.ones(Q.shape))
    assert [x.dtype for x in rounded] == [torch.float32, K.dtype, V.dtype]


def test_what_cannot_take_a_gradient_is_refused_where_an_operator_serves() -> None:
    q, k, v, out = (x.float() for x in (Q, K, V, OUT))
    with pytest.raises(TypeError, match=r"dq has dtype torch\.float64"):
        archflash.attention_backward(Wrapper(OUT), Q, K, V, OUT, LSE, dq=Q.double())
    with pytest.raises(ValueError, match="accumulate=True, but dq is None"):
        archflash.attention_backward(Wrapper(out), q, k, v, out, LSE, accumulate=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_default_device_moves_nothing(name: str) -> None:
    real = expected(name)
    with torch.device("meta"):
        assert_same(run(name, copied), real)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        found = run("attention_with_kvcache", lambda place, x: Wrapper(x.clone()))
        assert_same(found, expected("attention_with_kvcache"))


SPARSE: dict[str, Callable[[], Any]] = {
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(3, 4, 8), torch.ones(5, 4, 8)], layout=torch.jagged
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(4, 3, 8), torch.ones(4, 5, 8)]),
    "sparse": lambda: torch.ones(2, 4, 5, 8).to_sparse(),
    "mkldnn": lambda: torch.ones(2, 4, 5, 8).to_mkldnn(),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize(
    "name",
    [
        "attention", "attention_backward", "attention_with_kvcache", "attention_with_shared_prefix",
        "merge_attention", "quantize_fp8", "summarize_mask",
    ],
)  # fmt: skip
def test_nested_and_sparse_tensors_get_a_sentence(name: str, kind: str) -> None:
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no MKL-DNN")
    with pytest.raises(TypeError, match="nested or sparse"):
        run(name, lambda place, x: SPARSE[kind]() if place == 0 else x.clone())
