"""Which implementation was measured to be the fastest for each kind of problem.

It is read from _measured.json, which `python -m bench.measured` makes from bench/results; nobody
edits that file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from archflash import _archflash as _native

FILE = Path(__file__).with_name("_measured.json")

FEW_QUERIES = 16  # query rows of a sequence up to which reading the keys takes most of the time
FEW_KEYS = 128  # keys up to which a query row is read and written rather than computed
SMALL_ROWS = 32768  # query rows of all heads; fewer do not keep the GPU full for long
_HEAD_DIMS = (64, 128, 256)
# float64 has no kernel. float32 leaves a choice only where gradients are needed: for the output
# alone simt comes first in any case.
_DTYPES = {
    "float32": "fp32",
    "float16": "16 bits",
    "bfloat16": "16 bits",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
_SHOWN = 4  # candidates whose speed is shown as evidence


class Kind(NamedTuple):
    """A kind of problem. What is fastest for one problem is taken as the fastest for its kind.

    Attributes:
        dtypes: "16 bits", "fp8" or "fp32".
        query_rows: "few" (at most FEW_QUERIES per sequence), "small" (fewer than SMALL_ROWS over
            all heads and sequences) or "large".
        head_dim_up_to: the larger head dim is at most this, and above the next smaller such limit;
            256 for all if query_rows is "few".
        keys: "few" (at most FEW_KEYS, as in cross-attention to a short text) or "many"; "many" for
            all if query_rows is "few".
        gradients: "none" if only the output is asked for; else "causal" or "plain", with and
            without a causal mask: the kernels of a backward pass differ in what masks cost them.
            "plain" for all if query_rows is "few".
        mask: the mask as data, which kernels of their own read: "none", "bool" or "added" (a dense
            attn_mask), "slopes", "blocks" or "ranges"; of several of the last three the first.
    """

    dtypes: str
    query_rows: str
    head_dim_up_to: int
    keys: str
    gradients: str
    mask: str

    @classmethod
    def of(
        cls,
        dtype: str,
        *,
        sequences: int,
        heads_q: int,
        rows: int,
        keys: int,
        d: int,
        dv: int,
        gradients: bool,
        causal: bool,
        mask: str,
    ) -> Kind | None:
        """The kind of a problem; None if it belongs to no kind.

        Args:
            dtype: dtype of q, k and v, as torch spells it.
            sequences: the batch.
            heads_q: heads of q.
            rows: query rows of all sequences.
            keys: keys of a sequence; of all sequences where they are packed.
            d: head dim of q and k.
            dv: head dim of v.
            gradients: whether the gradients of the call are needed, too.
            causal: whether the call has a causal mask.
            mask: the mask as data, as in the attributes.
        """
        head_dim = next((limit for limit in _HEAD_DIMS if max(d, dv) <= limit), None)
        if dtype not in _DTYPES or head_dim is None or (dtype == "float32" and not gradients):
            return None
        passes = ("causal" if causal else "plain") if gradients else "none"
        if rows <= FEW_QUERIES * sequences:
            # A causal mask hides next to nothing of many keys from few rows.
            few = "plain" if gradients else "none"
            return cls(_DTYPES[dtype], "few", _HEAD_DIMS[-1], "many", few, mask)
        size = "small" if heads_q * rows < SMALL_ROWS else "large"
        length = "few" if keys <= FEW_KEYS else "many"
        return cls(_DTYPES[dtype], size, head_dim, length, passes, mask)

    def nearest(self) -> tuple[Kind, ...]:
        """The kinds whose measurement stands for this one, the nearest first: itself, then those of
        more keys, then those of more query rows; with a mask as data then those that are not
        causal, too.
        """
        sizes = ("small", "large") if self.query_rows == "small" else (self.query_rows,)
        lengths = ("few", "many") if self.keys == "few" else ("many",)
        passes: tuple[str, ...] = (self.gradients,)
        if self.gradients == "causal" and self.mask != "none":
            passes = ("causal", "plain")
        return tuple(
            self._replace(query_rows=size, keys=length, gradients=gradients)
            for gradients in passes
            for size in sizes
            for length in lengths
        )


@dataclass(frozen=True)
class Measurement:
    """One entry of the file.

    Attributes:
        gpu: the GPU that was measured.
        order: kernels of ours and of PyTorch, the fastest first.
        run_id: the run in bench/results that `case` and `speeds` are from.
        case: name of a case of bench/cases.toml, or gradients.toml or masks.toml beside it.
        unit: unit of the speeds.
        speeds: speed of each kernel in that case and run.
    """

    gpu: str
    order: tuple[str, ...]
    run_id: str
    case: str
    unit: str
    speeds: dict[str, float]

    def place(self, name: str) -> int:
        """The position of a kernel in the order; after all others if it was not measured."""
        return self.order.index(name) if name in self.order else len(self.order)

    def __str__(self) -> str:
        shown = [name for name in self.order if name in self.speeds][:_SHOWN]
        speeds = ", ".join(f"{name} {self.speeds[name]:.0f}" for name in shown)
        return f"run {self.run_id}, {self.gpu}, {self.case}: {speeds} {self.unit}"


@cache
def _table() -> dict[tuple[tuple[int, int], Kind], Measurement]:
    table = {}
    for entry in json.loads(FILE.read_text())["measurements"]:
        capability = (entry["capability"][0], entry["capability"][1])
        kind = Kind(*(entry[name] for name in Kind._fields))
        table[capability, kind] = Measurement(
            order=tuple(entry["order"]),
            **{name: entry[name] for name in ("gpu", "run_id", "case", "unit", "speeds")},
        )
    return table


def mask_of(problem: _native.Problem) -> str | None:
    """The mask as data of a problem, as in `Kind`; None for a dense mask with ranges or blocks
    beside it, and for lists of keys: no table has such calls.
    """
    if problem.key_indices:
        return None
    if problem.attn_mask:
        if problem.key_ranges or problem.block_mask:
            return None
        return "bool" if problem.bool_mask else "added"
    given = {
        "slopes": problem.alibi_slopes,
        "blocks": problem.block_mask,
        "ranges": problem.key_ranges,
    }
    return next((word for word, has in given.items() if has), "none")


def find(
    problem: _native.Problem, capability: tuple[int, int] | None, with_gradients: bool = True
) -> Measurement | None:
    """The measurement for problems of this kind on GPUs of a compute capability; None if there is
    none, or if it must not matter. Without `with_gradients` that of the call alone, whether its
    gradients are needed or not.
    """
    # With batch_invariant the choice must not depend on how large a call is.
    # Calls with dropout were measured on our own kernels alone: docs/masks.md.
    unknown = problem.kv_cache or problem.batch_invariant or problem.dropout_p > 0
    mask = mask_of(problem)
    if capability is None or problem.dtype not in _DTYPES or unknown or mask is None:
        return None
    kind = Kind.of(
        problem.dtype, sequences=problem.batch, heads_q=problem.heads_q,
        rows=problem.nq if problem.varlen else problem.batch * problem.nq, keys=problem.nk,
        d=problem.d, dv=problem.dv, gradients=with_gradients and problem.needs_grad,
        causal=problem.causal, mask=mask,
    )  # fmt: skip
    if kind is not None:
        for near in _nearest(kind):
            if measurement := _table().get((capability, near)):
                return measurement
    return None


@cache
def _nearest(kind: Kind) -> tuple[Kind, ...]:
    return kind.nearest()
