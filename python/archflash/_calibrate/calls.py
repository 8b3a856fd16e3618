"""The tensors of a point, the candidates that serve it, and whether what they compute is right."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from archflash import _archflash as _native
from archflash import _dispatch, _fused_kernels, _registry, masks, reference
from archflash._api import attention, explain, make_problem
from archflash._calibrate.grid import Point
from archflash._call_times import BOTH
from archflash._kvcache import attention_with_kvcache

PYTORCHS = {
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_DTYPES = {"16 bits": torch.bfloat16, "fp8": torch.float8_e4m3fn, "float32": torch.float32}
# Rows that are compared with float64: at the start, in the middle and at the end of two heads.
_ROWS = 24
# The root mean square error of gradients over that of the right ones; 16-bit kernels have 3e-3.
_GRADIENTS = 0.02
Outputs = tuple[Tensor, ...]  # of a forward pass one, of both passes dq, dk and dv


class Inputs(NamedTuple):
    """The tensors of one call, rows before heads in memory, as models have them."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class Call:
    """A point on a GPU: tensors and options, and the candidates.

    Attributes:
        point: the call.
        device: where.
        options: tensors of masks and lengths, by their names in `archflash.attention`.
    """

    point: Point
    device: torch.device
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        point = self.point
        b, hq, _, nq, nk = point.shape
        on: dict[str, Any] = {"device": self.device}
        if point.kind.mask in ("bool", "added"):
            seen = torch.rand(nq, nk, **on) < 0.5
            seen[:, 0] = True
            added = torch.zeros(nq, nk, dtype=self.dtype, **on).masked_fill(~seen, -math.inf)
            self.options["attn_mask"] = seen if point.kind.mask == "bool" else added
        elif point.kind.mask == "slopes":
            self.options["alibi_slopes"] = torch.linspace(0.01, 0.5, hq, **on)
        elif point.kind.mask == "blocks":
            table = torch.rand(1, 1, -(-nq // 64), -(-nk // 64), **on) < 0.25
            table[..., 0] = True
            self.options["block_mask"] = table
        elif point.kind.mask == "ranges":
            ids = torch.arange(nq, device=self.device) // max(nq // 4, 1)
            self.options["key_ranges"] = masks.documents(ids[None].int())
        if point.kind.way == "packed":
            for name, rows in (("q", nq), ("k", nk)):
                ends = torch.arange(0, (b + 1) * rows, rows, dtype=torch.int32, **on)
                self.options[f"cu_seqlens_{name}"] = ends
                self.options[f"max_seqlen_{name}"] = rows
        if point.kind.way == "cache":
            self.options["cache_seqlens"] = torch.full((b,), nk, dtype=torch.int32, **on)

    @property
    def dtype(self) -> torch.dtype:
        dtype = _DTYPES[self.point.kind.dtype]
        if dtype == torch.bfloat16 and self.capability < (8, 0):
            return torch.float16
        return dtype

    @property
    def capability(self) -> tuple[int, int]:
        capability: tuple[int, int] = _dispatch.query_device(self.device.index).capability
        return capability

    def inputs(self, pool: Tensor, count: int) -> list[Inputs]:
        """Tensors of so many calls, which lie one behind the other in `pool`, a row of random
        numbers.
        """
        b, hq, hkv, nq, nk = self.point.shape
        made, at = [], 0
        for _ in range(count):
            three = []
            for h, n, d in (
                (hq, nq, self.point.d), (hkv, nk, self.point.d), (hkv, nk, self.point.dv),
            ):  # fmt: skip
                size = b * h * n * d
                if at + size > pool.numel():
                    at = 0
                x = pool[at : at + size].view(b, n, h, d)
                at += -(-size // 64) * 64
                three.append(x)
            made.append(Inputs(*(self._lying(x) for x in three)))
        return made

    def _lying(self, x: Tensor) -> Tensor:
        if self.point.kind.way == "cache":
            return x
        return x.flatten(0, 1) if self.point.kind.way == "packed" else x.transpose(1, 2)

    # --- candidates ---

    def candidates(self) -> list[str]:
        """Who may be measured: the kernels that have a plan, and PyTorch."""
        plain = self.point.kind.way == "dense" and self.point.kind.mask == "none"
        found = [name for name in _registry.kernel_names() if self._has_plan(name)]
        if plain and self.point.kind.dtype == "16 bits":
            return found + [name for name in PYTORCHS if self._pytorch_may(name)]
        if self.point.kind.dtype != "fp8" and self.point.kind.way == "dense":
            found.append(_registry.TORCH)
        return found

    def _has_plan(self, name: str) -> bool:
        if not _native.targets(name):
            return False
        if self.point.kind.way == "cache":
            return True  # its call says no by itself
        if self.point.kind.passes == BOTH and not _native.has_backward(name):
            return False
        device = _dispatch.query_device(self.device.index)
        return not isinstance(_native.plan(name, self.problem, device), list)

    @functools.cached_property
    def problem(self) -> _native.Problem:
        """The call as planning sees it; not for caches."""
        q, k, v, options = self._described()
        return make_problem(q, k, v, causal=self.point.kind.causal, **options).as_if_on_cuda()

    def _described(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """The call without its numbers."""
        b, hq, hkv, nq, nk = self.point.shape
        rows = ((nq, hq, self.point.d), (nk, hkv, self.point.d), (nk, hkv, self.point.dv))
        q, k, v = (
            self._lying(torch.empty(b, *each, dtype=self.dtype, device="meta")) for each in rows
        )
        if self.point.kind.passes == BOTH:
            q.requires_grad_()
        options = {
            option: x.to("meta") if isinstance(x, Tensor) else x
            for option, x in self.options.items()
        }
        return q, k, v, options

    def decision(self) -> _dispatch.Decision:
        """Who serves the call where nothing is forced; not for caches."""
        q, k, v, options = self._described()
        causal = self.point.kind.causal
        return explain(q, k, v, causal=causal, device=self.device.index, **options)

    def _pytorch_may(self, name: str) -> bool:
        kind, (b, hq, hkv, nq, nk) = self.point.kind, self.point.shape
        if kind.causal and nq != nk:
            return False
        if name == "torch-efficient" and hq != hkv:
            return False
        if name == "torch-flash" and self.point.d != self.point.dv:
            return False
        return name not in _fused_kernels.faults(
            capability=self.capability, batch=b, heads=hq, nq=nq, nk=nk, d=self.point.d,
            dv=self.point.dv, causal=kind.causal, masked=False, gradients=kind.passes == BOTH,
        )  # fmt: skip

    def context(self, name: str) -> AbstractContextManager[Any]:
        """What has to be entered around calls of a candidate."""
        if name in PYTORCHS:
            context: AbstractContextManager[Any] = sdpa_kernel([PYTORCHS[name]])
            return context
        return contextlib.nullcontext()

    def function(self, name: str) -> Callable[..., Outputs]:
        """The call as a function of its inputs."""
        causal = self.point.kind.causal
        call: Callable[..., Tensor]
        if name in PYTORCHS:
            more: dict[str, Any] = (
                {"enable_gqa": True} if self.point.shape[1] != self.point.shape[2] else {}
            )
            call = functools.partial(F.scaled_dot_product_attention, is_causal=causal, **more)
        elif self.point.kind.way == "cache":
            call = functools.partial(
                attention_with_kvcache, causal=causal, implementation=name, **self.options
            )
        else:
            call = functools.partial(attention, causal=causal, implementation=name, **self.options)
        if self.point.kind.passes == BOTH:
            return functools.partial(_both_passes, call, self._dout())
        return functools.partial(_forward, call)

    def _dout(self) -> Tensor:
        b, hq, _, nq, _ = self.point.shape
        generator = torch.Generator(self.device).manual_seed(1)
        dout = torch.randn(b, nq, hq, self.point.dv, generator=generator, device=self.device)
        return self._lying(dout.to(self.dtype))

    # --- what is right ---

    def wrong(self, inputs: Inputs, outputs: Outputs, known: dict[str, Any]) -> str | None:
        """What is wrong with the outputs of a call; None for nothing.

        Args:
            inputs: the call.
            outputs: what a candidate gave.
            known: holds the right results between candidates that have the same inputs.
        """
        if self.point.kind.passes == BOTH:
            return self._wrong_gradients(inputs, outputs, known)
        if not known:
            known.update(self._expected(inputs))
        out = self._by_head(outputs[0])[known["at"]][:, None]
        errors = (out.double() - known["ref"]).abs()
        # One answer of the device: a number that is not finite makes the sum so.
        sums = [errors.max(), errors.mean(), outputs[0].sum(dtype=torch.float32)]
        most, mean, total = torch.stack([x.double() for x in sums]).tolist()
        if not (math.isfinite(total) and math.isfinite(most)):
            return "NaN or infinite numbers"
        if self.point.kind.dtype == "fp8":
            report = reference.check_fp8(out, known["ref"], *known["of"], **known["options"])
            return None if report.ok else str(report)
        if most > known["most"] or mean > known["mean"]:
            return f"max error {most:.3g} (bound {known['most']:.3g}), mean {mean:.3g} (bound " + (
                f"{known['mean']:.3g})"
            )
        return None

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, heads, rows, columns)."""
        if self.point.kind.way == "packed":
            return x.view(self.point.shape[0], -1, *x.shape[1:]).transpose(1, 2)
        return x.transpose(1, 2) if self.point.kind.way == "cache" else x

    def _expected(self, inputs: Inputs) -> dict[str, Any]:
        """Some rows of the first and the last head, exactly and in plain operations."""
        b, hq, hkv, nq, nk = self.point.shape
        q, k, v = (self._by_head(x) for x in inputs)
        starts = (0, max(0, nq // 2 - _ROWS // 2), max(0, nq - _ROWS))
        numbers = {row for start in starts for row in range(start, min(nq, start + _ROWS))}
        rows = torch.tensor(sorted(numbers), device=q.device)
        batches = torch.tensor([0, b - 1], device=q.device)[:, None]
        heads = torch.tensor([0, hq - 1], device=q.device)[:, None]
        at = (batches, heads, rows[None])
        group = hq // hkv
        keys = (batches[:, 0], heads[:, 0] // group)
        of = q_of, k_of, v_of = q[at][:, None], k[keys][:, None], v[keys][:, None]
        options: dict[str, Any] = {}
        if self.point.kind.causal:
            last = rows + nk - nq
            options["attn_mask"] = torch.arange(nk, device=q.device) <= last[:, None]
        if (mask := self.options.get("attn_mask")) is not None:
            options["attn_mask"] = mask[rows]
        if (slopes := self.options.get("alibi_slopes")) is not None:
            far = (rows[:, None] + nk - nq - torch.arange(nk, device=q.device)).abs()
            options["attn_mask"] = -slopes[heads[:, 0]].double()[:, None, None, None] * far
        if (table := self.options.get("block_mask")) is not None:
            seen = table[0, 0][rows // 64].repeat_interleave(64, -1)[:, :nk]
            options["attn_mask"] = seen
        if (ranges := self.options.get("key_ranges")) is not None:
            options["attn_mask"] = masks.to_dense(ranges, nk)[0, 0][rows]
        # For 16 bits float32 is exact enough, and GPUs that have little of float64 are faster.
        exact = torch.float64 if self.point.kind.dtype == "float32" else torch.float32
        rounded = torch.bfloat16 if self.point.kind.dtype == "fp8" else self.dtype
        mask = options.get("attn_mask")
        ref = _formula(q_of.to(exact), k_of.to(exact), v_of.to(exact), mask).double()
        base = _formula(q_of.to(rounded), k_of.to(rounded), v_of.to(rounded), mask)
        rule = reference.check(base, ref, base)  # its bounds do not depend on what is judged
        return {
            "at": at, "of": of, "options": options, "ref": ref,
            "most": rule.bound, "mean": rule.mean_bound,
        }  # fmt: skip

    def _wrong_gradients(
        self, inputs: Inputs, outputs: Outputs, known: dict[str, Any]
    ) -> str | None:
        """Compares the gradients of the last head of k with those in float32."""
        hq, hkv = self.point.shape[1:3]
        group = hq // hkv
        q, k, v = inputs
        if not known:
            known["right"] = _gradients(
                q[-1, -group:].float(), k[-1, -1].float(), v[-1, -1].float(),
                self._dout()[-1, -group:].float(), self.point.kind.causal,
            )  # fmt: skip
        mine = (outputs[0][-1, -group:], outputs[1][-1, -1], outputs[2][-1, -1])
        errors = [
            (x.float() - right).norm() / right.norm()
            for x, right in zip(mine, known["right"], strict=True)
        ]
        errors += [x.sum(dtype=torch.float32) for x in outputs]
        *found, a, b, c = torch.stack(errors).tolist()
        if not all(map(math.isfinite, (a, b, c))):
            return "NaN or infinite numbers"
        limit = _GRADIENTS if self.point.kind.dtype == "16 bits" else 1e-4
        for name, error in zip(("dq", "dk", "dv"), found, strict=True):
            if not error <= limit:
                return f"{name} is off by {error:.3g} of its size"
        return None


def _forward(call: Callable[..., Tensor], *inputs: Tensor) -> Outputs:
    return (call(*inputs),)


def _both_passes(call: Callable[..., Tensor], dout: Tensor, *inputs: Tensor) -> Outputs:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(call(*leaves), leaves, dout)


def _formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in plain operations of the dtype of the inputs."""
    with _without_tf32():
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            hidden = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -math.inf) if hidden else scores + mask.to(q.dtype)
        out: Tensor = scores.softmax(-1) @ v
        return out


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (heads, rows, d), dk and dv (keys, d) of heads that share one of k, some rows at a time,
    so that long sequences need little memory.
    """
    heads, rows, d = q.shape
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keys = torch.arange(len(k), device=q.device)
    step = max(16, 2**24 // max(len(k) * heads, 1))
    with _without_tf32():
        for start in range(0, rows, step):
            part = slice(start, min(rows, start + step))
            scores = q[:, part] @ k.T * d**-0.5
            if causal:
                last = torch.arange(part.start, part.stop, device=q.device) + len(k) - rows
                scores.masked_fill_(keys > last[:, None], -math.inf)
            p = scores.softmax(-1)
            dp = dout[:, part] @ v.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * d**-0.5
            dv += torch.einsum("hij,hid->jd", p, dout[:, part])
            dq[:, part] = ds @ k
            dk += torch.einsum("hij,hid->jd", ds, q[:, part])
    return dq, dk, dv
