"""Where PyTorch's kernels fail, dispatch takes ours, and `torch` and enable() keep from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.torch_version import TorchVersion

import archflash
from archflash import _archflash as native
from archflash import (
    _dispatch,
    _fused_kernels,
    _mended_calls,
    _pytorch_faults,
    _replacing,
    _torch,
    _torch_kernels,
    reference,
)
from archflash._api import make_problem
from archflash._dispatch import explain
from archflash._pytorch_faults import CUDNN, EFFICIENT, FLASH

H200 = (9, 0)


@pytest.fixture(autouse=True)
def pytorch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch looks like the one on whose faults the rules were measured."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    monkeypatch.setattr(_fused_kernels, "cudnn_version", lambda: 91900)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    _dispatch.pytorch_fails.cache_clear()
    _torch_kernels._failing_of.cache_clear()
    torch.manual_seed(0)


@pytest.fixture
def as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are treated as if they were on an H200."""
    monkeypatch.setattr(_torch_kernels, "_has_fused_kernels", lambda query: True)
    gpu = _torch_kernels._Gpu(*H200, cudnn=91900, cudnn_first=True)
    monkeypatch.setattr(_torch_kernels, "_gpu", lambda index: gpu)


def decide(
    device: str,
    shape: tuple[int, int, int, int],
    keys: int | None = None,
    *,
    mask: torch.dtype | None = None,
    grad: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **call: Any,
) -> archflash.Decision:
    """Who serves a call: (batch, heads, rows, head dim), with as many keys as rows by default."""
    batch, heads, nq, d = shape
    nk = nq if keys is None else keys
    q = torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
    k = torch.empty(batch, heads, nk, d, dtype=dtype, device="meta")
    if mask is not None:
        call["attn_mask"] = torch.empty(nq, nk, dtype=mask, device="meta")
    return archflash.explain(q, k, k, device=device, **call)


# --- who is asked ---


