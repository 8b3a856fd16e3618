"""torch.func's transforms, forward-mode autograd, and gradients of gradients: right, or refused
with a sentence before anything runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import archflash

Function = Callable[..., Any]
TELLS_OF_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # PyTorch's CPU kernel, vmap
    pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU"),
]
N = 3  # examples of a vmap


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def int32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def qkv(nq: int = 3, nk: int = 4, d: int = 4, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads = ((4, nq), (2, nk), (2, nk))
    q, k, v = (rand(1, h, n, d, **options) for h, n in heads)
    return q, k, v


def by_the_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softcap: float | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """attention() by operations that have derivatives of every kind."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    nq, nk = scores.shape[-2:]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.exp()
    if causal:
        weights = weights * torch.ones(nq, nk, dtype=q.dtype).tril(nk - nq)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return weights / total @ v


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "softcap": lambda: {"softcap": 1.5},
    "mask": lambda: {"attn_mask": rand(3, 4)},
    "sinks": lambda: {"sinks": rand(4)},
}


def sum_of_squares(attend: Function, options: dict[str, Any]) -> Function:
    return lambda q, k, v: attend(q, k, v, **options).square().sum()


def outside_of_grad(f: Function, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Autograd differentiates what torch.func.grad gives."""
    leaf = q.clone().requires_grad_()
    inner = grad(lambda x: f(leaf, x, v))(k)
    return torch.autograd.grad(inner.square().sum(), leaf)


def reverse_over_forward(f: Function, q: Tensor, k: Tensor, v: Tensor) -> Any:
    leaf = q.clone().requires_grad_()
    with forward_ad.dual_level():
        result = f(leaf, forward_ad.make_dual(k, k * k), v)
        return torch.autograd.grad(forward_ad.unpack_dual(result).tangent, leaf)


def forward_over_reverse(f: Function, q: Tensor, k: Tensor, v: Tensor) -> Any:
    leaf = q.clone().requires_grad_()
    with forward_ad.dual_level():
        (dq,) = torch.autograd.grad(f(forward_ad.make_dual(leaf, q * q), k, v), leaf)
        return forward_ad.unpack_dual(dq).tangent


def penalty(f: Function, q: Tensor, k: Tensor, v: Tensor) -> Any:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)


def of_one(f: Function) -> Function:
    return lambda q, k, v: f(q[None], k[None], v[None])


TRANSFORMS: dict[str, Function] = {
    "grad": lambda f, *x: grad(f, argnums=(0, 1, 2))(*x),
    "grad of grad": lambda f, *x: grad(
        lambda *y: grad(f, argnums=1)(*y).square().sum(), argnums=(0, 1, 2)
    )(*x),
    "vmap of grad": lambda f, *x: vmap(grad(of_one(f), argnums=(0, 1, 2)))(*x),
    "vmap of grad of grad": lambda f, *x: vmap(
        grad(lambda *y: grad(of_one(f), argnums=1)(*y).square().sum())
    )(*x),
    "jvp": lambda f, *x: jvp(f, x, tuple(y.square() for y in x)),
    "jvp of grad": lambda f, *x: jvp(grad(f), x, tuple(y.square() for y in x)),
    "vjp": lambda f, *x: vjp(f, *x)[1](torch.tensor(2.0, dtype=x[0].dtype)),
    "jacfwd": lambda f, *x: jacfwd(f, argnums=2)(*x),
    "jacrev": lambda f, *x: jacrev(f, argnums=2)(*x),
    "hessian": lambda f, *x: hessian(f)(*x),
    "linearize": lambda f, *x: torch.func.linearize(f, *x)[1](*x),
    "outside of grad": outside_of_grad,
    "reverse over forward": reverse_over_forward,
    "forward over reverse": forward_over_reverse,
    "penalty": penalty,
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_every_kind_are_those_of_the_formula(transform: str, options: str) -> None:
    given, transformed = OPTIONS[options](), TRANSFORMS[transform]
    x = qkv()
    found, expected = (
        transformed(sum_of_squares(attend, given), *x)
        for attend in (archflash.attention, by_the_formula)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["sinks", "attn_mask"])
@pytest.mark.parametrize("transform", [grad, hessian, jacfwd])
def test_derivatives_by_what_is_no_input(transform: Function, name: str) -> None:
    x, given = qkv(), {"sinks": rand(4), "attn_mask": rand(3, 4)}[name]
    found, expected = (
        transform(lambda y, f=f: f(*x, **{name: y}).square().sum())(given)
        for f in (archflash.attention, by_the_formula)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_gradgradcheck_and_tangents_of_all_options_together() -> None:
    few_heads = (x[:, : x.shape[1] // 2] for x in qkv())  # each check takes the square of the time
    q, k, v = (x.clone().requires_grad_() for x in few_heads)
    bias, sinks = rand(3, 4).requires_grad_(), rand(2).requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return archflash.attention(q, k, v, attn_mask=bias, sinks=sinks, window=(1, 1), softcap=3.0)

    leaves = (q, k, v, bias, sinks)
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True)


FP8 = torch.float8_e4m3fn
STATES = torch.stack([torch.tensor([x, 7]) for x in range(N)])
# An option, and its values for the examples of a vmap.
BATCHED: dict[str, Callable[[], dict[str, Tensor]]] = {
    "sinks": lambda: {"sinks": rand(N, 4)},
    "attn_mask": lambda: {"attn_mask": rand(N, 4, 3, 4) > 0},
    "alibi_slopes": lambda: {"alibi_slopes": rand(N, 4, dtype=torch.float32)},
    "key_ranges": lambda: {
        "key_ranges": int32([[0, 3], [2, 4], [1, 2]])[:, None, None, None, None]
    },
    "block_mask": lambda: {"block_mask": torch.tensor([1, 0, 2]).bool()[:, None, None, None, None]},
    "q_offset": lambda: {"q_offset": int32([[1], [0], [2]])},
    "rng_state": lambda: {"rng_state": STATES},
    "cu_seqlens": lambda: {
        "cu_seqlens_q": int32([[0, 1, 3], [0, 3, 3], [0, 1, 2]]),
        "cu_seqlens_k": int32([[0, 2, 4], [0, 4, 4], [1, 2, 3]]),
    },
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_over_an_option(name: str) -> None:
    given = BATCHED[name]()
    q, k, v = qkv()
    more: dict[str, Any] = {"q_offset": {"causal": True}, "rng_state": {"dropout_p": 0.4}}
    if name == "cu_seqlens":
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))

    def call(*values: Tensor) -> Any:
        options = dict(zip(given, values, strict=True)) | more.get(name, {})
        return archflash.attention(q, k, v, **options)

    each = [call(*values) for values in zip(*given.values(), strict=True)]
    torch.testing.assert_close(vmap(call)(*given.values()), torch.stack(each))


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 2), (1, 3, 0)], ids=str)
def test_vmap_over_inputs_at_any_dimension(dims: tuple[int | None, ...]) -> None:
    x = [
        y if d is None else torch.stack([y, 2 * y, -y], d) for y, d in zip(qkv(), dims, strict=True)
    ]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, causal=True, return_lse=True)

    each = [
        call(*(y if d is None else y.select(d, i) for y, d in zip(x, dims, strict=True)))
        for i in range(N)
    ]
    found = vmap(call, in_dims=dims)(*x)
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))))


def test_randomness_of_vmap_is_that_of_the_dropped_weights() -> None:
    q, k, v = qkv(8, 8)

    def dropped(randomness: str) -> Tensor:
        call = vmap(lambda q: archflash.attention(q, k, v, dropout_p=0.5), randomness=randomness)
        return call(q.expand(2, *q.shape))

    one, other = dropped("different")
    assert not torch.equal(one, other)
    one, other = dropped("same")
    assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="randomness"):
        dropped("error")


def test_parts_are_merged_under_transforms() -> None:
    parts = [archflash.attention(*(x.float() for x in qkv()), return_lse=True) for _ in range(2)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))

    def merged(outs: Tensor, lses: Tensor) -> Tensor:
        return archflash.merge_attention(outs, lses)[0]

    each = torch.stack([merged(outs * x, lses) for x in (1, 2)])
    found = vmap(merged, in_dims=(0, None))(torch.stack([outs, 2 * outs]), lses)
    torch.testing.assert_close(found, each)
    _, tangent = jvp(merged, (outs, lses), (outs, torch.zeros_like(lses)))
    torch.testing.assert_close(tangent, merged(outs, lses))  # it is linear in the outputs


def test_vmap_over_gradients_that_are_asked_for_by_hand() -> None:
    q, k, v = qkv()
    out, lse = archflash.attention(q, k, v, causal=True, return_lse=True)
    dout = rand(N, *out.shape)

    def call(dout: Tensor) -> Any:
        return archflash.attention_backward(dout, q, k, v, out, lse, causal=True)

    each = zip(*(call(x) for x in dout), strict=True)
    torch.testing.assert_close(vmap(call)(dout), tuple(map(torch.stack, each)))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_vmap_over_the_quantiser(per: str) -> None:
    x = rand(N, 1, 2, 70, 8, dtype=torch.float32)

    def call(x: Tensor) -> Any:
        values, descale = archflash.quantize_fp8(x, per=per)
        return values.float(), descale

    each = zip(*(call(y) for y in x), strict=True)
    torch.testing.assert_close(vmap(call)(x), tuple(map(torch.stack, each)))


# --- kernels ---


def of_kernel(x: Tensor) -> Tensor:
    return x.float().requires_grad_()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_gradients_through_a_kernel(options: str) -> None:
    """The first ones are the kernel's, the second ones those of plain operations."""
    x, given = qkv(3, 4, 16), OPTIONS[options]()
    names = [name for name, y in given.items() if isinstance(y, Tensor)]
    exact = [y.clone().requires_grad_() for y in (*x, *(given[name] for name in names))]

    def second(leaves: list[Tensor], **call: Any) -> list[Tensor]:
        call |= given | dict(zip(names, leaves[3:], strict=True))
        out, lse = archflash.attention(*leaves[:3], return_lse=True, **call)
        loss = out.sin().sum() + lse.sin().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        again = torch.autograd.grad(sum(y.square().sum() for y in first), leaves, create_graph=True)
        third = torch.autograd.grad(again[0].sum(), leaves)
        return [*first, *again, *third]

    found = second([of_kernel(y.detach()) for y in exact], implementation="simt")
    for one, other in zip(found, second(exact), strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-3, rtol=2e-3)


def test_each_of_several_inputs_that_are_one_tensor_has_its_own_second_gradients() -> None:
    def second(x: Tensor, kernel: str | None) -> Tensor:
        out = archflash.attention(x, x, x, causal=True, implementation=kernel)
        (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    x = rand(1, 2, 5, 16)
    leaf = x.clone().requires_grad_()
    out = by_the_formula(leaf, leaf, leaf, causal=True)
    (first,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
    (exact,) = torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(second(x.clone().requires_grad_(), None), exact)
    torch.testing.assert_close(second(of_kernel(x), "simt").double(), exact, atol=1e-4, rtol=1e-4)


def test_checkpointed_calls_have_first_gradients_with_create_graph() -> None:
    """And second ones where a kernel serves. PyTorch's fused kernels raise for these."""
    x = [rand(1, 2, 4, 16) for _ in "qkv"]

    def gradients(call: Function, leaves: list[Tensor]) -> Any:
        out = checkpoint(call, *leaves, use_reentrant=False)
        return torch.autograd.grad(out.square().sum(), leaves, create_graph=True)

    exact = gradients(by_the_formula, [y.clone().requires_grad_() for y in x])
    found = gradients(archflash.attention, [y.clone().requires_grad_() for y in x])
    torch.testing.assert_close(found, exact)
    with pytest.raises(RuntimeError, match="not implemented"):
        found[0].sum().backward()
    leaves = [of_kernel(y) for y in x]
    of_simt = functools.partial(archflash.attention, implementation="simt")
    (second,) = torch.autograd.grad(gradients(of_simt, leaves)[0].square().sum(), leaves[1])
    leaves = [y.clone().requires_grad_() for y in x]
    (expected,) = torch.autograd.grad(
        gradients(by_the_formula, leaves)[0].square().sum(), leaves[1]
    )
    torch.testing.assert_close(second.double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "simt"},
        {"implementation": "simt", "sinks": torch.zeros(4), "dropout_p": 0.5},
        pytest.param(
            {"softcap": 9.0}, marks=pytest.mark.skipif(not TELLS_OF_HOOKS, reason="an old PyTorch")
        ),
        pytest.param({}, marks=pytest.mark.skipif(not TELLS_OF_HOOKS, reason="an old PyTorch")),
    ],
    ids=str,
)
@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_a_mode_may_watch_one_pass_of_a_checkpointed_call(
    watched: str, options: dict[str, Any]
) -> None:
    """Such as a counter of operations around a model: both passes save the same tensors."""

    def gradients(*modes: contextlib.AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        x = [of_kernel(y) for y in qkv(3, 4, 16)]
        with modes[0]:
            call = functools.partial(archflash.attention, **options)
            out = checkpoint(call, *x, use_reentrant=False)
        with modes[1]:
            return torch.autograd.grad(out.sum(), x)

    nothing, counter = contextlib.nullcontext(), FlopCounterMode(display=False)
    modes = (counter, nothing) if watched == "forward" else (nothing, counter)
    torch.testing.assert_close(gradients(*modes), gradients(nothing, nothing), rtol=0, atol=0)


def test_a_tangent_of_the_outputs_gradient_is_not_lost() -> None:
    q, k, v = (of_kernel(x) for x in qkv(3, 4, 16))
    out = archflash.attention(q, k, v, implementation="simt")
    tangent = torch.randn_like(out)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), tangent)
        (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
        found = forward_ad.unpack_dual(dq).tangent
    (expected,) = torch.autograd.grad(out, q, tangent)  # the gradient is linear in it
    torch.testing.assert_close(found, expected)


def test_a_kernel_serves_a_call_without_tangents_beside_forward_mode() -> None:
    q, k, v = (x.float() for x in qkv(3, 4, 16))
    with forward_ad.dual_level():
        forward_ad.make_dual(q.clone(), q)
        out = archflash.attention(q, k, v, implementation="simt")
        with pytest.raises(archflash.ForcedImplementationError, match="need PyTorch's own"):
            archflash.attention(forward_ad.make_dual(q, q), k, v, implementation="simt")
    torch.testing.assert_close(out, archflash.attention(q, k, v))


# --- what has no derivative ---

CACHE = {"k_cache": (1, 9, 1, 8), "v_cache": (1, 9, 1, 8), "q": (1, 1, 2, 8), "k_new": (1, 1, 1, 8)}
CACHE |= {"v_new": (1, 1, 1, 8), "qv": (1, 1, 2, 8), "sinks": (2,), "alibi_slopes": (2,)}
CACHE |= {"rotary_cos": (9, 2), "rotary_sin": (9, 2)}


def with_cache(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    given = {n: torch.randn(shape) for n, shape in CACHE.items()}
    for other in ("rotary_cos", "rotary_sin") if name == "qv" else ("qv",):
        del given[other]  # not both
    given[name] = change(given[name])
    return archflash.attention_with_kvcache(cache_seqlens=int32([4]), **given)


def refused(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Calls every function that has no derivative by an argument of this name."""
    function, argument = name.split(".")
    x = torch.randn(1, 2, 5, 8)
    if function == "quantize_fp8":
        archflash.quantize_fp8(change(x))
    elif function == "attention_with_kvcache":
        with_cache(argument, change)
    elif function == "attention_with_shared_prefix":
        rows = {
            n: torch.randn(1, 5, 2, 8) for n in ("q", "k_prefix", "v_prefix", "k_cache", "v_cache")
        }
        rows[argument] = change(rows[argument])
        archflash.attention_with_shared_prefix(**rows, cache_seqlens=int32([5]))
    else:
        out, lse = archflash.attention(x, x, x, return_lse=True)
        given = {"dout": x, "q": x, "k": x, "v": x, "out": out, "lse": lse, "dlse": lse}
        options = {"sinks": torch.zeros(2), "attn_mask": torch.zeros(5, 5)}
        options |= {"alibi_slopes": torch.zeros(2)}
        given |= options if argument in options else {}
        given[argument] = change(given[argument].clone())
        archflash.attention_backward(**given)


WITHOUT = [
    "quantize_fp8.x",
    *(f"attention_with_kvcache.{name}" for name in CACHE),
    *(f"attention_with_shared_prefix.{name}" for name in ("q", "k_prefix", "v_cache")),
    *(
        f"attention_backward.{name}"
        for name in ("dout", "q", "v", "out", "lse", "dlse", "sinks", "attn_mask", "alibi_slopes")
    ),
]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_derivative_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(archflash.UnsupportedError, match="requires a gradient"):
        refused(name, lambda x: x.requires_grad_())
    with torch.no_grad():
        refused(name, lambda x: x.requires_grad_())
    with (
        forward_ad.dual_level(),
        pytest.raises(archflash.UnsupportedError, match=r"tangent|forward-mode"),
    ):
        refused(name, lambda x: forward_ad.make_dual(x, torch.ones_like(x)))


def test_operators_refuse_tangents_that_they_would_drop() -> None:
    """A traced module calls operators, which have no tangents."""
    q, lengths = torch.randn(1, 5, 1, 8), int32([3])

    def call(q: Tensor) -> Any:
        return archflash.attention(q, q, q)

    def with_cache(q: Tensor) -> Any:
        return archflash.attention_with_kvcache(q, q, q, cache_seqlens=lengths)

    for function in (call, with_cache):
        traced = torch.jit.trace(function, (q,), check_trace=False)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="tangent of forward-mode"):
            traced(forward_ad.make_dual(q, q))
    traced = torch.jit.trace(call, (q,), check_trace=False)
    with pytest.raises(RuntimeError, match="tangent of forward-mode"):
        jvp(traced, (q,), (q,))


def test_vmap_over_a_call_with_a_cache_is_refused() -> None:
    cache = torch.randn(2, 9, 1, 8)
    with pytest.raises(archflash.UnsupportedError, match="vmap"):
        vmap(
            lambda q: archflash.attention_with_kvcache(q, cache, cache, cache_seqlens=int32([3, 4]))
        )(torch.randn(N, 2, 1, 2, 8))


def backward_of_itself(x: Tensor) -> Tensor:
    out, lse = archflash.attention(x, x, x, return_lse=True)
    return archflash.attention_backward(x, x, x, x, out, lse)[0]


@pytest.mark.parametrize(
    "function",
    [backward_of_itself, lambda x: archflash.quantize_fp8(x)[1]],
    ids=["backward", "fp8"],
)
def test_a_gradient_that_vmap_hides_is_refused(function: Any) -> None:
    x = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(archflash.UnsupportedError, match="requires a gradient"):
        torch.func.grad(lambda y: torch.func.vmap(function)(y).sum())(x)
    with pytest.raises(archflash.UnsupportedError, match="requires a gradient"):
        torch.func.vmap(function)(x.clone().requires_grad_())
    with pytest.raises(archflash.UnsupportedError, match="tangent"):
        torch.func.jvp(torch.func.vmap(function), (x,), (x,))


def test_merging_inside_of_jvp_and_vmap() -> None:
    out, lse = torch.randn(3, 1, 2, 4, 8), torch.randn(3, 1, 2, 4)

    def merge(x: Tensor, implementation: str | None = None) -> Tensor:
        parts = ([x, x * 2], [lse[0], lse[0] + 1])
        return archflash.merge_attention(*parts, implementation=implementation)[0]

    found = torch.func.jvp(torch.func.vmap(merge), (out,), (out,))
    torch.testing.assert_close(found[1], found[0])  # it is linear in the outputs
    each = torch.func.vmap(lambda x: merge(x, "torch"))(out)
    torch.testing.assert_close(each, torch.stack([merge(x) for x in out]))


INSIDE_OF_COMPILED: dict[str, Function] = {
    **{name: lambda q, k, v, name=name: TRANSFORMS[name](plain_loss, q, k, v) for name in (
        "grad", "vmap of grad", "jvp", "hessian",
    )},
    "vmap": lambda q, k, v: vmap(of_one(archflash.attention))(q, k, v),
    "log-sum-exp": lambda q, k, v: grad(
        lambda x: archflash.attention(x, k, v, causal=True, return_lse=True)[1].sum()
    )(q),
    "merge": lambda q, k, v: vmap(
        lambda x, y: archflash.merge_attention([x, -x], [y, y])[0]
    )(q[None], q[None, ..., 0]),
    "quantiser": lambda q, k, v: vmap(lambda x: archflash.quantize_fp8(x)[0].float())(q[None]),
}  # fmt: skip


def plain_loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return archflash.attention(q, k, v, softcap=1.5).square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE_OF_COMPILED)
def test_transforms_inside_of_compiled_functions(name: str) -> None:
    """torch.compile traces them: the operators, which have no tangents, would lose these."""
    given = qkv(dtype=torch.float32)
    function = INSIDE_OF_COMPILED[name]
    wanted = function(*given)
    torch.compiler.reset()
    found = torch.compile(function, backend="eager", fullgraph=True)(*given)
    torch.testing.assert_close(found, wanted)


def test_a_forced_kernel_refuses_transforms_inside_of_compiled_functions() -> None:
    q, k, v = qkv(dtype=torch.float32)
    derivative = grad(lambda x: archflash.attention(x, k, v, implementation="simt").sum())
    torch.compiler.reset()
    with pytest.raises(Exception, match="is forced, but"):
        torch.compile(derivative, backend="eager", fullgraph=True)(q)
