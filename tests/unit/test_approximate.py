"""The option approximate=, archflash.approximate() and ARCHFLASH_APPROXIMATE: who is asked, what is
said, and what is counted.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import _archflash as _native
from archflash import _forward_operators

NAMES = [name for name, *_ in _native.approximations()]


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape or (1, 2, 256, 64), device="meta", dtype=torch.float16, **options)


def asked(**options: Any) -> str | None:
    """What the plan of a call on an RTX 4090 approximates."""
    q = options.pop("q", meta())
    device = options.pop("device", "RTX 4090")
    plan = archflash.explain(q, q, q, device=device, **options).plan
    return None if plan is None else plan.problem.approximate


@pytest.mark.parametrize("value", ["fast", "int8 ", 8, "", "int4 if served"])
def test_a_wrong_word_is_refused_with_all_right_ones(value: object) -> None:
    listed = ", ".join(f"'{name}'" for name in NAMES) + ", or None"
    with pytest.raises(ValueError, match=listed):
        asked(approximate=value)
    with pytest.raises(ValueError, match=rf"it must be one of {', '.join(NAMES)}, or None"):
        archflash.approximate(value).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("int8", ["in int8", "about 1.5%", "at most 2% with outlier"]),
        ("int8_pv", ["p v in int8", "about 1.5%", "3% with outlier rows in v"]),
        ("fp16_accumulate", ["fp16 sums", "about 0.1%"]),
        ("nvfp4", ["four bits", "14 to 28%", "37%, cosine 0.93 with outlier channels in k"]),
    ],
)
def test_explain_tells_the_error_and_that_the_speed_is_unmeasured(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = meta()
    if name == "nvfp4":
        monkeypatch.setenv("ARCHFLASH_UNPROVED", "blackwell_consumer")
    decision = archflash.explain(q, q, q, device="RTX 5090", approximate=name)
    assert decision.plan is not None
    note = dict(decision.plan.notes)["approximate"]
    for word in (*words, "unmeasured"):
        assert word in note
    assert f"approximate='{name}'" in str(decision)


def test_a_kernel_without_it_says_so_and_what_to_do() -> None:
    q = meta()
    with pytest.raises(
        archflash.ForcedImplementationError,
        match="approximate='int8': simt has no such kernel; leave approximate out or use",
    ):
        archflash.explain(q, q, q, device="H200", implementation="simt", approximate="int8")


LISTS = torch.empty(1, 1, 2, 8, dtype=torch.int32, device="meta")  # of 64 rows each
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "int8-d": ({"approximate": "int8", "d": 264}, "head dimensions 264 and 264 with .* up to 256"),
    "fp16-d": ({"approximate": "fp16_accumulate", "d": 264}, "264 and 264 with .* up to 256"),
    "int8-pv-dropout": ({"approximate": "int8_pv", "dropout_p": 0.1}, "dropout_p with"),
    "splits": ({"approximate": "int8", "num_splits": 2}, "num_splits"),
    "invariant": ({"approximate": "int8", "batch_invariant": True}, "batch_invariant"),
    "float32": ({"approximate": "int8", "dtype": torch.float32}, "takes float16 and bfloat16"),
    "lists": ({"approximate": "int8", "key_indices": LISTS}, "key_indices with"),
    "out": ({"approximate": "int8", "out_dtype": torch.float32}, "writes the type of its inputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_does_not_take_is_said_with_what_to_do(name: str) -> None:
    options, reason = REFUSED[name]
    call = dict(options)
    q = torch.empty(1, 2, 100, call.pop("d", 64), device="meta",
                    dtype=call.pop("dtype", torch.float16))  # fmt: skip
    with pytest.raises(archflash.ForcedImplementationError, match=reason) as refused:
        archflash.explain(q, q, q, device="RTX 4090", implementation="ampere", **call)
    for line in str(refused.value).splitlines()[1:]:
        assert "implementation='torch'" in line or "leave it at False" in line, line


@pytest.mark.parametrize("name", ["int8", "fp16_accumulate", "int8_pv"])
@pytest.mark.parametrize("device", ["A100", "RTX 3090", "RTX 4090", "H200", "RTX 5090"])
def test_each_gpu_from_8_0_on_has_it(name: str, device: str) -> None:
    q, k = meta(2, 8, 300, 128), meta(2, 2, 500, 128)
    decision = archflash.explain(q, k, k, device=device, approximate=name)
    assert decision.chosen == "ampere"
    assert decision.plan is not None
    launches = decision.plan.to_dict()["launches"]
    kernels = [launch["kernel"] for launch in launches]
    assert kernels[:2] == ["ampere_approximate_stats", "ampere_approximate_convert"]
    assert kernels[2].endswith(("_int8_d128", "_f16_fp16_d128", "_int8_pv_d128"))
    # 2 x 2 heads of 500 keys, 2 x 8 of 300 queries, in blocks of 64; of V alone for fp16 sums
    fp16 = name == "fp16_accumulate"
    assert launches[1]["grid"][0] == (4 * 8 if fp16 else 2 * 4 * 8 + 16 * 5)
    assert launches[2]["shared_bytes"] <= 99 * 1024
    read = {slot["operand"] for slot in launches[2]["pointers"]}
    assert "v" not in read
    assert ("q" in read) == fp16


@pytest.mark.parametrize("name", ["int8", "int8_pv"])
def test_the_parts_of_the_workspace_do_not_overlap(name: str) -> None:
    q = meta(2, 4, 70, 72)
    plan = archflash.explain(q, q, q, device="H200", approximate=name).plan
    assert plan is not None
    pointers = plan.to_dict()["launches"][1]["pointers"]
    starts = sorted(slot["addend"] for slot in pointers if slot["operand"] == "workspace")
    rows = 2 * 4 * 70
    # of V: the largest, a scale and V; or columns and V. Columns of K, K with scales, Q with rows
    sizes = [8 * 80 * 16, rows * 80] if name == "int8_pv" else [8 * 4, 8 * 8, rows * 72 * 2]
    of_key = 12 if name == "int8_pv" else 4
    sizes += [8 * 128 * 8, rows * 128, rows * of_key, rows * 128, rows * 8]
    assert len(starts) == len(sizes)
    ends = [*starts[1:], plan.workspace_bytes]
    assert all(end - start >= size for start, end, size in zip(starts, ends, sizes, strict=True))


def test_nothing_is_approximate_unless_asked_for() -> None:
    for device in ("RTX 4090", "H200"):
        assert asked(device=device) is None
        assert asked(device=device, approximate="int8") == "int8"


def test_a_context_asks_where_a_kernel_offers_it_and_else_for_the_usual_one() -> None:
    q = meta()
    call: dict[str, Any] = {"device": "RTX 4090", "num_splits": 2, "return_lse": True}
    usual = archflash.explain(q, q, q, **call)
    with archflash.approximate("int8"):
        assert asked() == "int8"
        assert asked(device="H200") is None  # where exact kernels are faster
        exact = archflash.explain(q, q, q, **call)
        with archflash.approximate(None):
            assert asked() is None
    assert exact.chosen == usual.chosen != "torch"
    assert str(exact) == str(usual)
    assert asked() is None


def test_a_call_that_needs_gradients_is_exact_in_a_context() -> None:
    with archflash.approximate("int8"):
        assert asked(q=meta(requires_grad=True)) is None


def test_a_context_leaves_calls_over_places_in_caches_alone() -> None:
    q, cache = meta(1, 4, 2, 64), meta(3, 8, 2, 64)
    places = torch.empty(1, 1, 4, 5, dtype=torch.int32, device="meta")
    with archflash.approximate("int8"):
        plan = archflash.explain(
            q, cache, cache, key_indices=places, physical_indices=True, layout="bnhd",
            device="RTX 4090",
        ).plan  # fmt: skip
    assert plan is not None
    assert plan.problem.approximate is None


def test_a_context_ends_with_its_thread() -> None:
    found: list[str | None] = []
    with archflash.approximate("int8"):
        thread = threading.Thread(target=lambda: found.append(asked()))
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.slow
def test_the_environment_variable_asks_in_the_whole_process() -> None:
    # Three processes that have imported torch.
    program = """
