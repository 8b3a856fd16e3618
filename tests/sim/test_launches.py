"""Arguments of launches, what is refused, reports as text, and the limits of simulated calls."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

import archflash
from archflash import LaunchError, sim
from archflash._errors import NotCompiledError
from archflash.sim import _attention, _launch

from .ptx import HEADER, program, run

PARAMETERS = f"""{HEADER}
.visible .entry test(.param .u64 out, .param .f32 real, .param .s32 below, .param .u32 above,
                     .param .align 4 .b8 pair[8])
{{
.reg .b64 %rd<2>;
.reg .b32 %r<6>;
.reg .f32 %f<2>;
ld.param.u64 %rd1, [out];
ld.param.f32 %f1, [real];
ld.param.u32 %r1, [below];
ld.param.u32 %r2, [above];
ld.param.u32 %r3, [pair];
ld.param.u32 %r4, [pair+4];
st.global.f32 [%rd1], %f1;
st.global.u32 [%rd1+4], %r1;
st.global.u32 [%rd1+8], %r2;
st.global.u32 [%rd1+12], %r3;
st.global.u32 [%rd1+16], %r4;
ret;
}}
"""


def words(count: int = 64) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


def test_arguments_of_every_type_arrive_at_their_places() -> None:
    out = words(5)
    arguments = (out, 1.5, -7, 2**32 - 2, struct.pack("<ii", 11, -12))
    assert not sim.launch(sim.load(PARAMETERS), "test", arguments, block=(1, 1, 1)).errors
    assert out.tolist() == [0x3FC00000, -7, -2, 11, -12]


def test_tensors_without_values_of_their_own_are_refused() -> None:
    text = program("st.global.u32 [%rd10], %r0;", parameters=1)
    lazy = torch.zeros(64, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    for tensor, said in (
        (lazy, r"argument 0.*pass a clone\(\) of it"),
        (words().to("meta"), "argument 0 is on meta: not on the CPU"),
    ):
        with pytest.raises(LaunchError, match=said):
            run(text, tensor)


def test_a_tensor_without_elements_has_no_bytes() -> None:
    empty = torch.empty(3, 0, 5)
    assert _launch.extent_bytes(empty) == 0
    assert _launch.row_starts(empty) == ([], 0)
    assert not run(program("mov.u32 %r1, 1;", parameters=1), empty).errors
    with pytest.raises(sim.SimulationError, match="global"):
        run(program("ld.global.u32 %r1, [%rd10];", parameters=1), empty)


@pytest.mark.parametrize(
    ("made", "said"),
    [({"swizzle": 48}, "a swizzle of 48 bytes: 0, 32, 64 or 128"),
     ({"tensor": torch.zeros(8, 8).t()}, "the last dimension is not contiguous")],
)  # fmt: skip
def test_maps_that_the_driver_refuses(made: dict[str, Any], said: str) -> None:
    of = {"tensor": torch.zeros(8, 8), "box": (8, 8)} | made
    with pytest.raises(LaunchError, match=said):
        sim.TensorMap(**of).encode(1 << 20)


def test_a_report_says_where_and_what_was_found() -> None:
    text = program("st.global.u32 [%rd10], %r0;\nst.global.u32 [%rd0], %r0;", parameters=1)
    report = run(text, words(8), check=False)
    (found,) = [x for x in report.errors if "memory" in x.kind or "bounds" in x.kind][:1]
    said = str(found)
    assert said.startswith(
        f"error: {found.kind}: {found.message}\n  in test, CTA 0, warp 0, lane 8"
    )
    assert f"PTX line {found.line}: {found.instruction}" in said
    assert found.instruction.startswith("st.global.u32")
    assert "; stopped by an error, so what was done was not counted" in str(report)
    with pytest.raises(sim.SimulationError) as caught:
        run(text, words(8))
    assert said in str(caught.value)
    many = dataclasses.replace(found, cta=-1, warp=-1, lane=-1, line=0, count=3, source="a.cu:7")
    assert str(many).endswith("\n  in test\n  a.cu:7\n  3 times")
    left_out = dataclasses.replace(report, dropped=5, overlaps_checked=False)
    assert "and 5 findings more, not kept" in str(left_out)
    assert "writes of different CTAs were too many to be compared" in str(left_out)


# --- calls ---


@pytest.mark.parametrize("given", ["soon", "nan", "-1"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", given)
    q = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=f"ARCHFLASH_SIM_LIMIT={given} is no number of seconds"):
        archflash.attention(q, q, q, implementation="simt")


@pytest.mark.filterwarnings("ignore:archflash. tensors are on the CPU")
def test_a_call_that_would_take_long_is_refused_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", "1e-9")
    q = torch.randn(1, 1, 4, 64).half()
    with pytest.raises(LaunchError, match=r"would take about 0 s, more than the limit of 0 s: set"):
        archflash.attention(q, q, q, implementation="simt")
    monkeypatch.setenv("ARCHFLASH_SIM_LIMIT", "inf")
    out = archflash.attention(q, q, q, implementation="simt")
    torch.testing.assert_close(out, archflash.attention(q, q, q), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("causal", "pairs"), [(0, 3 * 5 * 7 * 4), (1, 3 * 5 * 7 * 4 // 2)])
def test_the_pairs_that_a_call_computes(causal: int, pairs: int) -> None:
    problem = {"batch": 3, "nq": 5, "nk": 7, "heads_q": 4, "causal": causal, "key_indices": 0}
    problem["n_new"] = 0
    assert _attention.visible_pairs(problem, {}) == pairs
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    assert _attention.visible_pairs(problem, packed) == (4 + 9) * 4 // (1 + causal)
    lengths = {"cache_seqlens": torch.tensor([3, 9], dtype=torch.int32)}
    assert _attention.visible_pairs(problem, lengths) == 5 * (3 + 7) * 4 // (1 + causal)
    of_cache = lengths | {"cu_seqlens_q": ends}
    assert _attention.visible_pairs(problem, of_cache) == (2 * 3 + 3 * 7) * 4 // (1 + causal)
    problem["key_indices"] = 2
    assert _attention.visible_pairs(problem, {}) == 3 * 5 * 2 * 4 // (1 + causal)


def test_what_has_no_plan_or_no_ptx_cannot_run() -> None:
    q = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    with pytest.raises(LaunchError, match="torch has nothing to launch for this call"):
        sim.run(q, q, q, implementation="torch")
    with pytest.raises(NotCompiledError, match=r"no PTX of hopper/.* that compute capability 7\.5"):
        _attention.ptx_text("hopper/fwd_f16", (7, 5))
