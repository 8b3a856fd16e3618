"""Kernels of the backward pass that are mutated, and the calls that a mutant has to get right."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _api, _gradients, _options, reference
from archflash.sim._attention import ptx_text

from ..cards.cases import DTYPES, hashed
from .runner import CallTrial, Score, Subject, run_mutants


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
    """

    implementation: str
    name: str
    device: str
    d: int
    masked: bool = False
    many: tuple[int, int] | None = None

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

    def subject(self) -> Subject:
        calls = list(self.calls())
        launch = calls[0].launches[calls[0].number]
        text = ptx_text(launch["image"], calls[0].plan.device.capability)
        trials = [CallTrial(call) for call in calls]
        return Subject(self.kernel, self.kernel, text, math.prod(launch["block"]), trials)

    def calls(self) -> Iterator[BackwardCall]:
        """Ragged lengths, blocks and tiles of either side, and all that a warp decides."""
        d = self.d

        def make(nq: int, nk: int, heads: tuple[int, int], width: int = d) -> list[Tensor]:
            shapes = ((heads[0], nq), (heads[0], nq), (heads[1], nk), (heads[1], nk))
            return [
                hashed((1, *shape, width), stream).to(self.dtype)
                for stream, shape in enumerate(shapes, 1)
            ]

        if not self.masked:
            yield BackwardCall(
                self, "causal", make(70, 150, (2, 1)), {"causal": True} | self.softcap(0)
            )
            options = {"window": (30, 5), "scale": -0.3} | self.softcap(0.5)
            yield BackwardCall(self, "window, softcap", make(45, 137, (1, 1), d - 8), options)
            ends = [torch.tensor(x, dtype=torch.int32) for x in ((0, 0, 40, 45), (0, 9, 80, 83))]
            packed = [x[0].transpose(0, 1).contiguous() for x in make(47, 90, (2, 1))]
            for x, rows in zip(packed, (ends[0], ends[0], ends[1], ends[1]), strict=True):
                x[int(rows[-1]) :] = math.nan  # of no sequence
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
            self, "bias, dropout, alibi", make(45, 137, (2, 2), d - 8),
            {
                "attn_mask": hashed((2, 45, 137), 9).masked_fill(~keep[0, :, :45, :137], -math.inf),
                "alibi_slopes": slopes, "dropout_p": 0.2, "rng_state": state, "softcap": 1.5,
            },
        )  # fmt: skip
        blocks = torch.tensor([[[[1, 0, 1], [0, 1, 2]]]], dtype=torch.int8)
        yield BackwardCall(self, "blocks", make(70, 150, (2, 1)), {"block_mask": blocks})


class BackwardCall:
    """The gradients of one call, planned: see `Call`."""

    judged = ("dq", "dk", "dv")

    def __init__(
        self, target: BackwardTarget, name: str, inputs: list[Tensor], options: dict[str, Any]
    ) -> None:
        self.name = name
        dout, q, k, v = inputs
        out, lse = reference.attention(q, k, v, **options)
        request = _gradients.Request(
            dout, q, k, v, out.to(q.dtype), lse.float().contiguous(), None,
            _options.complete(options),
        )  # fmt: skip
        into = _gradients.Gradients.like(request)
        if target.implementation == "hopper" and "window" in options:
            dq, dk, dv = (x.float() for x in (into.dq, into.dk, into.dv))
            into = _gradients.Gradients(dq, dk, dv, None)  # written by code of its own
        device = _api.find_device(target.device)
        plan = _gradients.decide(
            request, into, device, target.implementation, deterministic=True
        ).plan
        assert plan is not None
        self.plan: Any = plan
        self.launches: list[dict[str, Any]] = plan.to_dict()["launches"]
        kernels = [launch["kernel"] for launch in self.launches]
        assert target.kernel in kernels, f"{name} is planned on {kernels}"
        self.number = kernels.index(target.kernel)
        self.tensors = _gradients.operands(request, into, plan)
        self._exact = reference.attention_backward(dout, q, k, v, **options)
        self._rounded = reference.baseline_backward(dout, q, k, v, **options)

    def verdict(self, tensors: dict[str, Tensor]) -> str:
        """What is wrong with the gradients by the project's rules; empty: nothing."""
        for name in self.judged:
            expected, base = getattr(self._exact, name), getattr(self._rounded, name)
            report = reference.check(tensors[name], expected, base.double())
            if not report.ok:
                return f"{name} {report}"
        return ""


TARGETS = (
    BackwardTarget("ampere", "bf16_d64", "RTX 4090", 64),
    BackwardTarget("ampere", "bf16_d128_masked", "A100", 128, masked=True),
    BackwardTarget("blackwell_dc", "bf16_d64", "B200", 64, many=(400, 300)),
    BackwardTarget("blackwell_dc", "f16_d128", "B200", 128, many=(300, 400)),
    BackwardTarget("hopper", "bf16_d64_softcap", "H200", 64, many=(600, 550)),
    BackwardTarget("hopper", "f16_d128", "H200", 128, many=(330, 550)),
    BackwardTarget("simt", "f32_d64_large_keys", "A100", 64),
    BackwardTarget("simt", "f32_d64_queries_masked", "A100", 64, masked=True),
)


def run_sample(subject: Subject, count: int, seed: int) -> Score:
    """Runs so many mutants of a kernel, of any kind."""
    found = [mutant for mutant in subject.mutants(seed) if not mutant.equivalent]
    return Score(run_mutants(subject, random.Random(seed).sample(found, min(count, len(found)))))


def main(targets: Sequence[Any]) -> None:
    """Runs a sample of every target's kernel: as many mutants as the first argument of the command
    line says, by default 100.
    """
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    outcomes = []
    for target in targets:
        score = run_sample(target.subject(), count, seed=1)
        outcomes += score.outcomes
        print(f"{target.kernel}: {score}", flush=True)
        for survivor in score.survivors:
            print(f"  survived: {survivor.change} | {survivor.statement} | {survivor.source}")
    print(f"all: {Score(outcomes)}")


if __name__ == "__main__":
    main(TARGETS)