import os, sys, torch
for value in ("int8", "", "quick"):
    os.environ["ARCHFLASH_APPROXIMATE"] = value
    if os.fork() == 0:
        try:
            import archflash
            q = torch.empty(1, 2, 256, 64, device="meta", dtype=torch.half)
            print(archflash.explain(q, q, q, device="RTX 4090").plan.problem.approximate)
        except ValueError as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    asked, nothing, wrong = done.stdout.splitlines()
    assert (asked, nothing) == ("int8", "None"), done.stderr
    assert wrong.startswith("ARCHFLASH_APPROXIMATE is 'quick': it must be one of int8_qk, ")


def by_function(q: Tensor) -> Tensor:
    result: Tensor = archflash.attention(q, q, q)
    return result


def by_torch_operator(q: Tensor) -> Tensor:
    return torch.compile(by_function, backend="eager", fullgraph=True)(q)


def by_pytorchs_operator(q: Tensor) -> Tensor:
    results = _forward_operators.OPERATORS["_scaled_dot_product_flash_attention"](q, q, q)
    result: Tensor = results[0]
    return result


@pytest.mark.slow  # each is a run on the simulator
@pytest.mark.parametrize("way", [by_function, by_torch_operator, by_pytorchs_operator])
def test_every_way_of_a_call_asks_and_is_counted(way: Callable[[Tensor], Tensor]) -> None:
    q = torch.randn(1, 1, 33, 16, dtype=torch.float16)
    with archflash.force("ampere"):
        exact = way(q)
        expected = archflash.attention(q, q, q, approximate="int8")
        archflash.stats(reset=True)
        with archflash.approximate("int8"):
            out = way(q)
        counted = archflash.stats(reset=True)
    assert torch.equal(out, expected)
    assert not torch.equal(out, exact)
    assert counted.approximated == {"int8": 1}
    assert "with approximate='int8'" in str(counted)
    assert archflash.stats().approximated == {}


