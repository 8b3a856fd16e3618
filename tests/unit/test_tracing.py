"""torch.jit.trace records a call as one operator, which works for other values and sizes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

import archflash
from archflash.compat import flash_attn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(torch.jit|TorchScript):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(torch.jit|TorchScript):FutureWarning"),
    pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU"),
]
Function = Callable[..., Any]
Tensors = tuple[Tensor, ...]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def int32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def qkv(nq: int, nk: int, batch: int = 1) -> Tensors:
    return rand(batch, 2, nq, 16), rand(batch, 1, nk, 16), rand(batch, 1, nk, 16)


def traced_and_loaded(function: Function, given: Tensors) -> list[Any]:
    """The traced function, and the same saved and loaded. PyTorch warns of everything that it
    treats as a constant of the inputs that it sees.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(function, given, check_trace=False)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return [traced, torch.jit.load(file)]


def check(function: Function, seen: Tensors, other: Tensors) -> None:
    for call in traced_and_loaded(function, seen):
        for given in (seen, other):
            mine, theirs = ([x.clone() for x in given] for _ in range(2))
            expected = function(*theirs)
            torch.testing.assert_close(call(*mine), expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(mine, theirs)  # what it writes in place


SEEN, OTHER = (5, 7), (9, 12, 3)
BIAS = causal_upper_left(5, 7)
# The options of a call, of the tensors that are given beside q, k and v, and these.
CALLS: dict[str, tuple[Callable[..., dict[str, Any]], Tensors, Tensors]] = {
    "plain": (lambda: {}, (), ()),
    "numbers": (
        lambda: {"causal": True, "window": (3, None), "softcap": 2.0, "scale": 0.3}, (), (),
    ),
    "lse": (lambda: {"return_lse": True, "q_offset": 1, "causal": True}, (), ()),
    "sinks": (lambda x: {"sinks": x}, (rand(2),), (rand(2),)),
    "mask": (lambda x: {"attn_mask": x}, (rand(5, 7),), (rand(9, 12),)),
    "ranges": (
        lambda x: {"key_ranges": x}, (int32([[[[[0, 3]]]]]),), (int32([[[[[2, 9]]]]]),),
    ),
    "offset": (
        lambda x: {"causal": True, "q_offset": x}, (int32([1]),), (int32([1, 2, 3]),),
    ),
    "dropout": (
        lambda x: {"dropout_p": 0.3, "rng_state": x},
        (torch.tensor([5, 6]),), (torch.tensor([7, 8]),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_traced_call_is_right_for_other_values_and_sizes(name: str) -> None:
    options, seen, other = CALLS[name]

    def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        return archflash.attention(q, k, v, **options(*more))

    check(call, (*qkv(*SEEN), *seen), (*qkv(*OTHER), *other))


def test_a_traced_bias_is_for_its_own_lengths() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, attn_mask=BIAS, window=(2, None))

    check(call, qkv(5, 7), qkv(5, 7, 2))


def test_a_forced_kernel_is_recorded() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, implementation="simt") + 1

    check(call, qkv(*SEEN), qkv(*OTHER))


def test_lengths_that_are_hints_are_not_recorded() -> None:
    """A kernel leaves rows out behind a hint that is too small."""

    def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        return archflash.attention(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=5, max_seqlen_k=5,
            implementation="simt",
        )  # fmt: skip

    def packed(*ends: int) -> Tensors:
        total = ends[-1]
        cu = int32([0, *ends])
        return rand(total, 2, 16), rand(total, 1, 16), rand(total, 1, 16), cu, cu

    check(call, packed(3, 8), packed(40, 90, 100))


def test_an_output_that_is_given_is_written() -> None:
    check(
        lambda q, k, v: archflash.attention(q, k, v, out=torch.empty_like(q)),
        qkv(*SEEN),
        qkv(*OTHER),
    )


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python float")
def test_a_number_made_of_sizes_is_a_constant_of_which_pytorch_warns() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k, v, scale=q.shape[-1] ** -0.5)

    given = qkv(*OTHER)
    with pytest.warns(torch.jit.TracerWarning, match="Python float"):
        traced = torch.jit.trace(call, qkv(*SEEN), check_trace=False)
    torch.testing.assert_close(traced(*given), call(*given))


def test_wrong_calls_are_refused_while_tracing() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.attention(q, k[:, :, :3], v)

    with pytest.raises(ValueError, match="v has shape"):
        torch.jit.trace(call, qkv(*SEEN))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("kernel", [None, "simt"])
def test_autograd_differentiates_a_traced_call(kernel: str | None, requires_grad: bool) -> None:
    """Also one that was traced where no gradients were needed."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return archflash.attention(q, k, v, causal=True, **options)

    def trace(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return call(q, k, v, implementation=kernel)

    given = [x.requires_grad_(requires_grad) for x in qkv(*SEEN)]
    traced = torch.jit.trace(trace, tuple(given), check_trace=False)
    leaves = [x.requires_grad_() for x in qkv(*OTHER)]
    for _ in range(2):  # the second call is the one that TorchScript has optimised
        found = torch.autograd.grad(traced(*leaves).sin().sum(), leaves)
    expected = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_traced_call_differentiates_what_no_kernel_does() -> None:
    slopes = torch.rand(2, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Any:
        return archflash.attention(q, k, v, alibi_slopes=slopes)

    given = (*qkv(*SEEN), slopes)
    traced = torch.jit.trace(call, given, check_trace=False)
    (found,) = torch.autograd.grad(traced(*given).sin().sum(), slopes)
    (expected,) = torch.autograd.grad(call(*given).sin().sum(), slopes)
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_drop_in_is_traced(causal: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return archflash.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    check(call, qkv(6, 6), qkv(*OTHER))  # of other lengths causal means something else
    traced = torch.jit.trace(call, qkv(6, 6), check_trace=False)
    assert "archflash::attention" in str(traced.inlined_graph)


def test_a_drop_in_call_that_has_to_be_reshaped_is_recorded_as_pytorchs() -> None:
    check(archflash.scaled_dot_product_attention, (rand(2, 5, 8),) * 3, (rand(4, 9, 8),) * 3)


def caches(batch: int, n: int, capacity: int, lengths: list[int]) -> Tensors:
    rows = [rand(batch, capacity, 1, 16) for _ in "kv"] + [int32(lengths)]
    return (rand(batch, n, 2, 16), *rows, rand(batch, n, 1, 16), rand(batch, n, 1, 16))


@pytest.mark.parametrize("kernel", [None, "simt"])
def test_a_traced_call_appends_to_the_caches_that_it_gets(kernel: str | None) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, k_new: Tensor, v_new: Tensor) -> Any:
        return archflash.attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, k_new=k_new, v_new=v_new, causal=True,
            implementation=kernel,
        )  # fmt: skip

    check(call, caches(2, 1, 20, [5, 9]), caches(3, 4, 32, [5, 19, 1]))


def test_a_latent_cache_is_traced() -> None:
    def call(q: Tensor, cache: Tensor, lengths: Tensor) -> Any:
        return archflash.attention_with_kvcache(q, cache, cache_seqlens=lengths, dv=8)

    check(
        call,
        (rand(2, 1, 2, 16), rand(2, 20, 1, 16), int32([5, 9])),
        (rand(3, 2, 2, 16), rand(3, 30, 1, 16), int32([3, 4, 30])),
    )


def test_gradients_that_are_asked_for_by_hand_are_traced() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
        out, lse = archflash.attention(q, k, v, return_lse=True)
        return archflash.attention_backward(
            dout, q, k, v, out, lse, dlse=2 * lse, dq=torch.ones_like(q), dk=torch.ones_like(k),
            dv=torch.ones_like(v), accumulate=True,
        )  # fmt: skip

    given = [qkv(*SEEN), qkv(*OTHER)]
    check(call, *((*x, torch.randn_like(x[0])) for x in given))


def test_parts_that_are_merged_are_traced() -> None:
    check(
        archflash.merge_attention,
        (rand(2, 1, 2, 5, 8), rand(2, 1, 2, 5)),
        (rand(2, 3, 4, 7, 8), rand(2, 3, 4, 7)),
    )

    def prefix(q: Tensor, k: Tensor, v: Tensor, own: Tensor, lengths: Tensor) -> Any:
        return archflash.attention_with_shared_prefix(q, k, v, own, own, cache_seqlens=lengths)

    def rows(batch: int, n: int, lengths: list[int]) -> Tensors:
        shared = [rand(1, n, 1, 16) for _ in "kv"]
        return rand(batch, 2, 2, 16), *shared, rand(batch, 30, 1, 16), int32(lengths)

    check(prefix, rows(2, 9, [3, 4]), rows(3, 19, [3, 30, 7]))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_the_quantiser_is_traced(per: str) -> None:
    def call(x: Tensor) -> Any:
        values, descale = archflash.quantize_fp8(x, per=per)
        return values.float(), descale

    check(call, (rand(1, 2, 65, 8),), (rand(2, 3, 130, 8),))


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
def test_masks_are_traced_or_refused() -> None:
    masks = archflash.masks
    one, other = int32([[[[[0, 3]]]]]), int32([[[[[2, 5], [1, 2]]]]])
    traced = torch.jit.trace(lambda x: masks.to_dense(x, 7), (one,), check_trace=False)
    assert torch.equal(traced(other), masks.to_dense(other, 7))
    with pytest.raises(archflash.UnsupportedError, match="outside of the traced function"):
        torch.jit.trace(lambda x: masks.from_query_ranges(x, 7), (one,))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_transform_inside_of_a_traced_function_is_refused(transform: Function) -> None:
    def loss(x: Tensor) -> Tensor:
        x = x.reshape(1, 2, -1, 8)
        return archflash.attention(x, x, x).sum()

    with pytest.raises(archflash.UnsupportedError, match="records no transform"):
        torch.jit.trace(transform(loss), (rand(1, 2, 5, 8),))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        out: Tensor = archflash.attention(y, y, y, causal=True)
        return out


def test_a_layer_with_parameters_passes_the_check_of_its_trace() -> None:
    layer, x = Layer(), rand(1, 2, 9, 16)
    traced = torch.jit.trace(layer, (x,))  # which records it twice, once without gradients
    gradients = []
    for call in (layer, traced):
        layer.zero_grad()
        call(x).square().sum().backward()
        weight = layer.project.weight.grad
        assert weight is not None
        gradients.append(weight.clone())
    torch.testing.assert_close(*gradients)


# --- torch.fx.symbolic_trace, which calls functions with objects in the place of tensors ---

RECORDED: dict[str, tuple[Function, str]] = {
    "attention": (lambda q, k, v, n: archflash.attention(q, k, v, causal=True), "attention"),
    "number drawn": (
        lambda q, k, v, n: archflash.attention(q, k, v, dropout_p=0.5, implementation="torch"),
        "attention",
    ),
    "pair": (lambda q, k, v, n: archflash.attention(q, k, v, return_lse=True)[1], "attention"),
    "mask": (
        lambda q, k, v, n: archflash.attention(q, k, v, attn_mask=k[:, :1, None, :, 0] > 0),
        "attention",
    ),
    "probability": (
        lambda q, k, v, n: archflash.scaled_dot_product_attention(q, k, v, None, n.dim() - 1.0),
        "scaled_dot_product_attention",
    ),
    "PyTorch's": (
        lambda q, k, v, n: archflash.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "scaled_dot_product_attention",
    ),
    "cache": (
        lambda q, k, v, n: archflash.attention_with_kvcache(
            q, k, v, cache_seqlens=n, layout="bhnd"
        ),
        "attention_with_kvcache",
    ),
    "latent cache": (
        lambda q, k, v, n: archflash.attention_with_kvcache(
            q, k, cache_seqlens=n, layout="bhnd", dv=8
        ),
        "attention_with_kvcache",
    ),
    "prefix": (
        lambda q, k, v, n: archflash.attention_with_shared_prefix(
            q, k[:1], v[:1], k, v, cache_seqlens=n, layout="bhnd"
        ),
        "attention_with_shared_prefix",
    ),
    "merge": (
        lambda q, k, v, n: archflash.merge_attention([q, q], [q[..., 0], q[..., 1]])[0],
        "merge_attention",
    ),
    "gradients": (
        lambda q, k, v, n: archflash.attention_backward(
            q, q, k, v, q, q[..., 0].contiguous(), causal=True
        )[1],
        "attention_backward",
    ),
    "dropout": (
        lambda q, k, v, n: archflash.dropout_mask((1, 2, 3, 4), 0.5, n.long()),
        "dropout_mask",
    ),
    "float8": (lambda q, k, v, n: archflash.quantize_fp8(q)[1], "quantize_fp8"),
    "MXFP8": (lambda q, k, v, n: archflash.quantize_mxfp8(q, dim=-2)[1].float(), "quantize_mxfp8"),
    "NVFP4": (lambda q, k, v, n: archflash.quantize_nvfp4(q)[2], "quantize_nvfp4"),
    "four bits": (
        lambda q, k, v, n: archflash.attention_nvfp4(
            *(archflash.quantize_nvfp4(q[..., :16, :], dim=x) for x in (-1, -1, -2))
        ),
        "attention_nvfp4",
    ),
    "summary": (lambda q, k, v, n: archflash.summarize_mask(q[..., 0, None] > 0), "summarize_mask"),
    "maker of a mask": (lambda q, k, v, n: archflash.masks.prefix_lm(n, 9), "prefix_lm"),
    "flash-attn": (
        lambda q, k, v, n: flash_attn.flash_attn_func(q, k, v, softmax_scale=0.3),
        "flash_attn_func",
    ),
    "flash-attn's cache": (
        lambda q, k, v, n: flash_attn.flash_attn_with_kvcache(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=n
        ),
        "flash_attn_with_kvcache",
    ),
    "flash-attn's packed": (
        lambda q, k, v, n: flash_attn.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2)),
        "flash_attn_qkvpacked_func",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_fx_records_a_call_as_it_is(name: str) -> None:
    function, called = RECORDED[name]
    recorded = torch.fx.symbolic_trace(function)
    assert [node.target.__name__ for node in recorded.graph.nodes if called in node.name] == [
        called
    ]
    for rows in (5, 9):
        given = (*qkv(rows, rows, batch=2), int32([3, 5]))
        torch.manual_seed(rows)
        expected = function(*given)
        torch.manual_seed(rows)
        assert torch.equal(recorded(*given), expected)
