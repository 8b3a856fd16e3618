"""What the arguments of PyTorch's attention operators mean to archflash, and for which of them
PyTorch's own kernel is asked. Values: tests/core_set/test_pytorch_operators.py.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _autograd, _dispatch, _options, _overrides, _schemas
from archflash import _backward_operators as backward
from archflash import _forward_operators as forward
from archflash._api import find_device, make_problem
from archflash._backward_operators import Call

Q = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16, generator=torch.manual_seed(0))
WIDE = torch.randn(1, 2, 5, 32, dtype=torch.bfloat16)
FLAT = torch.randn(5, 2, 16, dtype=torch.bfloat16)
LSE, FLAT_LSE = torch.zeros(1, 2, 5), torch.zeros(2, 5)
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
OTHERS = torch.tensor([0, 3, 5], dtype=torch.int32)
MASK = torch.zeros(1, 1, 5, 5, dtype=torch.bfloat16)
H200 = find_device("H200")


# --- forward ---

DROPPED, WEIGHTS = "dropout: the backward pass", "return_debug_mask: no kernel"
PACKED = (FLAT, FLAT, FLAT, ENDS, ENDS, 3, 3)
DECLINED: dict[str, tuple[Callable[[], Any], str]] = {
    "flash dropout": (lambda: forward._flash(Q, Q, Q, 0.1), DROPPED),
    "flash weights": (lambda: forward._flash(Q, Q, Q, 0.0, False, True), WEIGHTS),
    "fp8 dropout": (lambda: forward._flash_quantized(Q, Q, Q, None, None, None, 0.1), DROPPED),
    "cudnn dropout": (lambda: forward._cudnn(Q, Q, Q, None, False, 0.1), DROPPED),
    "cudnn weights": (lambda: forward._cudnn(Q, Q, Q, None, False, 0.0, False, True), WEIGHTS),
    "cudnn mask": (lambda: forward._cudnn(Q, Q, Q, MASK, True), "a mask, and gradients may be"),
    "efficient dropout": (lambda: forward._efficient(Q, Q, Q, None, False, 0.1), DROPPED),
    "efficient mask": (lambda: forward._efficient(Q, Q, Q, MASK, True), "a mask, and gradients"),
    "packed dropout": (lambda: forward._flash_forward(*PACKED, 0.1), DROPPED),
    "packed weights": (lambda: forward._flash_forward(*PACKED, 0.0, False, True), WEIGHTS),
    "slopes": (
        lambda: forward._flash_forward(*PACKED, alibi_slopes=torch.ones(2)), "alibi_slopes: no",
    ),
    "lengths alone": (
        lambda: forward._flash_forward(*PACKED, seqused_k=ENDS[1:]), "seqused_k or block_table,",
    ),
    "half packed": (
        lambda: forward._flash_forward_into(FLAT, FLAT, FLAT, FLAT, ENDS, None, 3, 3),
        "cum_seq_q without cum_seq_k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_pytorchs_own_kernel_is_asked_for_what_no_kernel_has(name: str) -> None:
    call, said = DECLINED[name]
    assert call().startswith(said)
    with archflash.force("torch"):
        assert call().startswith(said)
    with (
        archflash.force("ampere"),
        pytest.raises(archflash.ForcedImplementationError, match="ampere is forced, but PyTorch"),
    ):
        call()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of calls, which are served by zeros, or not where a reason is appended."""
    seen: list[Any] = []

    def serve(q: Tensor, k: Tensor, v: Tensor, values: tuple[Any, ...], *how: Any) -> Any:
        options = dict(zip(_options.NAMES, values, strict=False))
        given = {n: x for n, x in options.items() if x is not _options.DEFAULTS[n]}
        if seen and isinstance(seen[-1], str):
            return seen.pop()
        seen.append(given)
        heads_last = given.get("layout") == "bnhd"
        out = given.get("out")
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]) if out is None else out
        rows = q.shape[:-1] if not heads_last else (q.shape[0], q.shape[2], q.shape[1])
        lse = torch.zeros(rows if q.ndim == 4 else (q.shape[1], q.shape[0]))
        return (out, lse) if given.get("return_lse") else out

    monkeypatch.setattr(forward, "_serve_exactly", serve)
    return seen


