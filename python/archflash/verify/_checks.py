"""A call by a forced kernel, run several times and compared with float64: attention, gradients,
caches, and the functions beside attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import _options, _registry, reference
from archflash.verify._making import FP8, Call, Maker, Tensors, cache_call
from archflash.verify._setup import NotHereError, Setup, Told
from archflash.verify._wrong import WrongError, judge, same_bits, where

# Runs of a call that must give the same bits. What is read too early is not so in every run.
REPEATS, LONG_REPEATS = 10, 12
LONG_ROWS = 16384
SAMPLE_ROWS = 48  # query rows of a long call that are compared at each of several places
BYTES_OF_LONG = 1 / 6  # share of the GPU's memory that the tensors of a long call may take


def check_call(
    kernel: str, name: str, make: Callable[[Maker], tuple[Tensors, Call]], setup: Setup
) -> Told:
    """Runs a call several times; compares bits between runs, and the result with float64."""
    (q, k, v), call = make(Maker(setup, name))
    plan = planned(kernel, q, k, v, call, setup)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = archflash.attention(
            q, k, v, implementation=kernel, return_lse=True, **call
        )
        return answer

    out, lse = run(q, k, v)
    for _ in range(0 if setup.simulate else REPEATS - 1):
        run(*poisoned(q, k, v))
        forget_caches(setup)
        again, lse_again = run(q, k, v)
        same_bits("output", by_head(out, call), by_head(again, call))
        same_bits("log-sum-exp", lse, lse_again)
    compare(kernel, setup, (q, k, v), call, out, lse)
    return Told(kernels=tuple(plan.kernels))


def poisoned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors like these that are full of NaN. A call with them leaves NaN wherever a kernel keeps
    anything, so that the next one shows it if it reads something before it is there.
    """
    made = [torch.empty_like(x) for x in tensors]
    for x in made:
        if x.dtype.itemsize == 1:
            x.view(torch.uint8).fill_(0x7F)  # NaN in both types of 8 bits
        else:
            x.fill_(torch.nan)
    return tuple(made)


@functools.cache
def _scratch(device: str, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def forget_caches(setup: Setup) -> None:
    """Fills the GPU's L2 cache with other data, so that the next copies of a kernel take long."""
    size = 2 * torch.cuda.get_device_properties(setup.device).L2_cache_size
    if size < setup.memory / 8:
        _scratch(setup.device, size).fill_(1)


def planned(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, call: Call, setup: Setup, **more: Any
) -> _native.LaunchPlan:
    """The plan of a call by a kernel, which raises ForcedImplementationError if it does not serve
    it.
    """
    plan = archflash.explain(
        q, k, v, implementation=kernel, device=setup.planned_for, return_lse=True, **call, **more
    ).plan
    if plan is None:
        raise NotHereError(f"{kernel} launches nothing for it")
    return plan


def by_head(x: Tensor, call: Call) -> Tensor:
    """A tensor of rows with its heads before its rows."""
    if call.get("cu_seqlens_q") is not None:
        return x.transpose(0, 1)
    return x.transpose(1, 2) if call.get("layout") == "bnhd" else x


def compare(
    kernel: str, setup: Setup, tensors: Tensors, call: Call, out: Tensor, lse: Tensor | None
) -> None:
    """Raises WrongError if a result breaks the error rule."""
    q, k, v = tensors
    asked = {name: value for name, value in call.items() if name not in _options.ADVICE}
    expected, expected_lse = reference.attention(q, k, v, **asked)
    if call.get("approximate") is not None:
        report, lse_report = reference.check_approximate(
            call["approximate"], out, lse, q, k, v, **asked
        )
        judge("output", by_head(out, call), by_head(expected, call), report)
        if lse is not None and lse_report is not None:
            judge("log-sum-exp", lse[..., None], expected_lse[..., None], lse_report)
        return
    if str(q.dtype).removeprefix("torch.") in FP8:
        report = reference.check_fp8(out, expected, q, k, v, **asked)
    else:
        report = reference.check(out, expected, reference.baseline(q, k, v, **asked))
    judge("output", by_head(out, call), by_head(expected, call), report)
    if lse is not None:
        more = reference.fp8_score_error(kernel, setup.capability, q, k, v, **asked)
        judge(
            "log-sum-exp", lse[..., None], expected_lse[..., None],
            reference.check_lse(lse, expected_lse, more),
        )  # fmt: skip


# --- long calls ---


def long_call(kernel: str, dtype: str, dims: tuple[int, int], setup: Setup) -> Told:
    """A long causal call: it is finite, has the same bits each time, and is right in some rows."""
    heads = (8, 2)
    rows = long_rows(kernel, dims, heads, setup.memory)
    q, k, v = Maker(setup, f"long {dtype} {dims}").qkv(dtype, dims, heads, rows, rows)
    call: Call = {"causal": True}
    plan = planned(kernel, q, k, v, call, setup)
    out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True, **call)
    for number in range(LONG_REPEATS):
        if number % 4 == 0:
            archflash.attention(*poisoned(q, k, v), implementation=kernel, **call)
        again = archflash.attention(q, k, v, implementation=kernel, **call)
        same_bits("output", out, again)
    compare_rows(kernel, setup, (q, k, v), call, out, lse)
    return Told(f"{rows} rows", tuple(plan.kernels))


