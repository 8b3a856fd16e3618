"""Kernels of the backward pass that are mutated, and the calls that a mutant has to get right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _api, _gradients, _options, reference
from archflash import _archflash as _native

from ..cards.cases import DTYPES
from ..hashed import hashed
from .gathered import lists_of
from .planned import main, number_of


@dataclass(frozen=True)
class BackwardTarget:
    """One kernel.

    Attributes:
        implementation: its folder.
        name: the end of its name, behind "<implementation>_attention_bwd_".
        device: planned for this known GPU.
        d: head dimension.
        masked: whether it takes masks as data.
        many: queries and keys of one more call, with more blocks than there are stages.
        long: whether it takes sums of many keys and query rows only.
        listed: whether it takes lists of keys.
        few_rows: whether it takes few query rows of heads that share no K.
    """

    implementation: str
    name: str
    device: str
    d: int
    masked: bool = False
    many: tuple[int, int] | None = None
    long: bool = False
    listed: bool = False
    few_rows: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.implementation}_attention_bwd_{self.name}"

    def softcap(self, usual: float) -> dict[str, float]:
        """The softcap of a call that mostly has this one; hopper has kernels with and without."""
        if self.implementation == "hopper":
            return {"softcap": 0.5} if "softcap" in self.name else {}
        return {"softcap": usual} if usual else {}

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name.split("_")[0]]

    def calls(self) -> Iterator[BackwardCall]:
        """Ragged lengths, blocks and tiles of either side, and all that a warp decides."""
        d = self.d
        narrow = d - 16 // self.dtype.itemsize  # a copy of 16 bytes less

        def make(nq: int, nk: int, heads: tuple[int, int], width: int = d) -> list[Tensor]:
            shapes = ((heads[0], nq), (heads[0], nq), (heads[1], nk), (heads[1], nk))
            return [
                hashed((1, *shape, width), stream).to(self.dtype)
                for stream, shape in enumerate(shapes, 1)
            ]

        if self.listed:
            lengths = torch.tensor([[[150, 60]]], dtype=torch.int32)
            lists = lists_of((1, 1, 2, 150), 120, lengths)
            inputs = make(80, 60, (2, 1))
            for x in inputs[:2]:
                x[:, :, :20] = math.nan  # rows that see no key
            options = {"key_indices": lists, "topk_lengths": lengths, "causal": True}
            yield BackwardCall(self, "causal, rows that see no key", inputs, options)
            inputs = make(70, 120, (2, 1), narrow)
            for x in inputs[2:]:
                x[:, :, ~torch.isin(torch.arange(120), lists)] = math.nan  # that no list names
            options |= {"causal": False, "window": (30, 5), "softcap": 0.5}
            yield BackwardCall(self, "window, softcap", inputs, options)
            return
        if self.few_rows:
            options = {"causal": True}
            yield BackwardCall(self, "causal", make(70, 150, (2, 2)), options)
            inputs = make(45, 137, (1, 1), narrow)
            yield BackwardCall(self, "negative scale", inputs, {"scale": -0.3})
            # Gradients in fp32 with all columns, and with few, of which whole groups are left out.
            wide = make(45, 137, (1, 1))
            few = [x[..., :16].contiguous() for x in wide]
            yield BackwardCall(self, "few columns of v", [few[0], wide[1], wide[2], few[3]], {})
            yield BackwardCall(self, "few columns of q", [wide[0], few[1], few[2], wide[3]], {})
            # CTAs share out the keys of these.
            yield BackwardCall(self, "shares", make(100, 450, (1, 1)), options)
            yield BackwardCall(self, "many heads", make(40, 90, (7, 7)), options)
            return
        if not self.masked:
            inputs = make(130, 130, (1, 1)) if self.long else make(70, 150, (2, 1))
            yield BackwardCall(self, "causal", inputs, {"causal": True} | self.softcap(0))
            options = {"window": (30, 5), "scale": -0.3} | self.softcap(0.5)
            # Without a softcap hopper has other kernels for few rows, and for columns that do not
            # fill a tile.
            fills = self.implementation == "hopper" and "softcap" not in self.name
            inputs = make(75, 137, (1, 1)) if fills else make(45, 137, (1, 1), narrow)
            if self.long:
                options["window"] = (110, 25)
                inputs = make(129, 137, (1, 1), narrow)
            yield BackwardCall(self, "window, softcap", inputs, options)
            ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 0, 40, 45), (0, 9, 80, 83))]
            rows = (390, 390) if self.long else (47, 90)
            packed = [x[0].transpose(0, 1).contiguous() for x in make(*rows, (2, 1))]
            for x, end in zip(packed, (ends[0], ends[0], ends[1], ends[1]), strict=True):
                x[int(end[-1]) :] = math.nan  # of no sequence
            options = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]} | self.softcap(0)
            yield BackwardCall(self, "packed", packed, options)
            if self.many is not None:
                options = {"causal": True} | self.softcap(0)
                yield BackwardCall(self, "many", make(*self.many, (2, 1)), options)
            return
        keep = hashed((1, 1, 70, 150), 7) > -0.3
        ranges = torch.tensor([[0, 20], [90, 140]], dtype=torch.int32).expand(1, 1, 70, 2, 2)
        slopes = hashed((2,), 8).abs()
        state = torch.tensor([1 << 40 | 77, 5])
        yield BackwardCall(
            self, "bool, ranges", make(70, 150, (2, 1)),
            {"attn_mask": keep, "key_ranges": ranges.contiguous(), "causal": True},
        )  # fmt: skip
        yield BackwardCall(
            self, "bias, dropout, alibi", make(45, 137, (2, 2), narrow),
            {
                "attn_mask": hashed((2, 45, 137), 9).masked_fill(~keep[0, :, :45, :137], -math.inf),
                "alibi_slopes": slopes, "dropout_p": 0.2, "rng_state": state, "softcap": 1.5,
            },
        )  # fmt: skip
        blocks = torch.tensor([[[[1, 0, 1], [0, 1, 2]]]], dtype=torch.int8)
        yield BackwardCall(self, "blocks", make(70, 150, (2, 1)), {"block_mask": blocks})
        inputs = make(150, 70, (1, 1))
        for x in inputs[:2]:
            x[:, :, :80] = math.nan  # rows that see no key
        yield BackwardCall(
            self, "unseen rows", inputs, {"causal": True, "alibi_slopes": slopes[:1]}
        )


# Calls whose gradients are in fp32, which code of its own writes.
FP32_GRADIENTS = (
    "window, softcap", "blocks", "negative scale", "few columns of v", "few columns of q",
)  # fmt: skip


class BackwardCall:
    """The gradients of one call, planned: see `Call`."""

    judged = ("dq", "dk", "dv", "dmask")

    def __init__(
        self, target: BackwardTarget, name: str, inputs: list[Tensor], options: dict[str, Any]
    ) -> None:
        self.name = name
        # CTAs of kernels for lists add in any order here. Where they take turns, sums are atomic,
        # and the simulator does not see which of them a mutant would let overtake others.
        self.same_bits = not target.listed
        dout, q, k, v = inputs
        clean = [x.nan_to_num() for x in inputs]  # what is not finite must not matter
        out, lse = reference.attention(*clean[1:], **options)
        request = _gradients.Request(
            dout, q, k, v, out.to(q.dtype), lse.float().contiguous(), None,
            _options.complete(options), mask_gradient=name.startswith("bias"),
        )  # fmt: skip
        into = _gradients.Gradients.like(request)
        if target.implementation in ("ampere", "hopper") and name in FP32_GRADIENTS:
            dq, dk, dv = (x.float() for x in (into.dq, into.dk, into.dv))
            into = _gradients.Gradients(dq, dk, dv, None)
        device = _api.find_device(target.device)
        if name == "many heads":  # more of them than CTAs
            device = _native.Device.from_dict(device.to_dict() | {"sm_count": 2})
        plan = _gradients.decide(
            request, into, device, target.implementation, deterministic=self.same_bits
        ).plan
        assert plan is not None
        self.plan: Any = plan
        self.launches: list[dict[str, Any]] = plan.to_dict()["launches"]
        self.number = number_of(target.kernel, name, self.launches)
        self.tensors = _gradients.operands(request, into, plan)
        self._exact = reference.attention_backward(*clean, **options)
        self._rounded = reference.baseline_backward(*clean, **options)

    def verdict(self, tensors: dict[str, Tensor]) -> str:
        """What is wrong with the gradients by the project's rules; empty: nothing."""
        for name in tensors:
            expected, base = getattr(self._exact, name), getattr(self._rounded, name)
            found = tensors[name].reshape(expected.shape)
            report = reference.check(found, expected, base.double())
            if not report.ok:
                return f"{name} {report}"
        return ""