# --- who serves it ---

BESIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "causal": lambda: {"causal": True, "q_offset": 7},
    "window": lambda: {"window": (30, 5)},
    "sinks": lambda: {"sinks": torch.empty(6, device="meta")},
    "softcap": lambda: {"softcap": 5.0},
    "bool": lambda: {"attn_mask": torch.empty(2, 1, 130, 200, dtype=torch.bool, device="meta")},
    "added": lambda: {"attn_mask": meta(130, 200)},
    "ranges": lambda: {
        "key_ranges": torch.empty(1, 1, 130, 2, 2, dtype=torch.int32, device="meta")
    },
    "blocks": lambda: {"block_mask": torch.empty(1, 6, 3, 4, dtype=torch.bool, device="meta")},
    "slopes": lambda: {"alibi_slopes": torch.empty(6, device="meta")},
}


@pytest.mark.parametrize("device", ["A100", "RTX 3090", "RTX 4090", "RTX 5090"])
@pytest.mark.parametrize("name", ["int8", "int8_pv", "fp16_accumulate"])
@pytest.mark.parametrize("dims", [(72, 40), (128, 128), (192, 256)], ids=str)
def test_a_kernel_serves_it_beside_every_option(
    device: str, name: str, dims: tuple[int, int]
) -> None:
    d, dv = dims
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    for beside, options in BESIDE.items():
        for packed in (False, True):
            if packed and beside in ("bool", "added", "ranges", "blocks"):
                continue
            shapes = ((6, 130, d), (2, 200, d), (2, 200, dv))
            q, k, v = (meta(2, *shape) for shape in shapes)
            call = options()
            if packed:
                q, k, v = (meta(2 * n, heads, columns) for heads, n, columns in shapes)
                call |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            decision = archflash.explain(
                q, k, v, device=device, approximate=name, return_lse=True, **call
            )
            assert decision.chosen == "ampere", (beside, packed)
