"""Every feature of a call with every other one, against float64.

A new option gets a factor here and, where pairs do not say all of it, a call in test_calls.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from .executors import executor
from .memory import MEMORY, lay_out
from .pairs import all_pairs, row_id

on = executor()

FACTORS: dict[str, list[Any]] = {
    "layout": ["bhnd", "bnhd", "packed"],
    "lengths": on.pick(
        simulator=[(33, 70), (70, 33), (9, 140), (64, 64)],
        gpu=[(113, 203), (203, 113), (9, 799), (64, 64)],
    ),
    "dims": [(64, 64), (128, 128), (32, 32), (40, 72), (192, 128), (256, 256)],
    "heads": [(2, 2), (6, 2), (3, 1)],
    "causal": [False, True],
    "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
    "q_offset": [None, 0, -5, 50, 1 << 40, "tensor"],
    "softcap": [None, 5.0],
    "sinks": [None, "float32", "float16", "bfloat16"],
    "scale": [None, 0.05, -0.3, 0.0],
    "memory": list(MEMORY),
    "out_pad": [0, 24],
}  # fmt: skip
# More values than the simulator has time for.
MORE: dict[str, list[Any]] = {
    "window": [(None, None), (0, None)],
    "q_offset": [-(1 << 40)],
    "softcap": [0.0],
    "scale": [1.0],
}
# A packed call has three more sequences: one without queries, one without keys, one of one row.
MORE_Q, MORE_K = (0, 30, 1), (9, 0, 1)


def rows_of(kernel: str) -> list[dict[str, Any]]:
    dtypes = on.dtypes_of(kernel)
    if on.name == "gpu":
        factors = {name: values + MORE.get(name, []) for name, values in FACTORS.items()}
        return [{"dtype": dtype, **row} for dtype in dtypes for row in all_pairs(factors)]
    factors = {"dtype": dtypes, **FACTORS}
    if kernel == "blackwell_dc":  # its kernels for more than 128 rows are others than those for few
        factors["lengths"] = [(33, 70), (170, 33), (9, 140), (140, 150)]
    return all_pairs(factors)


@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        pytest.param(kernel, row, id=f"{kernel}-{row_id(row)}")
        for kernel in on.kernels()
        for row in rows_of(kernel)
    ],
)
def test_every_pair_of_features_agrees_with_float64(kernel: str, row: dict[str, Any]) -> None:
    (nq, nk), (d, dv), heads = row["lengths"], row["dims"], row["heads"]
    call = {name: row[name] for name in ("causal", "window", "q_offset", "softcap", "scale")}
    packed = row["layout"] == "packed"
    if packed:
        lengths_q, lengths_k = (nq, *MORE_Q), (nk, *MORE_K)
        batch = len(lengths_q)
        call |= {"cu_seqlens_q": on.cu_seqlens(lengths_q), "cu_seqlens_k": on.cu_seqlens(lengths_k)}
        tensors = on.qkv(
            sum(lengths_q), sum(lengths_k), d, dv, dtype=row["dtype"], heads=heads
        )  # fmt: skip
        tensors = tuple(x[0].transpose(0, 1).contiguous() for x in tensors)
    else:
        batch = 2
        call["layout"] = row["layout"]
        tensors = on.qkv(nq, nk, d, dv, dtype=row["dtype"], batch=batch, heads=heads)
        if row["layout"] == "bnhd":
            tensors = tuple(x.transpose(1, 2).contiguous() for x in tensors)
    heads_dim = 2 if row["layout"] == "bnhd" else 1
    q, k, v = (lay_out(x, row["memory"], heads_dim) for x in tensors)
    if row["q_offset"] == "tensor":
        call["q_offset"] = on.int32(*(7 - 10 * sequence for sequence in range(batch)))
    if row["sinks"] is not None:
        call["sinks"] = on.rand(heads[0], seed=9, dtype=row["sinks"])
    on.attend_and_check(kernel, q, k, v, out_pad=row["out_pad"], **call)