SERVED: dict[str, Callable[[], Any]] = {
    "flash": lambda: forward._flash(Q, Q, Q),
    "fp8": lambda: forward._flash_quantized(Q, Q, Q, None, None, None),
    "cudnn": lambda: forward._cudnn(Q, Q, Q, None, False),
    "efficient": lambda: forward._efficient(Q, Q, Q, None, False),
    "packed": lambda: forward._flash_forward(*PACKED),
    "packed into": lambda: forward._flash_forward_into(torch.empty_like(FLAT), *PACKED),
    "packed fp8": lambda: forward._flash_forward_quantized(*PACKED, 0.0, *[False] * 2, *[None] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_a_reason_of_the_runtime_is_handed_on(name: str, asked: list[Any]) -> None:
    assert not isinstance(SERVED[name](), str)
    asked.append("ampere: no such tile")
    assert SERVED[name]() == "ampere: no such tile"


def test_what_the_arguments_of_packed_operators_mean(asked: list[Any]) -> None:
    forward._flash_forward(
        *PACKED, 0.0, True, window_size_left=4, window_size_right=-1, num_splits=3
    )
    (given,) = asked
    assert given["cu_seqlens_q"] is given["cu_seqlens_k"] is ENDS
    assert (given["max_seqlen_q"], given["num_splits"], given["window"]) == (3, 3, (4, None))
    assert given["causal"] is True
    assert "q_offset" not in given  # to the bottom right
    assert forward._flash_into(None, *PACKED, is_causal=True, top_left=True)
    assert "q_offset" not in asked[-1]  # of equal lengths both are the same
    assert forward._flash_into(
        None, FLAT, FLAT, FLAT, ENDS, OTHERS, 3, 3, is_causal=True, top_left=True
    )
    assert asked[-1]["q_offset"] == 0
    assert forward._flash_into(None, *(x[None] for x in (FLAT, FLAT, FLAT)), None, None, 5, 5)
    assert "cu_seqlens_q" not in asked[-1]


def test_what_the_arguments_of_cudnns_packed_operators_mean(asked: list[Any]) -> None:
    """PyTorch calls them from 2.15 on; the schema of the first one is older."""
    kernel = forward._cudnn_packed("_cudnn_attention_forward")
    out, lse, *rest = kernel(FLAT, FLAT, FLAT, None, ENDS, OTHERS, 3, 4, True, 0.0, True)
    assert asked[-1]["q_offset"] == 0  # to the top left
    assert (out.shape, lse.shape) == (FLAT.shape, FLAT_LSE.shape)
    assert [x is y for x, y in zip(rest[:2], (ENDS, OTHERS), strict=True)] == [True, True]
    assert rest[2:4] == [3, 4]
    assert rest[-1] is None
    given = {"query": FLAT, "key": FLAT, "value": FLAT, "cum_seq_q": ENDS, "cum_seq_k": ENDS}
    given |= {"max_q": 3, "max_k": 3}
    into = torch.empty_like(FLAT)
    assert kernel(**given, out=into) is not None
    assert asked[-1]["out"] is into
    assert "q_offset" not in asked[-1]
    assert kernel(**given, attn_bias=MASK) == "attn_bias of packed sequences"
    asked.append("ampere: no such tile")
    assert kernel(**given) == "ampere: no such tile"


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("rows", [5, 32])
def test_the_log_sum_exp_of_the_efficient_operator_is_padded(
    asked: list[Any], lse: bool, rows: int
) -> None:
    q = torch.zeros(1, 2, rows, 16)
    out, found, *state = forward._efficient(q, q, q, None, lse)
    assert out.shape == q.shape
    assert found.shape == ((1, 2, 32) if lse else (1, 2, 0))
    assert bool((found[..., rows:] == torch.inf).all())
    assert [x.dtype for x in state] == [torch.int64] * 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize("dv", [16, 24])
def test_outputs_have_their_dimensions_in_the_order_of_the_query(
    order: tuple[int, ...], dv: int
) -> None:
    back = [order.index(i) for i in range(4)]
    q = torch.empty([(3, 2, 5, 16)[i] for i in order]).permute(back)
    made = forward._like_query(q, dv)
    assert made.shape == (3, 2, 5, dv)
    expected = torch.empty([(3, 2, 5, dv)[i] for i in order]).permute(back)
    assert made.stride() == expected.stride()


def test_states_of_random_generators_are_shared_where_nothing_keeps_them() -> None:
    state = forward._State(forward._scalar_shapes)
    with torch.enable_grad():
        shared = state(Q)
        assert state(Q) == shared
    with torch.inference_mode():
        assert state(Q)[0] is shared[0]
    with torch.no_grad():  # as in a compiled graph
        one, other = state(Q), state(Q)
    assert len({id(x) for x in (*shared, *one, *other)}) == 6


# --- backward ---

READ = backward.OPERATORS
FLASH, CUDNN, VARLEN = READ
GIVEN = (Q, Q, Q, Q, Q, LSE)
HANDED_BACK: dict[str, tuple[Callable[[], Any], str]] = {
    "flash nested": (
        lambda: READ[FLASH](*GIVEN, ENDS, None, 5, 5, 0.0, False, LSE, LSE), backward._NESTED,
    ),
    "flash dropout": (
        lambda: READ[FLASH](*GIVEN, None, None, 5, 5, 0.1, False, LSE, LSE), backward._DROPPED,
    ),
    "cudnn nested": (
        lambda: READ[CUDNN](*GIVEN, LSE, LSE, None, None, ENDS, 5, 5, 0.0, False),
        backward._NESTED,
    ),
    "cudnn mask": (
        lambda: READ[CUDNN](*GIVEN, LSE, LSE, MASK, None, None, 5, 5, 0.0, False),
        backward._WITH_MASK,
    ),
    "cudnn dropout": (
        lambda: READ[CUDNN](*GIVEN, LSE, LSE, None, None, None, 5, 5, 0.1, False),
        backward._DROPPED,
    ),
    "half packed": (
        lambda: READ[VARLEN](*[FLAT] * 5, FLAT_LSE, ENDS, None, 3, 3, 0.0, False),
        "cum_seq_q without cum_seq_k",
    ),
    "packed dropout": (
        lambda: READ[VARLEN](*[FLAT] * 5, FLAT_LSE, ENDS, ENDS, 3, 3, 0.1, False),
        backward._DROPPED,
    ),
    "packed cudnn mask": (lambda: of_cudnn(bias=MASK), backward._WITH_MASK),
    "packed cudnn nested": (lambda: of_cudnn(ends_k=None), backward._NESTED),
    "packed cudnn column": (lambda: of_cudnn(lse=FLAT_LSE[..., None]), backward._NESTED),
    "packed cudnn dropout": (lambda: of_cudnn(dropout_p=0.1), backward._DROPPED),
}  # fmt: skip


def of_cudnn(
    bias: Tensor | None = None, ends_k: Tensor | None = ENDS, lse: Tensor = FLAT_LSE,
    dropout_p: float = 0.0,
) -> Call | str:  # fmt: skip
    return backward._cudnn_packed(
        *[FLAT] * 5, lse, LSE, LSE, bias, ENDS, ends_k, 3, 3, dropout_p, True, scale=0.5
    )


@pytest.mark.parametrize("name", HANDED_BACK)
def test_gradients_that_pytorchs_own_kernel_computes(name: str) -> None:
    call, said = HANDED_BACK[name]
    assert call() == said


def test_what_the_arguments_of_backward_operators_mean() -> None:
    call = READ[FLASH](*GIVEN, None, None, 5, 5, 0.0, True, LSE, LSE, scale=0.5)
    assert isinstance(call, Call)
    assert call.options == {"causal": True, "scale": 0.5}  # to the bottom right
    longer = torch.zeros(1, 2, 7, 16)
    call = READ[CUDNN](
        Q, Q, longer, longer, Q, LSE[..., None], LSE, LSE, None, None, None, 5, 7, 0.0, True
    )
    assert isinstance(call, Call)
    assert call.options == {"causal": True, "scale": None, "q_offset": 0}  # to the top left
    assert call.lse.shape == LSE.shape
    dense = READ[VARLEN](*[FLAT[None]] * 5, LSE, None, None, 5, 5, 0.0, False, window_size_left=3)
    assert isinstance(dense, Call)
    assert dense.options == {
        "layout": "bnhd", "causal": False, "scale": None, "window": (3, None),
    }  # fmt: skip
    packed = of_cudnn()
    assert isinstance(packed, Call)
    assert packed.options["cu_seqlens_k"] is ENDS
    assert "q_offset" not in packed.options
    other = of_cudnn(ends_k=OTHERS)
    assert isinstance(other, Call)
    assert other.options["q_offset"] == 0
    same = of_cudnn(ends_k=ENDS.view(-1))  # another tensor of the same memory
    assert isinstance(same, Call)
    assert "q_offset" not in same.options
    assert backward.top_left_of_packed(False, ENDS, OTHERS) == {}


def test_decisions_about_gradients_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_decisions", {})
    monkeypatch.setattr(backward, "_MOST_DECISIONS", 2)
    decided = []

    def why(*given: Any) -> str:
        decided.append(given)
        return "it is faster"

    def asked(rows: int) -> Any:
        q, lse = torch.zeros(1, 2, rows, 16, dtype=torch.bfloat16), torch.zeros(1, 2, rows)
        args = (q, q, q, q, q, lse, None, None, rows, rows, 0.0, False, lse, lse)
        return backward.serve(FLASH, args, {}, None, why)

    for rows in (3, 4, 3, 4):
        assert asked(rows) == "it is faster"
    assert len(decided) == 2
    asked(5)
    assert len(backward._decisions) == 1
    assert asked(0) == "a tensor without elements"
    q = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)
    args = (q, q, q, q, q, LSE[:, :, :3], None, None, 3, 3, 0.0, False, LSE, LSE)
    assert backward.serve(FLASH, args, {}, "ada", why) == "ada is forced, and has no backward pass"


def test_what_archflash_does_not_take_is_left_to_pytorch() -> None:
    """cuDNN's kernel takes other heads of v than of k."""
    q, k = (torch.zeros(1, 4, rows, 16, dtype=torch.bfloat16) for rows in (5, 7))
    v, lse = k[:, :2], torch.zeros(1, 4, 5, 1)
    served = forward.OPERATORS["_scaled_dot_product_cudnn_attention"](q, k, v, None, True)
    assert served.startswith("arguments that archflash does not take: v has shape (1, 2, 7, 16)")
    with (
        archflash.force("ampere"),
        pytest.raises(archflash.ForcedImplementationError, match="v has"),
    ):
        forward.OPERATORS["_scaled_dot_product_cudnn_attention"](q, k, v, None, True)
    args = (q, q, k, v, q, lse, LSE, LSE, None, None, None, 5, 7, 0.0, False)
    said = backward.serve(CUDNN, args, {}, None, lambda *_: "unasked")
    assert isinstance(said, str)
    assert said.startswith("arguments that archflash does not take: v has shape")


# --- who serves ---


def problem(rows: int = 5, batch: int = 1, want_lse: bool = True) -> Any:
    q = torch.empty(batch, 2, rows, 64, dtype=torch.bfloat16, device="meta")
    return make_problem(q, q, q, return_lse=want_lse)


def test_the_runtime_is_told_a_plan_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = _overrides._decide
    assert decide(problem(rows=0), 0, None) == "a tensor without elements"
    assert decide(problem(batch=0), 0, None) == "a tensor without elements"
    assert decide(problem(), 0, "torch") == "torch is forced"
    assert decide(problem(), 0, None) == "tensors on the CPU"
    gone = "no NVIDIA driver on this machine"
    monkeypatch.setattr(_overrides, "_device_of", lambda problem, index: (H200, gone))
    assert decide(problem().as_if_on_cuda(), 0, None) == gone
    monkeypatch.setattr(_overrides, "_device_of", lambda problem, index: (H200, None))
    plan = decide(problem(rows=1024).as_if_on_cuda(), 0, "ampere")
    assert plan.implementation == "ampere"
    assert plan.problem.want_lse
    assert not decide(problem(1024, want_lse=False).as_if_on_cuda(), 0, "ampere").problem.want_lse
    assert _dispatch.forced() is None


def test_without_a_registry_of_pytorchs_the_operators_are_replaced_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with older versions of torch."""
    in_front: list[Any] = []

    class Replaced:
        def __init__(self, operators: dict[str, Any]) -> None:
            assert {*forward.OPERATORS, *backward.OPERATORS} <= {*operators}
            in_front.append(self)

        def remove(self) -> None:
            in_front.remove(self)

    monkeypatch.setattr(_overrides, "_HAS_REGISTRY", False)
    monkeypatch.setattr(_overrides, "_replaced", None)
    monkeypatch.setattr(_overrides, "Replaced", Replaced)
    archflash.stats(reset=True)
    for _ in range(2):
        with archflash.enabled():
            assert len(in_front) == 1
            archflash.enable()
            assert len(in_front) == 1
            _overrides.count_declined("its operators count it")
        assert in_front == []
    archflash.disable()
    _overrides.count_declined("a reason")
    assert archflash.stats().declined == {"a reason": 1}


NODE_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.skipif(_schemas.handle_functions() is None, reason="an older PyTorch")
def test_pytorch_has_what_nodes_in_cpp_need() -> None:
    """Where it lacks one of these, nodes are in Python, without a word."""
    both = (NODE_OPERATOR, NODE_OPERATOR + "_backward")
    assert [_schemas.letters(name) for name in both] == _autograd._NODE_TYPES
    assert hasattr(torch._C._VariableFunctions, NODE_OPERATOR)
    for name in both:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    if sys.platform == "linux":
        folder = Path(torch.__file__).with_name("lib")
        libraries = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("c10", "torch_cpu")]
        source = Path(__file__).parents[2] / "src/torch_operators/node.cpp"
        names = re.findall(r'"(_Z\w+)"', source.read_text())
        assert len(names) == 4
        for name in names:
            assert any(hasattr(library, name) for library in libraries)


def test_nodes_of_calls_on_the_cpu_are_in_python() -> None:
    q = torch.randn(1, 1, 4, 16, dtype=torch.float16).requires_grad_()
    out = archflash.attention(q, q, q, implementation="ampere")
    assert out.grad_fn is not None
    assert out.grad_fn.name() == "ArchflashAttentionBackward"
