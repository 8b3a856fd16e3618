"""Packed sequences of a few rows beside those of many over a cache in pages, as a server's steps
have them: one kernel finds the tiles, and one computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import archflash
import archflash.sim
from archflash import _archflash as native

from .. import kvcache_cases
from ..kvcache_cases import CacheCall, make
from ..replanned import replanned
from .executors import executor, same_bits, unexplained

here = executor()
KERNELS = [kernel for kernel in here.kernels("kv_cache_prefill") if kernel == "hopper"]
BF16, F16 = torch.bfloat16, torch.float16
ON: dict[str, Any] = {"device": here.device}


def mixed(lengths: list[int], rows: list[int], **more: Any) -> CacheCall:
    more.setdefault("page_size", 16)
    more.setdefault("capacity", -(-max(lengths) // 64) * 64 + 64)
    return make(lengths, q_lengths=rows, **{"causal": True, "dtype": BF16, **more}, **ON)


def planned(kernel: str, call: CacheCall, **facts: int) -> native.LaunchPlan:
    made = archflash.explain(
        call.q, call.k_cache, call.v_cache, **call.options, implementation=kernel, return_lse=True
    ).plan
    assert made is not None
    return replanned(made, **facts) if facts else made


# On the GPU's device, so made by the tests.
CALLS: dict[str, Callable[[], CacheCall]] = {
    "window-sinks": lambda: mixed(
        [190, 900, 3, 0, 260, 88], [140, 1, 3, 0, 17, 16], window=(70, 0), heads=(4, 2), d=64,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]),
    ),
    "5-heads-softcap-d128": lambda: mixed(
        [300, 90, 400], [9, 2, 150], heads=(10, 2), d=128, softcap=4.0, causal=False
    ),
    "alibi-page-8": lambda: mixed(
        [150, 33, 70, 1], [150, 4, 1, 1], heads=(8, 2), page_size=8,
        alibi_slopes=torch.tensor([0.5, 0.2, 0.1, 0.01, 1.0, 0.3, 0.7, 0.05]),
    ),
    "append-rotary-shared-pages-f16-d128": lambda: mixed(
        [500, 40, 300], [1, 33, 140], n_new=1, rotary=32, heads=(2, 2), d=128, dtype=F16,
        shared_pages=2, capacity=512,
    ),
    "chunks-page-64-d128-dv64": lambda: mixed(
        [300, 250, 77], [5, 150, 1], attention_chunk=60, heads=(4, 1), d=128, dv=64, page_size=64,
        window=(40, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sms", [1, 5])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_row_is_as_the_reference_says(kernel: str, name: str, sms: int) -> None:
    call = CALLS[name]()
    plan = planned(kernel, call, sm_count=sms)
    assert plan.kernels[-1].endswith("_mixed")
    assert next(x for x in plan.kernels if "append" not in x).startswith("hopper_order_mixed_")
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2])


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_ctas_share_out_long_caches(kernel: str, d: int) -> None:
    """With many SMs the keys of the two long sequences are shared out, with one SM they are not, so
    that their sums are rounded in another order.
    """
    call = mixed([3000, 30, 1800, 140], [1, 2, 5, 140], heads=(4, 2), d=d)

    def serve(sms: int) -> torch.Tensor:
        plan = planned(kernel, call, sm_count=sms)
        return kvcache_cases.check(
            call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2]
        )

    alone, shared = serve(1), serve(40)
    assert not same_bits(alone[:1], shared[:1])
    assert not same_bits(alone[3:8], shared[3:8])
    assert same_bits(alone[8:], shared[8:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_sequences_than_the_ordering_kernel_has_threads(kernel: str) -> None:
    lengths = [1 + i % 9 for i in range(300)]
    lengths[290] = 150
    rows = [1] * 300
    rows[5], rows[290] = 0, 140
    call = mixed(lengths, rows, heads=(1, 1), d=64)
    plan = planned(kernel, call, sm_count=3)
    kvcache_cases.check(call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_serves_other_lengths(kernel: str) -> None:
    plan = planned(kernel, mixed([1, 9, 140], [1, 9, 140], capacity=320, heads=(2, 1)), sm_count=2)
    for lengths, rows in (([300, 280, 0], [140, 9, 1]), ([200, 150, 130], [10, 100, 40])):
        call = mixed(lengths, rows, capacity=320, heads=(2, 1))
        kvcache_cases.check(
            call, lambda mine: here.attend_with_kvcache(kernel, mine, plan=plan)[:2]
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_layers_of_a_batch_share_all_but_the_counters(kernel: str) -> None:
    """tests/gpu/test_gpu_batches.py runs them."""
    plan = planned(kernel, mixed([300, 40], [140, 1], heads=(4, 2)))
    fields = plan.to_dict()
    order, attention = fields["launches"]
    assert (order["of_batch"], attention["of_batch"]) == (True, False)
    counters = [
        x
        for x in attention["pointers"]
        if x["operand"] == "workspace" and x["addend"] < fields["counter_bytes"]
    ]
    done, taken = sorted(x["addend"] for x in counters)
    assert done == 0
    assert taken + 16 == fields["counter_bytes"]
    with pytest.raises(ValueError, match="'counter_bytes' is -1: it must be between 0 and"):
        native.LaunchPlan.unchecked_from_dict(fields | {"counter_bytes": -1})
    with pytest.raises(ValueError, match=r"'counter_bytes' is 0: 'launches\[0\]' is of_batch"):
        native.LaunchPlan.unchecked_from_dict(fields | {"counter_bytes": 0})


@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_lengths_touch_nothing_outside(kernel: str) -> None:
    """Where they say that sequences overlap, several CTAs write to one row: on the simulator a
    race, and nothing else.
    """
    call = mixed([90] * 8, [600, 3, *[0] * 6], heads=(1, 1))
    lengths = here.int32(-3, 2**31 - 1, 90, *[20] * 5)
    for ends in ([0, *[603, 0] * 4], [-5, 7, 2**31 - 1, *[100, 603] * 3]):
        wrong = call.with_options(cu_seqlens_q=here.int32(*ends), cache_seqlens=lengths)
        if here.device != "cpu":
            tensors = (wrong.q, wrong.k_cache, wrong.v_cache)
            archflash.attention_with_kvcache(*tensors, implementation=kernel, **wrong.options)
            torch.cuda.synchronize()
            continue
        run = archflash.sim.run(
            wrong.q, wrong.k_cache, wrong.v_cache, implementation=kernel, check=False,
            **wrong.options,
        )  # fmt: skip
        found = [f for report in run.reports for f in unexplained(kernel, report)]
        assert not [f for f in found if f.kind != "race"], found


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_other_kernels_serve(kernel: str) -> None:
    home = native.describe(kernel).home_device

    def last(rows: list[int], **more: Any) -> str:
        lengths = [row + 20 for row in rows]
        call = mixed(lengths, rows, **more)
        plan = archflash.explain(
            call.q, call.k_cache, call.v_cache, **call.options, device=home, implementation=kernel
        ).plan
        assert plan is not None
        return plan.kernels[-1]

    for rows, more in (
        ([150, 3], {}), ([150, 90], {"max_seqlen_q": 150}), ([40, 1, 5], {"max_seqlen_q": 40}),
    ):  # fmt: skip
        assert last(rows, **more).endswith("_d64_mixed")
        assert last(rows, **more, d=128).endswith("_d128_mixed")
    for rows, more in (
        ([200], {}), ([150, 3], {"d": 96}), ([150, 3], {"page_size": None}),
        ([150, 3], {"num_splits": 1}), ([150, 3], {"page_size": 48}),
        ([100, 90], {"max_seqlen_q": 100}), ([6] * 9, {"max_seqlen_q": 6, "heads": (8, 1)}),
    ):  # fmt: skip
        assert not last(rows, **more).endswith("_mixed")
