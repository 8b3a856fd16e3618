"""What calls beside archflash.attention refuse, and that attention_backward refuses the same
whichever way a call takes: in C++, or through PyTorch's dispatcher where a mode watches it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

import archflash
from archflash import ForcedImplementationError, UnsupportedError, _gradients, _options, reference
from archflash._api import find_device
from archflash.compat import flash_attn_interface as interface3
from archflash.compat import flash_mla
from archflash.compat.flash_attn import _private as interface2
from archflash.compat.flash_attn import cute
from archflash.compat.flash_attn.layers import rotary
from archflash.reference.blocks import seen_keys

Q = torch.randn(1, 2, 5, 16, generator=torch.manual_seed(0))
ROWS_FIRST = Q.transpose(1, 2)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# --- explain ---


def test_explain_of_tensors_without_a_device_asks_for_a_gpu() -> None:
    q = Q.to("meta")
    with pytest.raises(ValueError, match="q is on the meta device: name the GPU to explain for"):
        archflash.explain(q, q, q)
    with pytest.raises(ValueError, match="device is xpu:1: name a GPU, a CUDA device or the CPU"):
        archflash.explain(Q, Q, Q, device=torch.device("xpu", 1))


def test_lists_of_keys_are_checked_in_every_call_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists = int32(3, 3).reshape(1, 1, 1, 2).expand(1, 1, 5, 2).contiguous()
    archflash.attention(Q, Q[:, :1], Q[:, :1], key_indices=lists)
    monkeypatch.setattr("archflash._api._always_check", True)  # as ARCHFLASH_CHECK=1 does
    empty = archflash.attention(Q[:, :, :0], Q[:, :1], Q[:, :1], key_indices=lists[:, :, :0])
    assert empty.shape == (1, 2, 0, 16)
    with pytest.raises(ValueError, match=r"key_indices\[0, 0, 0\] names key 3 twice"):
        archflash.attention(Q, Q[:, :1], Q[:, :1], key_indices=lists)
    with pytest.raises(ValueError, match="key_indices has shape"):
        archflash.attention(Q, Q[:, :1], Q[:, :1], key_indices=lists[:, :, :3])


# id: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, and what is said, of 30 rows of q and
# 100 of k; nothing where all is right
SEQUENCES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int | None, int | None, str]] = {
    "right": ((0, 12, 30), (0, 70, 100), 18, 70, ""),
    "a prefix that sequences share": ((0, 12, 12, 30), (0, 70, 40, 100), 30, 70, ""),
    "rows of no sequence": ((3, 12), (40, 70), None, None, ""),
    "no sequence": ((0,), (0,), 0, 0, ""),
    "q falls": ((0, 30, 12), (0, 70, 100), None, None, "cu_seqlens_q[2] is 12: it must be from 0 "
                "to total_q = 30, in ascending order"),
    "q below 0": ((-1, 12, 30), (0, 70, 100), None, None, "cu_seqlens_q[0] is -1"),
    "q beyond": ((0, 12, 31), (0, 70, 100), None, None, "cu_seqlens_q[2] is 31"),
    "k falls": ((0, 12, 13, 30), (0, 70, 40, 100), None, None, "cu_seqlens_k[2] is 40: it must be "
                "from 0 to total_k = 100, in ascending order where a sequence has queries"),
    "k beyond": ((0, 12, 30), (0, 70, 101), None, None, "cu_seqlens_k[2] is 101"),
    "q too long": ((0, 12, 30), (0, 70, 100), 17, 70, "the length of q's sequence[1] is 18: it must"
                   " be at most max_seqlen_q = 17: pass the longest length or more, or leave it"),
    "k too long": ((0, 12, 30), (0, 70, 100), 18, 69, "the length of k's sequence[0] is 70"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
def test_packed_sequences_are_checked_where_that_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_q, of_k, longest_q, longest_k, said = SEQUENCES[name]
    q, k = torch.zeros(30, 2, 16), torch.zeros(100, 2, 16)
    call: dict[str, Any] = {
        "cu_seqlens_q": int32(*of_q), "cu_seqlens_k": int32(*of_k), "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }  # fmt: skip
    lse = torch.zeros(2, 30)
    monkeypatch.setattr("archflash._api._always_check", True)
    monkeypatch.setattr("archflash._backward._always_check", True)
    for passes in (
        lambda: archflash.attention(q, k, k, **call),
        lambda: archflash.attention_backward(q, q, k, k, q, lse, **call),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) if said else contextlib.nullcontext():
            passes()


def test_what_has_no_values_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta and fake tensors, and what stands for tensors while torch.fx records a call."""
    monkeypatch.setattr("archflash._api._always_check", True)
    monkeypatch.setattr("archflash._kvcache._always_check", True)

    def call(q: Tensor, k: Tensor, ends: Tensor) -> Tensor:
        return archflash.attention(q, k, k, cu_seqlens_q=ends, cu_seqlens_k=ends)

    shapes = ((30, 2, 16), (30, 2, 16))
    meta = [torch.zeros(x, device="meta") for x in shapes]
    assert call(*meta, torch.zeros(3, dtype=torch.int32, device="meta")).shape == (30, 2, 16)
    with FakeTensorMode() as mode:
        fake = [torch.zeros(x) for x in shapes]
        assert call(*fake, torch.zeros(3, dtype=torch.int32)).shape == (30, 2, 16)
    del mode
    recorded = torch.fx.symbolic_trace(lambda q, k: archflash.attention(q, k, k))
    assert any(node.target is archflash.attention for node in recorded.graph.nodes)


