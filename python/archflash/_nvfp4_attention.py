"""archflash.attention_nvfp4: attention of inputs that have four bits as they come."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from archflash import _api, _dispatch, _key_lists, _options, _strides
from archflash import _archflash as _native
from archflash._eager import is_eager, overridden, stands_for_tensor
from archflash._given import check_dense
from archflash._quantize_nvfp4 import GROUP
from archflash._value_checks import is_readable

Nvfp4 = tuple[Tensor, Tensor, Tensor]
_STORED = 32  # Problem.descale: bits 0 to 2 say that each head of q, k, v has a unit


def attention_nvfp4(
    q: Nvfp4, k: Nvfp4, v: Nvfp4, *, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, sinks: Tensor | None = None,
    scale: float | None = None, q_offset: int | Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, implementation: str | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Computes softmax(scale * q k^T) v of NVFP4 numbers, without quantising them again.

    On 12.x the kernel of approximate="nvfp4" multiplies them as they are, and rounds only P, to
    four bits, where `archflash verify` has found it right. Elsewhere, where that kernel cannot
    serve the call or torch traces it, the numbers are converted to `out_dtype` and
    `archflash.attention` serves it.

    Args:
        q: the triple (values, scales, unit) of `archflash.quantize_nvfp4`: uint8 ``(batch, heads_q,
            nq, d / 2)``, any strides with rows contiguous; float8_e4m3fn ``(batch, heads_q, nq, d /
            16)``, not negative, the last dimension contiguous; float32 ``()``, ``(1,)`` or
            ``(batch, heads_q, 1, 1)``, positive and finite. Exact kernels give gradients of sinks
            and units.
        k: the same, with heads_kv and nk.
        v: the same with scales along its rows, as `quantize_nvfp4` makes them with dim=-2: values
            ``(batch, heads_kv, nk, dv / 2)``, scales ``(batch, heads_kv, ceil(nk / 16), dv)``.
        causal, window, sinks, scale, q_offset: as for `archflash.attention`.
        out_dtype: bfloat16 or float16.
        implementation: forces one by name; "torch" computes exactly.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        The output ``(batch, heads_q, nq, dv)``; with return_lse, the pair (output, lse), as
        `archflash.attention` returns them.

    Raises:
        ValueError: shapes that disagree, what `archflash.attention` refuses, or, under
            ARCHFLASH_CHECK=1, a unit that is not positive and finite.
        TypeError: an input that is no such triple, another dtype, or mixed devices.
        ForcedImplementationError: the forced implementation cannot serve the call.

    Example:
        >>> import archflash, torch
        >>> q, k, v = (torch.randn(1, 2, 64, 64) for _ in range(3))
        >>> made = [archflash.quantize_nvfp4(x, dim=dim) for x, dim in ((q, -1), (k, -1), (v, -2))]
        >>> archflash.attention_nvfp4(*made, causal=True).shape
        torch.Size([1, 2, 64, 64])
    """
    if stands_for_tensor(q):
        return overridden(attention_nvfp4, locals())
    inputs = {"q": _checked("q", q), "k": _checked("k", k), "v": _checked("v", v, along_rows=True)}
    device = inputs["q"][0].device
    others = {"k": inputs["k"][0], "v": inputs["v"][0], "sinks": sinks, "q_offset": q_offset}
    for name, x in others.items():
        if not isinstance(x, Tensor):
            continue
        check_dense(**{name: x})
        if x.device != device:
            raise TypeError(
                f"{name} is on {x.device} but q is on {device}: move them to one device"
            )
    if _key_lists.ALWAYS_CHECK and is_eager() and is_readable(inputs["q"][0]):
        for name, (_, _, unit) in inputs.items():
            _check_unit(name, unit)
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"implementation is {_native.given(implementation)}: it must be a str")
    if not (out_dtype is torch.bfloat16 or out_dtype is torch.float16):
        raise TypeError(
            f"out_dtype is {_native.given(out_dtype)}: it must be torch.bfloat16 or torch.float16"
        )
    call: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "sinks": sinks,
        "scale": scale,
        "q_offset": q_offset,
        "return_lse": return_lse,
    }
    values = [x for x, _, _ in inputs.values()]
    given = (*(x for of in inputs.values() for x in of), sinks, q_offset)
    plan = None
    if is_eager() and _native.all_plain(*given):
        forced = _dispatch.forced() if implementation is None else implementation
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in given
        )
        if forced != "torch":
            plan = _plan(inputs, call, out_dtype, forced, needs_grad)
    if plan is None:
        exact = [_numbers(x, out_dtype, -2 if of == "v" else -1) for of, x in inputs.items()]
        return _api.attention(exact[0], exact[1], exact[2], implementation=implementation, **call)
    batch, heads, nq, _ = values[0].shape
    out = _strides.new_in_order(values[0], (batch, heads, nq, 2 * values[2].shape[3]), out_dtype)
    tensors: dict[str, Any] = {"out": out}
    for name, (numbers, scales, unit) in inputs.items():
        tensors |= {name: numbers, f"{name}_descale": scales, f"{name}_unit": unit}
    if return_lse:
        tensors["lse"] = out.new_empty(batch, heads, nq, dtype=torch.float32)
    tensors["workspace"] = out.new_empty(plan.workspace_bytes, dtype=torch.uint8)
    tensors |= {"sinks": sinks} if sinks is not None else {}
    tensors |= {"q_offset": q_offset} if isinstance(q_offset, Tensor) else {}
    _native.launch(plan, tensors)
    return (out, tensors["lse"]) if return_lse else out


