"""The named shapes that every benchmark shares, read from cases.toml."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same parser as a package, which pytest brings
    import tomli as tomllib

CASES_FILE = Path(__file__).with_name("cases.toml")
# Shapes of training, for bench.gradients; calls with mask tensors, for bench.masks; and calls of
# well-known models, for bench.models.
GRADIENTS_FILE = Path(__file__).with_name("gradients.toml")
MASKS_FILE = Path(__file__).with_name("masks.toml")
MODELS_FILE = Path(__file__).with_name("models.toml")
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "e4m3": 1}
TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
OUTPUT_BYTES = DTYPE_BYTES | {"e4m3": 2}  # FP8 inputs give bf16 outputs
FLOPS_RULE = "flops = 2*B*Hq*Nq*Nk*(D+Dv), half when causal"
BYTES_RULE = "bytes = q, k, v and the output, each once"

Key = tuple[str, int, int, int, int, int, int, int, bool]


@dataclass(frozen=True)
class Case:
    """One shape to be measured.

    Args:
        name: what tables, test ids and --only call it.
        dtype: "fp32", "fp16" or "bf16", of inputs and output; or "e4m3", with a bf16 output.
        b: batch.
        hq: query heads.
        hkv: key and value heads, a divisor of hq.
        nq: query rows of each head.
        nk: key rows of each head.
        d: head dimension of q and k, in elements.
        dv: head dimension of v and the output, in elements.
        causal: query i sees keys j <= i + nk - nq.
        groups: names for --group.
        published_vs_math: times faster than torch-math that the kernel simt descends from was
            published with; None where nothing was published.
        mask: kind of mask as data, of bench.masks; "" for a call without one.
        packed: the sequences of the batch lie behind one another in packed tensors, rows before
            heads.
        window: (left, right) keys that a query sees beside the one at its own place, or None.
        sinks: every head has one more logit in the denominator.
        passes: "both" if the gradients are measured, too, or "forward".
        documents: (least, most) rows of the documents that the nq = nk rows of the one entry of the
            batch consist of, each of which sees itself alone; None for one sequence.
    """

    name: str
    dtype: str
    b: int
    hq: int
    hkv: int
    nq: int
    nk: int
    d: int
    dv: int
    causal: bool
    groups: tuple[str, ...] = ()
    published_vs_math: float | None = None
    mask: str = ""
    packed: bool = False
    window: tuple[int, int] | None = None
    sinks: bool = False
    passes: str = "both"
    documents: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            allowed = ", ".join(DTYPE_BYTES)
            raise ValueError(f"case {self.name!r}: dtype {self.dtype!r} is not one of {allowed}")
        if min(self.b, self.hq, self.hkv, self.nq, self.nk, self.d, self.dv) < 1:
            raise ValueError(f"case {self.name!r}: every size must be at least 1")
        if self.hq % self.hkv != 0:
            raise ValueError(f"case {self.name!r}: hq={self.hq} is no multiple of hkv={self.hkv}")
        if self.passes not in ("forward", "both"):
            raise ValueError(f"case {self.name!r}: passes {self.passes!r} is not forward or both")
        if self.documents is not None and (self.b != 1 or self.nq != self.nk):
            raise ValueError(f"case {self.name!r}: documents have b = 1 and nq = nk")

    @property
    def key(self) -> Key:
        """What a result row says about the shape: equal for the same work under any name."""
        return (
            self.dtype, self.b, self.hq, self.hkv, self.nq, self.nk, self.d, self.dv, self.causal,
        )  # fmt: skip

    @property
    def is_decode(self) -> bool:
        """One query row: limited by memory, so tables give GB/s instead of TFLOP/s."""
        return self.nq == 1

    def lengths(self) -> list[int]:
        """Rows of each document: the same random numbers every time."""
        least, most = self.documents or (self.nq, self.nq)
        numbers, lengths, left = random.Random(0), list[int](), self.nq
        while left > 0:
            lengths.append(min(left, numbers.randint(least, most)))
            left -= lengths[-1]
        return lengths

    def flops(self) -> int:
        """Operations of both matrix products (FLOPS_RULE); with D = Dv that is 4*B*Hq*Nq*Nk*D.
        With a window, those of the keys that a row sees which is far from both ends.
        """
        if self.documents is not None:
            pairs = sum(n * n for n in self.lengths())
            return (1 if self.causal else 2) * self.hq * pairs * (self.d + self.dv)
        keys = self.nk
        if self.window is not None:
            keys = min(self.nk, self.window[0] + 1 + self.window[1])
        full = 2 * self.b * self.hq * self.nq * keys * (self.d + self.dv)
        return full // 2 if self.causal and keys == self.nk else full

    def bytes(self) -> int:
        """Fewest bytes that device memory must move: q, k, v and the output, each once."""
        queries = self.b * self.hq * self.nq
        keys = self.b * self.hkv * self.nk * (self.d + self.dv)
        inputs = DTYPE_BYTES[self.dtype] * (queries * self.d + keys)
        return inputs + OUTPUT_BYTES[self.dtype] * queries * self.dv

    def score_bytes(self) -> int:
        """Bytes of one float32 score matrix for all heads: what an unfused path stores."""
        return 4 * self.b * self.hq * self.nq * self.nk


def load_cases(path: Path = CASES_FILE) -> list[Case]:
    """Reads the named shapes, in file order.

    Args:
        path: TOML file with [[case]] tables; bench/cases.toml by default.

    Returns:
        One Case for each table.

    Raises:
        ValueError: two cases share a name or a shape, or a case is malformed.
    """
    with path.open("rb") as file:
        tables: list[dict[str, Any]] = tomllib.load(file)["case"]
    cases = []
    for table in tables:
        fields = {**table, **table["shape"], "groups": tuple(table.get("groups", ()))}
        del fields["shape"]
        for pair in ("window", "documents"):
            if pair in fields:
                fields[pair] = tuple(fields[pair])
        try:
            cases.append(Case(**fields))
        except TypeError as error:
            raise ValueError(f"{path.name}: case {table.get('name')!r}: {error}") from error
    names, shapes = (
        [c.name for c in cases],
        [(c.key, c.mask, c.packed, c.window, c.sinks, c.documents) for c in cases],
    )
    for what, count in (("name", len(set(names))), ("shape", len(set(shapes)))):
        if count != len(cases):
            raise ValueError(f"{path.name}: two cases have the same {what}")
    return cases


def choose_cases(
    cases: Sequence[Case], only: str | None = None, group: str | None = None
) -> list[Case]:
    """Filters cases by name and group.

    Args:
        cases: what to choose from.
        only: regular expression searched for in the name; None keeps all.
        group: group that a case must be in; None keeps all.

    Returns:
        The chosen cases, in their order.

    Raises:
        ValueError: no case is left; the message lists the groups.
    """
    chosen = [
        case
        for case in cases
        if (group is None or group in case.groups) and (only is None or re.search(only, case.name))
    ]
    if not chosen:
        groups = ", ".join(sorted({name for case in cases for name in case.groups}))
        raise ValueError(f"no case matches --only {only!r} --group {group!r}; groups: {groups}")
    return chosen