# --- attention_backward, by both ways ---


class Watching(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


OUT, LSE = archflash.attention(Q, Q, Q, return_lse=True)
MASK = torch.zeros(1, 1, 5, 5)
WRONG_BACKWARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float8": (
        {x: Q.to(torch.float8_e4m3fn) for x in ("q", "k", "v")} | {"out": OUT.bfloat16()},
        TypeError, "float8, which have no gradients: convert them to bfloat16",
    ),
    "dout dtype": ({"dout": OUT.half()}, TypeError, "dout has dtype torch.float16: it must be"),
    "dout shape": ({"dout": OUT[:, :, :4]}, ValueError, "dout has shape (1, 2, 4, 16): it must be"),
    "dout device": ({"dout": OUT.to("meta")}, (TypeError, ValueError), "dout is on"),
    "lse dtype": ({"lse": LSE.double()}, TypeError, "lse has dtype torch.float64"),
    "lse shape": ({"lse": LSE[:, :1]}, ValueError, "lse has shape (1, 1, 5): it must be (1, 2, 5)"),
    "dlse shape": ({"dlse": LSE[:, :1]}, ValueError, "dlse has shape (1, 1, 5)"),
    "no mask": ({"mask_gradient": True}, TypeError, "mask_gradient=True, and attn_mask is None"),
    "bool mask": (
        {"mask_gradient": True, "attn_mask": MASK == 0}, TypeError, "attn_mask is torch.bool: only",
    ),
    "nothing to add to": (
        {"accumulate": True}, ValueError, "accumulate=True, but dq is None: pass the tensor to add",
    ),
    "wrong dq": ({"dq": Q[:, :1]}, ValueError, "dq has shape (1, 1, 5, 16): it must be (1, 2"),
    "overlapping dk": (
        {"dk": torch.zeros(1, 1, 5, 16).expand(1, 2, 5, 16)}, ValueError, "its elements overlap",
    ),
    "dv with a gradient": (
        {"dv": Q.clone().requires_grad_()}, ValueError, "dv requires a gradient: pass its detach()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", [contextlib.nullcontext, Watching], ids=["eager", "watched"])
@pytest.mark.parametrize("name", WRONG_BACKWARD)
def test_wrong_gradients_are_refused_alike(name: str, way: Callable[[], Any]) -> None:
    given, kind, said = WRONG_BACKWARD[name]
    call: dict[str, Any] = {"dout": OUT, "q": Q, "k": Q, "v": Q, "out": OUT, "lse": LSE, **given}
    tensors = [call.pop(x) for x in ("dout", "q", "k", "v", "out", "lse")]
    with way(), pytest.raises(kind, match=re.escape(said)):
        archflash.attention_backward(*tensors, **call)


