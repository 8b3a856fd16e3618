"""Kernels for latent caches that are mutated, and the calls that a mutant has to get right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from archflash import _api, reference

from ...kvcache_cases import make
from .planned import ForwardCall, main


@dataclass(frozen=True)
class LatentTarget:
    """One kernel.

    Attributes:
        implementation: its folder.
        dtype: of its inputs.
        device: planned for this known GPU.
        fp8: whether it also reads caches of 8 bits.
    """

    implementation: str
    dtype: torch.dtype
    device: str
    fp8: bool = False

    @property
    def kernel(self) -> str:
        word = {torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        return f"{self.implementation}_attention_fwd_{word}_mla"

    def calls(self) -> Iterator[ForwardCall]:
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
        if self.fp8:
            calls["8 bits, pages"] = make(
                [100, 0, 330], nq=2, page_size=16, capacity=384, heads=(11, 1), num_splits=2,
                cache_dtype=torch.float8_e4m3fn, k_descale=torch.tensor(3.0),
                v_descale=torch.tensor([[0.5], [2.0], [0.25]]), **latent,
            )  # fmt: skip
            calls["8 bits, contiguous"] = make(
                [200, 40], capacity=224, heads=(16, 2), cache_dtype=torch.float8_e5m2,
                k_descale=torch.tensor([0.5, 2.0]), scale=0.3, **latent,
            )  # fmt: skip
        for name, call in calls.items():
            yield ForwardCall(
                self.kernel, self.implementation, _api.find_device(self.device), name,
                (call.q, call.k_cache, call.v_cache), call.options,
                (reference.attention_with_kvcache, reference.baseline_with_kvcache),
            )  # fmt: skip


TARGETS = (
    LatentTarget("ampere", torch.bfloat16, "A100", fp8=True),
    LatentTarget("hopper", torch.bfloat16, "H200"),
)


if __name__ == "__main__":
    main(TARGETS)