def _checked(name: str, x: Any, *, along_rows: bool = False) -> Nvfp4:
    """An input whose parts fit one another."""
    if not isinstance(x, (tuple, list)) or len(x) != 3 or not all(isinstance(y, Tensor) for y in x):
        raise TypeError(
            f"{name} is {_native.given(x)}: it must be the triple (values, scales, unit) of "
            "archflash.quantize_nvfp4"
        )
    values, scales, unit = x
    for part, y, dtype in (
        ("values", values, torch.uint8),
        ("scales", scales, torch.float8_e4m3fn),
        ("unit", unit, torch.float32),
    ):
        if y.dtype != dtype:
            raise TypeError(f"the {part} of {name} have dtype {y.dtype}: it must be {dtype}")
        if y.device != values.device:
            raise TypeError(
                f"the {part} of {name} are on {y.device}, but its values on {values.device}: move "
                "them to one device"
            )
    if values.ndim != 4 or values.shape[3] % (GROUP // 2):
        raise ValueError(
            f"the values of {name} have shape {tuple(values.shape)}: it must be (batch, heads, "
            f"rows, d / 2), with d a multiple of {GROUP}"
        )
    batch, heads, rows, half = values.shape
    wanted = (batch, heads, rows, 2 * half // GROUP)
    if along_rows:
        wanted = (batch, heads, -(-rows // GROUP), 2 * half)
    if tuple(scales.shape) != wanted:
        how = ", as quantize_nvfp4 makes them with dim=-2" if along_rows else ""
        raise ValueError(
            f"the scales of {name} have shape {tuple(scales.shape)}: it must be {wanted}{how}"
        )
    if tuple(unit.shape) not in ((), (1,), (batch, heads, 1, 1)):
        raise ValueError(
            f"the unit of {name} has shape {tuple(unit.shape)}: it must be (), (1,) or "
            f"{(batch, heads, 1, 1)}"
        )
    for part, y in (("values", values), ("scales", scales)):
        if y.shape[3] > 1 and y.stride(3) != 1:
            raise ValueError(f"the {part} of {name} have strided rows: call .contiguous() on them")
    return values, scales, unit.contiguous()


def _check_unit(name: str, unit: Tensor) -> None:
    """Checks the values of a unit on its device; one number comes back."""
    if unit.is_meta:
        return
    wrong = ~((unit > 0) & unit.isfinite())
    if not wrong.any():
        return
    place = [int(x) for x in wrong.nonzero()[0]]
    of_head = f" for {', '.join(map(str, place[:2]))} (batch, head)" if unit.ndim == 4 else ""
    value = float(unit.detach()[tuple(place)])
    raise ValueError(f"the unit of {name} is {value}{of_head}: it must be positive and finite")


def _numbers(x: Nvfp4, dtype: torch.dtype, dim: int) -> Tensor:
    """What an input stands for: exact in bfloat16 but for the unit."""
    values, scales, unit = x
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=values.device)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2).int()
    numbers = torch.cat([numbers, -numbers])[codes]
    by_number = scales.float().repeat_interleave(GROUP, dim).narrow(dim, 0, codes.shape[dim])
    return (numbers * by_number * unit).to(dtype)


def _plan(
    inputs: dict[str, Nvfp4],
    call: dict[str, Any],
    dtype: torch.dtype,
    name: str | None,
    needs_grad: bool,
) -> _native.LaunchPlan | None:
    """The plan of a call; None where the exact kernels serve it."""
    stand_ins = []
    fields: dict[str, Any] = {
        "descale": _STORED,
        "on_cuda": int(inputs["q"][0].is_cuda),
        "needs_grad": int(needs_grad),
    }
    for bit, (of, (values, scales, unit)) in enumerate(inputs.items()):
        sizes = (*values.shape[:3], 2 * values.shape[3])
        # Its strides count bytes of the values.
        stand_ins.append(torch.empty_strided(sizes, values.stride(), dtype=dtype, device="meta"))
        fields[f"{of}_align"] = min(16, values.data_ptr() & -values.data_ptr() or 16)
        steps = [s if n > 1 else 0 for n, s in zip(scales.shape, scales.stride(), strict=True)]
        fields[f"{of}_descale"] = dict(zip(("batch", "head", "row"), steps, strict=False))
        fields["descale"] |= int(unit.ndim == 4) << bit
    options = {
        x: y.to("meta") if isinstance(y, Tensor) and x in ("sinks", "q_offset") else y
        for x, y in (call | {"approximate": "nvfp4"}).items()
    }
    given = tuple(_options.complete(options)[x] for x in _options.OF_ATTENTION)
    of_q, of_k, of_v = stand_ins
    problem = _native.make_problem(of_q, of_k, of_v, given, 0).to_dict()
    return _planned(tuple(sorted(_flat(problem | fields))), inputs["q"][0].device.index or 0, name)


def _flat(fields: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, tuple(value.items()) if isinstance(value, dict) else value)
        for name, value in fields.items()
    ]


@functools.lru_cache(maxsize=256)
def _planned(
    fields: tuple[tuple[str, Any], ...], index: int, name: str | None
) -> _native.LaunchPlan | None:
    problem = _native.Problem.from_dict(
        {key: dict(value) if isinstance(value, tuple) else value for key, value in fields}
    )
    if name is None and (not problem.on_cuda or problem.needs_grad):
        return None
    device, obstacle = _dispatch.device_of(problem, index)
    if name is not None:
        return _dispatch.select(problem, device, name, obstacle).plan
    if obstacle or device is None or device.capability[0] != 12:
        return None
    return _dispatch.decide(problem, index, None)