def long_rows(kernel: str, dims: tuple[int, int], heads: tuple[int, int], memory: int) -> int:
    """The rows of a long call, whose tensors fit into a share of the GPU's memory."""
    row_bytes = 4 * 2 * sum(heads) * sum(dims)  # numbers are made in float32
    rows = LONG_ROWS if _registry.uses_tensor_cores(kernel) else LONG_ROWS // 4
    while rows > 1024 and rows * row_bytes > memory * BYTES_OF_LONG:
        rows //= 2
    return rows - 37  # the last tile is not full


def compare_rows(
    kernel: str, setup: Setup, tensors: Tensors, call: Call, out: Tensor, lse: Tensor
) -> None:
    """`compare` for some rows of a call whose only option is causal, and that all are finite."""
    q, k, v = tensors
    if not bool(out.isfinite().all()):
        raise WrongError("output: values that are not finite", where(~out.isfinite(), out))
    nq, nk, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    for number, start in enumerate(
        (0, nq // 5 // 128 * 128 + 100, nq // 2, nq * 4 // 5, max(nq - SAMPLE_ROWS, 0))
    ):
        head = number % k.shape[1]
        rows = slice(start, start + SAMPLE_ROWS)
        of_head = slice(head * group, (head + 1) * group)
        part = (q[:, of_head, rows], k[:, head : head + 1], v[:, head : head + 1])
        asked = call | {"q_offset": nk - nq + start}
        try:
            compare(kernel, setup, part, asked, out[:, of_head, rows], lse[:, of_head, rows])
        except WrongError as error:
            said = f"heads from {head * group}, rows from {start} on: {error}"
            raise WrongError(said, error.where) from None


def decode(kernel: str, dtype: str, d: int, rows: int, batch: int, setup: Setup) -> Told:
    """Runs one step 20 times, which must give the same bits, and compares it with float64."""
    keys = 20011 if batch * d < 512 else 6007
    q, k, v = Maker(setup, f"decode {dtype} {d} {rows} {batch}").qkv(
        dtype, (d, d), (8, 2), rows, keys, batch
    )
    call: Call = {"causal": True}
    plan = planned(kernel, q, k, v, call, setup)
    out, lse = archflash.attention(q, k, v, implementation=kernel, return_lse=True, **call)
    for number in range(20):
        if number % 5 == 0:
            archflash.attention(*poisoned(q, k, v), implementation=kernel, **call)
            forget_caches(setup)
        same_bits("output", out, archflash.attention(q, k, v, implementation=kernel, **call))
    compare(kernel, setup, (q, k, v), call, out, lse)
    return Told(f"{keys} keys", tuple(plan.kernels))


# --- gradients ---


def check_gradients(
    kernel: str, name: str, make: Callable[[Maker], tuple[Tensors, Call]], more: Call, setup: Setup
) -> Told:
    """Compares gradients with float64. Deterministic ones have the same bits each time."""
    maker = Maker(setup, name)
    (q, k, v), call = make(maker)
    plan = planned(kernel, q, k, v, call, setup, backward=True)
    dtype = str(q.dtype).removeprefix("torch.")
    dout = maker.rand(*q.shape[:-1], v.shape[-1], dtype=dtype)
    # Output and log-sum-exp are those of the formula, so that no forward pass matters.
    exact, exact_lse = reference.attention(q, k, v, **call)
    out, lse = exact.to(q.dtype), exact_lse.float()

    def run(dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return archflash.attention_backward(
            dout, q, k, v, out, lse, implementation=kernel, **call, **more
        )

    run(*poisoned(dout, q, k, v))
    forget_caches(setup)
    found = run(dout, q, k, v)
    names = ("dq", "dk", "dv", "dsinks")
    for _ in range(4 if more.get("deterministic") else 0):
        for what, first, again in zip(names, found, run(dout, q, k, v), strict=False):
            same_bits(what, by_rows(first, call), by_rows(again, call))
    expected = reference.attention_backward(dout, q, k, v, **call)
    base = reference.baseline_backward(dout, q, k, v, **call)
    for what, gradient in zip(names, found, strict=False):
        right = getattr(expected, what)
        allowed = expected.sinks_rounding if what == "dsinks" else 0.0
        rounded = getattr(base, what).to(gradient.dtype)
        report = reference.check(gradient, right, rounded, allowed)
        judge(what, by_rows(gradient, call), by_rows(right, call), report)
    return Told(kernels=tuple(plan.kernels))


def by_rows(x: Tensor, call: Call) -> Tensor:
    """`by_head` for gradients, among them those of sinks."""
    return x if x.dim() == 1 else by_head(x, call)


# --- caches ---


def check_cache(kernel: str, name: str, dtype: str, made: dict[str, Any], setup: Setup) -> Told:
    """Compares a call over a cache with float64."""
    q, caches, call = cache_call(Maker(setup, name), dtype, made)
    plan = planned(kernel, q, caches[0], caches[1], call, setup)
    expected, expected_lse = reference.attention_with_kvcache(q, *caches, **call)
    base = reference.baseline_with_kvcache(q, *caches, **call)
    after = reference.appended(*caches, **call)

    def run(q: Tensor, *caches: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        own = [x.clone() for x in caches]
        out, lse = archflash.attention_with_kvcache(
            q, *own, implementation=kernel, return_lse=True, **call
        )
        return out, lse, own

    def heads_first(x: Tensor) -> Tensor:  # (batch, heads, rows, dv), of one sequence if packed
        return x.transpose(-3, -2) if x.ndim == 4 else x.transpose(-3, -2)[None]

    def of_heads(x: Tensor) -> Tensor:  # (batch, heads, rows, 1)
        return (x if x.ndim == 3 else x[None])[..., None]

    out, lse, written = run(q, *caches)
    for _ in range(REPEATS - 1):
        run(*poisoned(q, *caches))
        forget_caches(setup)
        again, lse_again, _ = run(q, *caches)
        same_bits("output", heads_first(out), heads_first(again))
        same_bits("log-sum-exp", lse, lse_again)
    report = reference.check(out, expected, base)
    judge("output", heads_first(out), heads_first(expected), report)
    judge(
        "log-sum-exp", of_heads(lse), of_heads(expected_lse),
        reference.check_lse(lse, expected_lse),
    )  # fmt: skip
    for what, cache, right in zip(("k_cache", "v_cache"), written, after, strict=True):
        same_bits(what, right.float().flatten(1), cache.float().flatten(1))
    return Told(kernels=tuple(plan.kernels))


# --- the functions beside attention ---


def check_quantize(setup: Setup) -> Told:
    """Numbers of 8 bits and their scales against float32 on the same device."""
    if not _native.has_quantizer(setup.capability):
        raise NotHereError("no code of quantize_fp8 for this GPU: it runs in PyTorch")
    x = Maker(setup, "quantize").rand(2, 3, 300, 128, dtype="bfloat16")
    names = list(_native.quantizer_names())
    for per, dims in (("tensor", (0, 1, 2, 3)), ("head", (2, 3))):
        made, scale = archflash.quantize_fp8(x, per=per, implementation=names[0])
        again, _ = archflash.quantize_fp8(x, per=per, implementation=names[0])
        same_bits(f"per {per}", made.float(), again.float())
        largest = x.float().abs().amax(dims, keepdim=True)
        back = made.double() * scale.double().reshape(largest.shape)
        bound = x.double().abs() * 2.0**-4 + largest.double() * 2.0**-9
        wrong = ~((back - x.double()).abs() <= bound)
        if bool(wrong.any()):
            raise WrongError(f"per {per}: numbers are not the nearest", where(wrong, made.float()))
    return Told()


def check_merge(setup: Setup) -> Told:
    """Two halves of the keys, merged, are attention over all of them."""
    if not _native.has_merger(setup.capability):
        raise NotHereError("no code of merge_attention for this GPU: it runs in PyTorch")
    maker = Maker(setup, "merge")
    for dtype in ("float16", "bfloat16"):
        outs = [maker.rand(2, 3, 300, 128, dtype=dtype) for _ in range(3)]
        lses = [maker.rand(2, 3, 300) for _ in range(3)]
        name = next(iter(_native.merger_names()))
        out, lse = archflash.merge_attention(outs, lses, implementation=name)
        expected, expected_lse = reference.merge_attention(outs, lses)
        shares = torch.softmax(torch.stack(lses), 0)[..., None]
        plain = (shares * torch.stack(outs).float()).sum(0)
        report = reference.check(out, expected, plain.to(out.dtype))
        judge("output", out, expected, report)
        judge(
            "log-sum-exp", lse[..., None], expected_lse[..., None],
            reference.check_lse(lse, expected_lse),
        )  # fmt: skip
    return Told()