@pytest.mark.parametrize("way", [contextlib.nullcontext, Watching], ids=["eager", "watched"])
def test_gradients_of_every_kind_are_given_alike(way: Callable[[], Any]) -> None:
    sinks = torch.tensor([0.5, -1.0])
    bias = causal_lower_right(5, 5)
    for options, more in (
        ({"attn_mask": MASK, "sinks": sinks}, {"mask_gradient": True}),
        ({"attn_mask": bias}, {}), ({"causal": True, "window": [2, 0]}, {}),
    ):  # fmt: skip
        out, lse = archflash.attention(Q, Q, Q, return_lse=True, **options)
        into = [torch.ones_like(Q) for _ in range(3)]
        with way():
            found = archflash.attention_backward(out, Q, Q, Q, out, lse, **options, **more)
            added = archflash.attention_backward(
                out, Q, Q, Q, out, lse, dq=into[0], dk=into[1], dv=into[2], accumulate=True,
                **options, **more,
            )  # fmt: skip
        expected = reference.attention_backward(out, Q, Q, Q, **options)
        assert len(found) == 3 + 2 * len(more)
        for name, one, sum_ in zip(("dq", "dk", "dv"), found, added, strict=False):
            torch.testing.assert_close(one.double(), getattr(expected, name), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(sum_, one + 1)
        assert [x is y for x, y in zip(added, into, strict=False)] == [True] * 3
        if more:
            torch.testing.assert_close(found[3].double(), expected.dsinks, atol=1e-5, rtol=1e-5)
            assert found[4].shape == MASK.shape


def test_a_watched_call_gives_gradients_in_float32_as_an_eager_one_does() -> None:
    q, out = Q.half(), OUT.half()
    wide, watched = ([torch.zeros(1, 2, 5, 16) for _ in range(3)] for _ in range(2))
    archflash.attention_backward(out, q, q, q, out, LSE, dq=wide[0], dk=wide[1], dv=wide[2])
    with Watching():
        archflash.attention_backward(
            out, q, q, q, out, LSE, dq=watched[0], dk=watched[1], dv=watched[2]
        )
        with pytest.raises(TypeError, match=r"dq has dtype torch\.float64"):
            archflash.attention_backward(out, q, q, q, out, LSE, dq=wide[0].double())
    assert all(map(torch.equal, wide, watched))


# --- interfaces of other libraries ---

CACHES = torch.zeros(3, 4, 2, 16)
TABLE = int32(0, 1).reshape(2, 1)
PACKED = (torch.zeros(2, 2, 16), CACHES, CACHES, int32(0, 1, 2), int32(0, 4, 8), 1, 4)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "channels": (
        lambda: rotary.apply_rotary_emb(ROWS_FIRST, torch.ones(5, 9), torch.ones(5, 9)),
        ValueError, "cos is for 18 channels, but x has 16: shorten cos",
    ),
    "heads": (
        lambda: rotary.apply_rotary_emb_qkv_(ROWS_FIRST, torch.ones(5, 4), torch.ones(5, 4)),
        ValueError, "without num_heads_q: say how many heads are q's",
    ),
    "columns": (
        lambda: flash_mla.flash_mla_sparse_fwd(
            torch.zeros(3, 2, 576), torch.zeros(9, 1, 576), torch.zeros(3, 1, 2).int(), 0.1, d_v=128
        ),
        ValueError, "d_v is 128: it must be 512",
    ),
    "dropout": (
        lambda: interface2._flash_attn_varlen_forward(
            *PACKED, 0.5, 0.1, False, block_table=TABLE, seqused_k=int32(4, 4)
        ),
        UnsupportedError, "dropout_p with block_table or seqused_k: leave it at 0",
    ),
    "padding": (
        lambda: interface2._flash_attn_varlen_forward(
            PACKED[0], *[torch.zeros(8, 2, 16)] * 2, *PACKED[3:], 0.0, 0.1, False,
            leftpad_k=int32(1, 1),
        ),
        UnsupportedError, "leftpad_k, or alibi_slopes with seqused_k, without block_table",
    ),
    "lengths": (
        lambda: interface3._forward(
            PACKED[0], *[torch.zeros(8, 2, 16)] * 2, cu_seqlens_k=int32(0, 4, 8), max_seqlen_k=4
        ),
        UnsupportedError, "cu_seqlens_k without cu_seqlens_q, max_seqlen_q or max_seqlen_k",
    ),
    "shifted window": (
        lambda: cute.flash_attn_func(
            ROWS_FIRST, ROWS_FIRST, ROWS_FIRST, qv=ROWS_FIRST, window_size=(-2, 3)
        ),
        UnsupportedError, "window_size=(-2, 3) with qv: no side may be negative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_interfaces_of_other_libraries_name_what_they_refuse(name: str) -> None:
    call, kind, said = REFUSED[name]
    with pytest.raises(kind, match=re.escape(said)):
        call()


def test_lists_of_keys_beside_a_second_query() -> None:
    torch.manual_seed(1)
    q, qv = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 4, 8)
    k, v = torch.randn(2, 9, 1, 16), torch.randn(2, 9, 1, 8)
    lists = torch.randint(0, 9, (2, 5, 1)).int().expand(2, 5, 3).contiguous()
    lists[..., 1:] = -1
    out, lse = cute.flash_attn_func(q, k, v, qv=qv, gather_kv_indices=lists, return_lse=True)
    seen = torch.stack([v[i, lists[i, :, 0].long(), 0] for i in range(2)])  # of one key each
    torch.testing.assert_close(out, seen[:, :, None].expand(2, 5, 4, 8))
    assert lse.shape == (2, 5, 4)


# --- references ---


def test_packed_rows_have_the_bounds_and_gradients_of_the_same_sequence() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, n, 16) for n in (5, 7, 7))
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends = {"cu_seqlens_q": int32(0, 5), "cu_seqlens_k": int32(0, 7)}
    of_8_bits = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    packed = [x[0].transpose(0, 1) for x in of_8_bits]
    ref = reference.attention(*of_8_bits, return_lse=False)
    one = reference.check_fp8(ref.bfloat16(), ref, *of_8_bits)
    other = reference.check_fp8(
        ref[0].transpose(0, 1).bfloat16(), ref[0].transpose(0, 1), *packed, **ends
    )
    assert one.ok
    assert (one.max_error, one.bound) == pytest.approx((other.max_error, other.bound))
    with pytest.raises(ValueError, match="differ in shape: compare outputs of the same call"):
        reference.check_fp8(ref[:, :1].bfloat16(), ref, *of_8_bits)
    dout, dlse = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5)
    dense = reference.attention_backward(dout, q, k, v, dlse=dlse)
    flat = reference.attention_backward(dout[0].transpose(0, 1), *rows, dlse=dlse[0], **ends)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(
            getattr(dense, name)[0].transpose(0, 1), getattr(flat, name), atol=1e-12, rtol=1e-12
        )