TARGETS = (
    BackwardTarget("ampere", "bf16_d64", "RTX 4090", 64),
    BackwardTarget("ampere", "bf16_d128_masked", "A100", 128, masked=True),
    BackwardTarget("ampere", "bf16_d64_lists", "A100", 64, listed=True),
    BackwardTarget("blackwell_dc", "bf16_d64", "B200", 64, many=(400, 300)),
    BackwardTarget("blackwell_dc", "f16_d128", "B200", 128, many=(300, 400)),
    BackwardTarget("hopper", "bf16_d64_softcap", "H200", 64, many=(600, 550)),
    BackwardTarget("hopper", "f16_d128", "H200", 128, many=(330, 550)),
    BackwardTarget("hopper", "bf16_d64_rows", "H200", 64, few_rows=True),
    BackwardTarget("hopper", "bf16_d64_lists", "H200", 64, listed=True),
    BackwardTarget("simt", "f32_d64_large", "A100", 64),
    BackwardTarget("simt", "f32_d64_lists", "A100", 64, listed=True),
    BackwardTarget("simt", "f32_d64_queries_masked", "A100", 64, masked=True),
    BackwardTarget("simt", "f32_d128_tensor", "H200", 128, long=True),
)


if __name__ == "__main__":
    main(TARGETS)
