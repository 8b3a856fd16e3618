"""Kernels for latent caches that are mutated, and the calls that a mutant has to get right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archflash import _api, reference
from archflash import _archflash as _runtime
from archflash.sim._attention import ptx_text

from ...kvcache_cases import CacheCall, make
from .backward import main
from .runner import CallTrial, Subject


@dataclass(frozen=True)
class LatentTarget:
    """One kernel.

    Attributes:
        implementation: its folder.
        dtype: of its inputs.
        device: planned for this known GPU.
    """

    implementation: str
    dtype: torch.dtype
    device: str

    @property
    def kernel(self) -> str:
        word = {torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        return f"{self.implementation}_attention_fwd_{word}_mla"

    def subject(self) -> Subject:
        calls = list(self.calls())
        launch = calls[0].launches[calls[0].number]
        text = ptx_text(launch["image"], calls[0].plan.device.capability)
        trials = [CallTrial(call) for call in calls]
        return Subject(self.kernel, self.kernel, text, math.prod(launch["block"]), trials)

    def calls(self) -> Iterator[LatentCall]:
        """An odd and an even number of blocks of keys, ragged ends with NaN behind them, pages of
        several sizes and in no order, shares, masks at both ends, bases that rise in either block.
        """
        latent: dict[str, Any] = {"d": 64, "dv": 512, "qv": True, "dtype": self.dtype}
        calls = {
            "pages, shares, sinks": make(
                [100, 0, 330], nq=2, page_size=64, capacity=384, heads=(11, 1), causal=True,
                num_splits=2, sinks=torch.linspace(-1, 2, 11), **latent,
            ),
            "small pages, two tiles": make(
                [290], page_size=16, capacity=304, heads=(128, 1), **latent
            ),
            "huge scores": make([200, 40], capacity=224, heads=(16, 1), scale=1e7, **latent),
            "leftpad, softcap, chunks": make(
                [70, 33], nq=20, heads=(8, 2), leftpad=[3, 32], softcap=4.0, attention_chunk=40,
                layout="bhnd", **latent,
            ),
            "packed queries, window": make(
                [194, 9], page_size=32, capacity=224, q_lengths=[2, 5], causal=True, heads=(18, 1),
                window=(70, 0), **latent,
            ),
            "rows of a larger cache": make(
                [70, 8, 0, 210], rows_of=[3, 0, 1, 2], capacity=224, heads=(4, 1), scale=-0.1,
                **latent,
            ),
            # Scores beyond all that tanh tells apart, and small ones.
            "softcap": make(
                [200, 150], nq=3, capacity=224, heads=(16, 1), softcap=1.5, scale=0.3, **latent
            ),
            # Each row sees four keys: one too many or too few is a large error.
            "few visible": make(
                [190, 131, 62], nq=60, capacity=192, heads=(3, 1), window=(2, 1), **latent
            ),
            "chunks": make(
                [140], nq=60, capacity=160, heads=(4, 1), attention_chunk=21, causal=True, **latent
            ),
        }  # fmt: skip
        for name, call in calls.items():
            yield LatentCall(self, name, call)


class LatentCall:
    """One call, planned: see `Call`."""

    judged = ("out", "lse")

    def __init__(self, target: LatentTarget, name: str, call: CacheCall) -> None:
        self.name = name
        inputs = (call.q, call.k_cache, call.v_cache)
        values = _api.option_values(call.q, call.k_cache, {**call.options, "return_lse": True})
        problem = _runtime.make_problem(*inputs, values, 0).as_if_on_cuda()
        plan = _runtime.plan(target.implementation, problem, _api.find_device(target.device))
        assert not isinstance(plan, list), f"{target.kernel}, {name}: {plan}"
        self.plan: Any = plan
        self.launches: list[dict[str, Any]] = plan.to_dict()["launches"]
        kernels = [launch["kernel"] for launch in self.launches]
        assert target.kernel in kernels, f"{name} is planned on {kernels}"
        self.number = kernels.index(target.kernel)
        self.tensors: dict[str, Tensor] = _runtime.operands(plan, *inputs, values)
        self._exact, self._lse = reference.attention_with_kvcache(*inputs, **call.options)
        self._rounded = reference.baseline_with_kvcache(*inputs, **call.options)

    def verdict(self, tensors: dict[str, Tensor]) -> str:
        """What is wrong with the outputs by the project's rules; empty: nothing."""
        out = reference.check(tensors["out"], self._exact, self._rounded)
        if not out.ok:
            return f"out {out}"
        lse = reference.check_lse(tensors["lse"], self._lse)
        return "" if lse.ok else f"lse {lse}"


TARGETS = (
    LatentTarget("ampere", torch.bfloat16, "A100"),
    LatentTarget("hopper", torch.bfloat16, "H200"),
)


if __name__ == "__main__":
    main(TARGETS)