@pytest.mark.parametrize("window", [None, (2, None), (None, 3), (1, 0), (0, 9)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [None, 0, -4, 9, int32(1, -7)])
def test_the_keys_that_some_query_sees(
    window: tuple[int | None, int | None] | None, causal: bool, offset: int | Tensor | None
) -> None:
    nq, nk = 4, 6
    found = seen_keys(2, nq, nk, {"causal": causal, "window": window, "q_offset": offset})
    starts = [nk - nq] * 2 if offset is None else torch.as_tensor(offset).expand(2).tolist()
    for (begin, end), start in zip(found, starts, strict=True):
        row, key = torch.arange(nq)[:, None] + start, torch.arange(nk)
        seen = torch.ones(nq, nk, dtype=torch.bool)
        left, right = window or (None, None)
        if causal:
            seen &= key <= row
        if left is not None:
            seen &= key >= row - left
        if right is not None:
            seen &= key <= row + right
        keys = seen.any(0).nonzero().flatten().tolist()
        assert (begin, end) == (keys[0], keys[-1] + 1) if keys else begin == end
    assert seen_keys(1, 4, 6, {"cu_seqlens_k": int32(0, 3, 5)}) == [(0, 5)]


@pytest.mark.parametrize("keys", [0, 40])
def test_four_bits_in_either_layout_and_without_keys(keys: int) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 4 // g, n, 32) for g, n in ((1, 20), (2, keys), (2, keys)))
    stored = reference.nvfp4(q, k, v, causal=True)
    turned = reference.nvfp4(*(x.transpose(1, 2) for x in (q, k, v)), layout="bnhd", causal=True)
    for one, other in zip(stored, turned, strict=True):
        assert torch.equal(one, other.transpose(1, 2))
    out, lse = reference.attention(*stored, scale=32**-0.5, causal=True)
    report, of_lse = reference.check_nvfp4(out.half(), lse.float(), q, k, v, causal=True)
    assert report.ok
    assert of_lse is not None
    assert of_lse.ok
    assert reference.check_nvfp4(out.half(), None, q, k, v, causal=True)[1] is None
    if keys:
        assert not reference.check_nvfp4(out.half() + 0.5, None, q, k, v, causal=True)[0].ok
        assert not reference.check_nvfp4(out.half(), lse.float() + 1, q, k, v, causal=True)[1].ok
    assert [x.shape for x in reference.nvfp4(q[:0], k[:0], v[:0])] == [
        (0, 4, 20, 33), (0, 2, keys, 33), (0, 2, keys, 32),
    ]  # fmt: skip


def test_four_bits_of_more_columns_than_a_kernel_takes_and_of_no_rows() -> None:
    q, k = torch.randn(1, 2, 0, 256), torch.randn(1, 2, 8, 256)
    stored = reference.nvfp4(q, k, k)
    assert [tuple(x.shape) for x in stored] == [(1, 2, 0, 257), (1, 2, 8, 257), (1, 2, 8, 256)]
    assert reference.check_nvfp4(torch.empty_like(q).half(), None, q, k, k)[0].ok


# --- values and gradients whose plans are made up ---


def backward_of(**options: Any) -> tuple[Any, Any, Any]:
    """What decides about gradients of a call on a GPU: the request, its targets and the problem."""
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 2, 64, device="meta")
    request = _gradients.Request(q, q, q, q, q, lse, None, _options.complete(options))
    targets = _gradients.Gradients.like(request, (None, None, None), False)
    return request, targets, request.problem().as_if_on_cuda()