@pytest.mark.parametrize("scale", [0.0, -0.125, -1])
@pytest.mark.parametrize("call", ["causal", "plain"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("device", ["A100", "RTX 4090", "H200", "B200", "RTX 5090"])
def test_a_scale_of_0_or_less_goes_to_a_kernel(
    device: str, grad: bool, call: str, scale: float
) -> None:
    decision = decide(device, (2, 8, 200, 64), grad=grad, scale=scale, causal=call == "causal")
    assert decision.chosen != "torch"
    assert "multiplies the -inf of masked scores" in decision.reasons["torch"][0]


MANY = "takes at most 65535"
NAN = "gives NaN as gradients of rows with a log-sum-exp below -88"
FAILING: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "temporal attention of one row": (("A100", (32768, 12, 1, 64)), {"grad": True}, "2^31"),
    "the same on 9.0, where cuDNN takes no single key": (
        ("H200", (32768, 12, 1, 64)), {"grad": True}, "2^31",
    ),
    "head dim 40 fills 64 columns": (("A100", (16385, 16, 1, 40)), {"grad": True}, "2^31"),
    "long sequences": (("A100", (65, 64, 4096, 128)), {"grad": True}, "2^31"),
    "q of more than 2^31 elements": (
        ("H200", (17, 16, 65536, 128), 8), {"grad": True}, "more than 2^31 elements",
    ),
    "70,000 sequences": (("H200", (70000, 8, 16, 40)), {"grad": True}, MANY),
    "70,000 sequences without gradients": (("H200", (70000, 8, 16, 40)), {}, MANY),
    "70,000 sequences on 8.0": (("A100", (70000, 8, 16, 40)), {"grad": True}, MANY),
    "65,536 heads": (("A100", (1, 65536, 4, 32)), {"grad": True}, MANY),
    "65,536 heads under a mask": (
        ("A100", (1, 65536, 4, 32)), {"grad": True, "mask": torch.bool}, MANY,
    ),
    "192 keys": (("H200", (2, 8, 200, 64), 192), {"grad": True}, NAN),
    "192 keys of wide heads": (("H200", (2, 8, 64, 256), 192), {"grad": True}, NAN),
    "one row over 256 keys": (("H200", (2, 8, 1, 64), 256), {"grad": True}, NAN),
    "decoding on 10.0": (("B200", (2, 8, 1, 64), 4096), {}, "wrong results for one query row"),
    "a mask of 2^32 elements": (
        ("A100", (1, 1, 65537, 64)), {"mask": torch.bfloat16}, "more than 2^32 elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_calls_at_which_pytorch_fails_go_to_a_kernel(name: str) -> None:
    args, call, words = FAILING[name]
    decision = decide(*args, **call)
    assert decision.chosen != "torch"
    assert not decision.fallback
    assert words in decision.reasons["torch"][0]
    assert decision.reasons["torch"][0].startswith("PyTorch's ")


STAY: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one sequence less": (("A100", (16384, 16, 1, 64)), {"grad": True}),
    "no gradients are added up": (("A100", (4, 8, 200, 64)), {"grad": True}),
    "65,535 sequences": (("A100", (65535, 1, 4, 32)), {"grad": True}),
    "a mask and 192 keys": (("A100", (2, 8, 200, 136), 192), {"grad": True, "mask": torch.bool}),
    "a mask and 200 keys": (("A100", (2, 8, 200, 136)), {"grad": True, "mask": torch.bool}),
    "192 keys on 8.0": (("A100", (2, 8, 200, 64), 192), {"grad": True}),
    "192 keys in fp32": (("A100", (2, 8, 200, 64), 192), {"grad": True, "dtype": torch.float32}),
}


@pytest.mark.parametrize("name", STAY)
def test_pytorch_comes_first_beside_its_faults(name: str) -> None:
    args, call = STAY[name]
    assert decide(*args, **call).chosen == "torch"


def test_hidden_keys() -> None:
    call: dict[str, Any] = {"grad": True, "mask": torch.bool}
    for d in (64, 136):
        assert decide("H200", (2, 8, 200, d), 192, **call).chosen == "hopper"
    shapes = ((2, 8, 200, 136), (2, 8, 192, 136), (200, 192))
    q, k, mask = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    problem = make_problem(q.requires_grad_(), k, k, attn_mask=mask.bool())
    assert "64 more keys" in explain._why_hidden_keys(problem, H200)
    assert decide("H200", (2, 8, 1, 64), 128, **call).chosen == "hopper"
    assert _torch_kernels.hidden_keys(H200, 1, 128) == 8
    assert "more keys" not in decide("H200", (2, 8, 200, 136), **call).why
    assert "more keys" not in decide("A100", (2, 8, 200, 64), 192, **call).why


def test_newer_versions_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fused_kernels, "cudnn_version", lambda: 92600)
    _dispatch.pytorch_fails.cache_clear()
    _torch_kernels._failing_of.cache_clear()
    assert _torch_kernels.hidden_keys(H200, 200, 192) == 0
    assert _torch_kernels.hidden_keys(H200, 1, 128) == 8
    (reason,) = decide("H200", (2, 8, 200, 64), 192, grad=True).reasons["torch"]
    assert "NaN" not in reason
    assert "wrong results" not in str(decide("B200", (2, 8, 1, 64), 4096).reasons)


def test_every_rule_has_a_call_and_a_source() -> None:
    """The calls of this file meet every rule."""
    base: dict[str, Any] = {
        "capability": H200, "cudnn": 91900, "batch": 1, "heads": 1, "nq": 200, "nk": 200, "d": 64,
        "dv": 64, "masked": False, "causal": False, "gradients": True, "scale": 1.0,
        "dropout": False,
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {"scale": 0.0}, {"nk": 192}, {"batch": 17, "heads": 16, "nq": 65536, "d": 128, "dv": 128},
        {"capability": (10, 0), "nq": 1}, {"batch": 65536}, {"heads": 65536},
        {"batch": 16385, "heads": 16, "nq": 1}, {"nq": 65537, "nk": 65537, "masked": True},
        {"batch": 65536, "dropout": True},
    ]  # fmt: skip
    assert not _pytorch_faults.find(_pytorch_faults.Call(**base))
    met = set()
    for change in changes:
        call = _pytorch_faults.Call(**(base | change))
        met |= {n for n, fault in enumerate(_pytorch_faults.FAULTS) if fault.of(call)}
    assert met == set(range(len(_pytorch_faults.FAULTS)))
    for fault in _pytorch_faults.FAULTS:
        assert "2026-" in fault.seen or "#" in fault.seen


# --- the implementation `torch` ---


def by_torch(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    out = _torch.attention(q, k, v, **call)
    assert isinstance(out, Tensor)
    return out


Sdpa = Callable[..., Tensor]


class Recorded:
    """Stands for PyTorch's function: what it was given, and which kernels were allowed."""

    def __init__(self, sdpa: Sdpa) -> None:
        self.sdpa = sdpa
        self.allowed: set[str] = set()
        self.given: dict[str, Any] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        backends = {
            CUDNN: torch._C._get_cudnn_sdp_enabled(),
            FLASH: torch._C._get_flash_sdp_enabled(),
            EFFICIENT: torch._C._get_mem_efficient_sdp_enabled(),
        }
        assert torch._C._get_math_sdp_enabled()
        self.allowed = {name for name, on in backends.items() if on}
        self.given = {"query": query, "key": key, "value": value, **given}
        with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
            return self.sdpa(query, key, value, **given)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    record = Recorded(_torch_kernels.PYTORCHS_SDPA)
    monkeypatch.setattr(_torch_kernels, "PYTORCHS_SDPA", record)
    return record


ALL = (CUDNN, FLASH, EFFICIENT)


@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize(
    ("shape", "keys", "grad", "allowed"),
    [
        ((1, 2, 5, 8), 5, True, ALL),
        ((65536, 1, 1, 8), 1, False, (EFFICIENT,)),
        ((1, 65536, 1, 8), 1, False, ()),
        ((1, 2, 5, 8), 192, True, (FLASH, EFFICIENT)),
        ((1, 2, 5, 8), 192, False, ALL),
        ((1, 2, 1, 8), 64, True, (FLASH, EFFICIENT)),
    ],
    ids=str,
)
def test_kernels_that_fail_are_not_allowed(
    recorded: Recorded, shape: tuple[int, ...], keys: int, grad: bool, allowed: tuple[str, ...]
) -> None:
    q = torch.randn(shape, dtype=torch.float16, requires_grad=grad)
    k = torch.randn(*shape[:2], keys, shape[3], dtype=torch.float16)
    out = by_torch(q, k, k)
    assert recorded.allowed == set(allowed)
    assert out.shape == q.shape
    with torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # the user's own choice
        if allowed == ALL:
            return
        by_torch(q, k, k)
        assert recorded.allowed == set(allowed) & {EFFICIENT}


@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize(("nq", "more"), [(5, 64), (1, 8)])
@pytest.mark.parametrize("kind", ["bool", "added", "one for all keys", "window", "ranges"])
def test_keys_are_hidden_behind_others_under_a_mask(
    recorded: Recorded, kind: str, nq: int, more: int
) -> None:
    nk = 64
    q, k, v = (torch.randn(1, 2, n, 8).requires_grad_() for n in (nq, nk, nk))
    seen = torch.rand(nq, nk) > 0.3
    calls: dict[str, dict[str, Any]] = {
        "bool": {"attn_mask": seen},
        "added": {"attn_mask": torch.where(seen, 0.5, -math.inf)},
        "one for all keys": {"attn_mask": torch.randn(nq, 1)},
        "window": {"window": (20, 3)},
        "ranges": {"key_ranges": torch.tensor([3, 40], dtype=torch.int32).reshape(1, 1, 1, 1, 2)},
    }
    call = calls[kind]
    dout = torch.randn_like(q)
    found = torch.autograd.grad(by_torch(q, k, v, **call), (q, k, v), dout)
    assert recorded.given["key"].shape[2] == recorded.given["attn_mask"].shape[-1] == nk + more
    assert recorded.allowed == set(ALL)
    exact = reference.attention_backward(dout, *(x.detach() for x in (q, k, v)), **call)
    for x, expected in zip(found, (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        by_torch(q, k, v, **call)
    assert recorded.given["key"].shape[2] == nk


@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "name", ["one for all keys", "a number", "every other", "turned", "shifted", "dense, shifted"]
)
def test_added_masks_reach_pytorch_with_a_number_for_each_key(
    recorded: Recorded, name: str, grad: bool
) -> None:
    q, k, v = (torch.randn(2, 2, n, 8).requires_grad_(grad) for n in (5, 7, 7))
    mask = {
        "one for all keys": torch.randn(5, 1),
        "a number": torch.randn(1, 1),
        "every other": torch.randn(5, 14)[:, ::2],
        "turned": torch.randn(7, 5).T,
        "shifted": torch.randn(5, 8)[:, 1:],
        "dense, shifted": torch.randn(36)[1:].view(5, 7),
    }[name]
    out = by_torch(q, k, v, attn_mask=mask)
    given = recorded.given["attn_mask"]
    assert given.shape[-1] == 7
    assert given.stride(-1) == 1
    assert given.data_ptr() % 16 == 0
    exact, _ = reference.attention(*(x.detach() for x in (q, k, v)), attn_mask=mask)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_mask_in_another_dtype_keeps_its_least_numbers() -> None:
    least = torch.finfo(torch.float32).min
    mask = torch.tensor([[least, -math.inf, 0.5, -1e30]])
    for dtype in (torch.float16, torch.bfloat16):
        found = _torch_kernels.mask_for_fused_kernels(mask, 4, dtype)
        assert found.dtype == dtype
        assert found[0, 0] == torch.finfo(dtype).min
        assert found[0, 1] == -math.inf
        assert found[0, 2] == 0.5
        assert found[0, 3].isfinite()


@pytest.mark.usefixtures("as_on_an_h200")
def test_only_the_mask_needs_a_gradient(recorded: Recorded) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    mask = torch.randn(5, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(by_torch(q, k, v, attn_mask=mask).square().sum(), mask)
    assert recorded.given["query"].requires_grad  # so that PyTorch keeps its log-sum-exp
    assert bool((gradient != 0).any())
    assert not q.requires_grad


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "from the top left": {"causal": True, "q_offset": 0},
    "window": {"window": (4, 2)},
    "bool mask": {"attn_mask": torch.rand(9, 33, generator=torch.Generator().manual_seed(1)) > 0.5},
    "softcap": {"softcap": 3.0, "causal": True},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [0.0, -0.125, -0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torch_takes_a_scale_of_0_or_less(dtype: torch.dtype, scale: float, name: str) -> None:
    call = CALLS[name] | {"scale": scale}
    q, k, v = (torch.randn(1, 2, n, 16).to(dtype).requires_grad_() for n in (9, 33, 33))
    out = archflash.attention(q, k, v, **call)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    inputs = [x.detach() for x in (q, k, v)]
    report = reference.check(
        out.detach(), reference.attention(*inputs, **call)[0], reference.baseline(*inputs, **call)
    )
    assert report.ok, report
    exact = reference.attention_backward(dout, *inputs, **call)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    for x, expected in zip(found, (exact.dq, exact.dk, exact.dv), strict=True):
        torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:archflash")
@pytest.mark.parametrize("scale", [0, -0.5])
@pytest.mark.parametrize("dropout_p", [0.0, 1e-9])
def test_the_drop_in_takes_a_scale_of_0_or_less(scale: float, dropout_p: float) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    out = archflash.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale
    )
    exact, _ = reference.attention(q, k, v, causal=True, scale=float(scale))
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def test_no_columns_are_scores_of_0() -> None:
    v = torch.randn(2, 2, 7, 5)
    q, k = torch.randn(2, 2, 3, 0), torch.randn(2, 2, 7, 0)
    out = archflash.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(2, 2, 3, 5))


# --- PyTorch's operators ---


def mended(operator: str, *args: Any, **kwargs: Any) -> _mended_calls.Call:
    return _mended_calls.Call(f"_scaled_dot_product_{operator}_attention", args, kwargs)


def test_a_call_that_pytorch_takes_rightly_stays_as_it_is() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16, dtype=torch.float16) for _ in range(3))
    mask = torch.randn(1, 2, 8, 8, dtype=torch.float16)
    for operator, more in (("flash", ()), ("cudnn", (None, True)), ("efficient", (mask, True))):
        call = mended(operator, q, k, v, *more, scale=0.5)
        assert not call.differs
        assert all(x is y for x, y in zip(call.args, (q, k, v, *more), strict=True))
        assert call.results((1, 2)) == (1, 2)


def test_rows_at_odd_addresses_are_copied() -> None:
    q, k, v = (torch.randn(1, 2, 8, 17, dtype=torch.float16)[..., :16] for _ in range(3))
    for operator, more in (("flash", ()), ("cudnn", (None, True)), ("efficient", (None, True))):
        call = mended(operator, q, k, v, *more)
        assert call.differs
        for x, given in zip(call.args[:3], (q, k, v), strict=True):
            assert x.is_contiguous()
            assert torch.equal(x, given)


@pytest.mark.parametrize("operator", ["cudnn", "efficient"])
def test_masks_that_pytorch_reads_wrongly_are_copied(operator: str) -> None:
    q, k, v = (torch.randn(2, 2, 8, 16, dtype=torch.float16) for _ in range(3))
    for mask in (
        torch.randn(1, 1, 8, 8),
        torch.randn(2, 1, 8, 1, dtype=torch.float16).expand(2, 2, 8, 8),
        torch.randn(2, 2, 8, 16, dtype=torch.float16)[..., ::2],
        torch.randn(2, 2, 8, 9, dtype=torch.float16)[..., 1:],
    ):
        call = mended(operator, q, k, v, mask, False)
        found = call.args[3]
        assert call.differs
        assert found.dtype == q.dtype
        assert found.stride(-1) == 1
        torch.testing.assert_close(found, mask.half())


def test_expanded_keys_are_copied_where_the_memory_efficient_kernel_reads_beyond_them() -> None:
    q = torch.randn(1, 4, 8, 16, dtype=torch.float16)
    for nk, copied in ((33, True), (34, False)):
        k = torch.randn(1, 1, nk, 16, dtype=torch.float16).expand(1, 4, nk, 16)
        mask = torch.zeros(1, 1, 8, nk, dtype=torch.float16)
        assert mended("efficient", q, k, k, mask, False).args[1].is_contiguous() == copied
        assert not mended("efficient", q, k, k, None, False).differs


@pytest.mark.parametrize(("scale", "factor"), [(0.0, 0.0), (-0.5, -1.0)])
def test_a_scale_of_0_or_less_becomes_positive(scale: float, factor: float) -> None:
    q, k, v, out, dout = (torch.randn(1, 2, 8, 16) for _ in range(5))
    assert not mended("efficient", q, k, v, None, True, scale=scale).differs  # it takes any
    for operator, more in (("flash", ()), ("cudnn", (None, True))):
        call = mended(operator, q, k, v, *more, scale=scale)
        assert call.differs
        assert call.kwargs["scale"] > 0
        torch.testing.assert_close(call.args[0] * call.kwargs["scale"], q * scale)
    lse = torch.randn(1, 2, 8)
    rest = (None, None, 8, 8, 0.0, True, None, None)
    args = (dout, q, k, v, out, lse, *rest)
    backward = _mended_calls.Call(
        "_scaled_dot_product_flash_attention_backward", args, {"scale": scale}
    )
    dq, dk, dv = backward.results((q, k, v))
    torch.testing.assert_close(dq, q * factor)
    assert dk is k
    assert dv is v


@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize("masked", [False, True])
def test_both_passes_of_cudnn_get_hidden_keys(masked: bool) -> None:
    q, out, dout = (torch.randn(1, 2, 8, 16) for _ in range(3))
    k, v = (torch.randn(1, 64, 2, 16).transpose(1, 2) for _ in range(2))
    mask = torch.randn(1, 1, 8, 64) if masked else None
    lse = torch.randn(1, 2, 8, 1)
    forward = mended("cudnn", q, k, v, mask, True, 0.25)
    results = forward.results((out, lse, None, None, 8, 128, lse, lse, None))
    assert results[5] == 64
    rest = (lse, lse, mask, None, None, 8, 64, 0.25, False)
    args = (dout, q, k, v, out, lse, *rest)
    backward = _mended_calls.Call("_scaled_dot_product_cudnn_attention_backward", args, {})
    for key, given in ((forward.args[1], forward.args[3]), (backward.args[2], backward.args[8])):
        assert torch.equal(key[:, :, :64], k)
        assert key.shape[2] == given.shape[-1] == 128
        assert bool((given[..., 64:] == -math.inf).all())
        assert bool((given[..., :64] == (0.0 if mask is None else mask)).all())
    dk = torch.randn(1, 2, 128, 16)
    results = backward.results((q, dk, dk))
    assert results[1].stride() == k.stride()
    assert torch.equal(results[1], dk[:, :, :64])
    causal = (*args[:-1], True)
    assert (
        not _mended_calls.Call("_scaled_dot_product_cudnn_attention_backward", causal, {})
        .args[2]
        .shape[2]
        > 64
    )
    assert mended("cudnn", q, k, v, mask, False).args[1] is k  # no gradients are needed


def test_the_runtime_asks_again_for_calls_that_were_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands a call like an earlier one to PyTorch's kernel as it is."""
    noted: list[str] = []
    scales: list[float] = []

    def original(keys: object, *args: Any, scale: float) -> tuple[Tensor, ...]:
        scales.append(scale)
        return args[1:4]

    monkeypatch.setattr(native, "note_declined", noted.append)
    kernel = _replacing._replacement(
        "_scaled_dot_product_flash_attention_backward", lambda *args, **kwargs: "a reason", original
    )
    q, k, v, out, dout = (torch.randn(1, 2, 8, 16) for _ in range(5))
    rest = (torch.randn(1, 2, 8), None, None, 8, 8, 0.0, True, None, None)
    for scale in (0.5, -0.5):
        dq, dk, _ = kernel(dout, q, k, v, out, *rest, scale=scale)
        assert torch.equal(dq, q)  # -q was given to it, and its gradient is turned back
        assert dk is k
    assert scales == [0.5, 0.5]
    assert noted == ["a reason"]
    archflash.stats(reset=True)


@pytest.mark.parametrize("repeated", [0, 1, 2])
def test_cudnn_gets_no_repeated_queries_beside_values_of_other_columns(
    repeated: int, as_on_an_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(
        _torch_kernels, "PYTORCHS_SDPA", lambda q, *rest, **call: given.append(q) or q
    )
    q = torch.randn(2, 2, 3, 8).narrow(repeated, 0, 1).expand(2, 2, 3, 8)
    k = torch.randn(2, 2, 4, 8)
    _torch_kernels.pytorchs_sdpa(q, k, torch.randn(2, 2, 4, 16))
    _torch_kernels.pytorchs_sdpa(q, k, k)
    assert [x.is_contiguous() for x in given] == [True, False]
    assert all(torch.equal(x, q) for x in given)