def test_a_forced_backward_names_what_keeps_it() -> None:
    request, targets, problem = backward_of()
    h200 = find_device("H200")

    def plan_of(kernel: str, device: Any) -> Any:
        return _gradients._plan(kernel, request, problem, targets, device, False)

    plan = _gradients.forced_plan("ampere", plan_of, problem, h200, None)
    assert plan.implementation == "ampere"
    with pytest.raises(ForcedImplementationError, match="ampere is forced, but no driver"):
        _gradients.forced_plan("ampere", plan_of, problem, h200, "no driver")
    with pytest.raises(ForcedImplementationError, match="cannot compute the gradients of bfloat16"):
        _gradients.forced_plan("ada", plan_of, problem, h200, None)


@pytest.mark.parametrize("way", [contextlib.nullcontext, Watching], ids=["eager", "watched"])
@pytest.mark.parametrize("within", ["call", "tensors", "both"])
def test_gradients_in_inference_mode(way: Callable[[], Any], within: str) -> None:
    """They need no graph of the caller's, and tensors of that mode are as good as others."""
    sinks, mask = torch.tensor([0.5, -1.0]), torch.randn(1, 1, 5, 5)
    for options, more in (
        ({}, {}), ({"softcap": 3.0, "causal": True}, {}),
        ({"attn_mask": mask, "sinks": sinks}, {"mask_gradient": True}),
    ):  # fmt: skip
        out, lse = archflash.attention(Q, Q, Q, return_lse=True, **options)
        with torch.inference_mode(within != "call"):
            given = [x.clone() for x in (out, Q, Q, Q, out, lse)]
            of_mode = {n: x.clone() if isinstance(x, Tensor) else x for n, x in options.items()}
        with torch.inference_mode(within != "tensors"), way():
            found = archflash.attention_backward(*given, **of_mode, **more)
        expected = reference.attention_backward(out, Q, Q, Q, **options)
        names = ("dq", "dk", "dv", "dsinks", "dmask")
        for x, name in zip(found, names, strict=False):
            right = getattr(expected, name)
            torch.testing.assert_close(x.double(), right.reshape(x.shape), atol=1e-5, rtol=1e-5)


def test_masks_of_wrong_shapes_and_sizes_are_named() -> None:
    masks, lists = archflash.masks, torch.zeros(1, 1, 5, 2, dtype=torch.int32)
    for call, kind, said in (
        (lambda: masks.from_key_indices(lists[0], 5, 9), ValueError, "key_indices"),
        (lambda: masks.from_key_indices(lists[:, :, :3], 5, 9), ValueError, "key_indices"),
        (
            lambda: masks.from_key_indices(lists, 5, 9, topk_lengths=int32(1, 2, 3)), ValueError,
            "topk_lengths",
        ),
        (
            lambda: masks.from_key_indices(lists, 5, 9, dtype=torch.int32), TypeError,
            "dtype is torch.int32: it must be floating point",
        ),
    ):  # fmt: skip
        with pytest.raises(kind, match=said):
            call()
