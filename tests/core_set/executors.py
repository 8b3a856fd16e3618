"""Where the core set runs: on the PTX simulator, or on the GPU of this machine.

A test takes its tensors from the executor and lets it run calls. What must hold of every run, such
as that nothing is written outside the output, is checked by the executor; what a call means, by
the test. Only sizes differ: a test asks `pick` for them.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from bench.switches import plans
from torch import Tensor

import archflash
from archflash import _archflash as native
from archflash import _dispatch, sim
from archflash.cli.replay import Inputs, run_plan

from ..kvcache_cases import CacheCall
from ..sim.explained import unexplained
from ..sim.schedules import IN_FULL, MODES, SEEDS, looks_for_races, some_of
from .checks import Guarded, assert_close, guarded_output, same_bits

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}

T = TypeVar("T")


class Executor(ABC):
    """Runs calls of forced kernels, and makes the tensors for them.

    Attributes:
        name: what `--executor` calls it.
        device: where its tensors are, "cpu" or "cuda".
    """

    name: str
    device: str

    def pick(self, *, simulator: T, gpu: T) -> T:
        """The one of two values that is for this executor: sizes, mostly."""
        return simulator if self.name == "simulator" else gpu

    # --- which kernels ---

    @abstractmethod
    def why_not(self) -> str | None:
        """Why it cannot run here; None where it can."""

    def kernels(self, feature: str = "") -> list[str]:
        """The implementations that it runs, or those of them with a feature."""
        return [
            i.name
            for i in archflash.implementations()
            if i.name != "torch" and (not feature or feature in i.features)
        ]

    def dtypes_of(self, kernel: str, only: Iterable[str] = DTYPES) -> list[str]:
        """The dtypes of `only` that an implementation takes."""
        served = next(i.dtypes for i in archflash.implementations() if i.name == kernel)
        return [dtype for dtype in only if dtype in served]

    def kernels_and_dtypes(self, only: Iterable[str] = DTYPES) -> list[tuple[str, str]]:
        """(kernel, dtype) for each dtype of `only` that the kernel takes."""
        return [
            (kernel, dtype) for kernel in self.kernels() for dtype in self.dtypes_of(kernel, only)
        ]

    # --- tensors ---

    def rand(self, *shape: int, seed: int, dtype: str | torch.dtype = "float32") -> Tensor:
        """Standard normal numbers."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.randn(shape, generator=generator, device=self.device).to(kind)

    def qkv(
        self, nq: int, nk: int, d: int = 64, dv: int | None = None, *, dtype: str = "float32",
        batch: int = 1, heads: tuple[int, int] = (2, 2), seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Contiguous q, k, v in the layout bhnd; heads are those of q and of k."""
        return (
            self.rand(batch, heads[0], nq, d, seed=3 * seed, dtype=dtype),
            self.rand(batch, heads[1], nk, d, seed=3 * seed + 1, dtype=dtype),
            self.rand(batch, heads[1], nk, dv or d, seed=3 * seed + 2, dtype=dtype),
        )

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def int32(self, *values: int) -> Tensor:
        return self.tensor(values, torch.int32)

    def with_tensors(self, options: dict[str, Any]) -> dict[str, Any]:
        """A copy of options whose sinks and q_offset are lists, with these as tensors."""
        call = dict(options)
        if "sinks" in call:
            call["sinks"] = self.tensor(call["sinks"])
        if "q_offset" in call:
            call["q_offset"] = self.int32(*call["q_offset"])
        return call

    def cu_seqlens(self, lengths: Sequence[int]) -> Tensor:
        return self.int32(0, *itertools.accumulate(lengths))

    # --- runs ---

    @abstractmethod
    def attend(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *, out_pad: int = 0,
        plan: native.LaunchPlan | None = None, schedules: Sequence[int] | None = None, **call: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output and log-sum-exp of a call, which runs more than once and has the same bits each
        time; nothing is written outside the output.

        Args:
            kernel: the implementation.
            q, k, v: as for `archflash.attention`, on this executor's device.
            out_pad: elements between the rows of the first run's output.
            plan: run this plan of the call, with the log-sum-exp, instead of making one.
            schedules: numbers of the simulator's schedules; None: as many as this kernel is worth.
            **call: the other arguments of `archflash.attention`.
        """

    @abstractmethod
    def survive(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *, may_race: bool = False, **call: Any
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a call whose result is not promised: it must only stay inside
        its tensors.

        Args:
            may_race: whether two CTAs may write the same row.
        """

    @abstractmethod
    def attend_with_kvcache(
        self, kernel: str, call: CacheCall, *, plan: native.LaunchPlan | None = None
    ) -> tuple[Tensor, Tensor, native.LaunchPlan]:
        """Output and log-sum-exp of a call of attention_with_kvcache, and its plan. It runs more
        than once, on the call's caches and on copies, and gives and writes the same bits each time.

        Args:
            kernel: the implementation.
            call: the call, whose caches are written.
            plan: run this plan of the call instead of making one.
        """

    @abstractmethod
    def capability(self, kernel: str, plan: native.LaunchPlan | None) -> tuple[int, int]:
        """That of the GPU that runs a call, with this plan or one that is made for it."""

    def attend_and_check(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, **call: Any
    ) -> tuple[Tensor, Tensor]:
        """`attend`, and the result agrees with float64 by the error rule."""
        out, lse = self.attend(kernel, q, k, v, **call)
        semantics = {
            name: value
            for name, value in call.items()
            if name not in ("out_pad", "plan", "schedules")
        }
        ran_on = kernel, self.capability(kernel, call.get("plan"))
        assert_close(out, lse, q, k, v, ran_on, **semantics)
        return out, lse


# --- the simulator ---

# A call runs under one of the four kinds of schedules, each third one under two; `make
# test-sim-full` runs all, and all dtypes. The CTAs of blackwell_dc have 16 warps and 256 rows,
# however few a call has. Each of its calls runs under one schedule, and outside of the pairs of
# features with one dtype.
EXPENSIVE = set() if IN_FULL else {"blackwell_dc"}
# What runs under one schedule, too: kernels for float16 are those for bfloat16 but for conversions
# and the type of the products.
TWIN = None if IN_FULL else torch.float16


class Simulator(Executor):
    """Forced kernels with CPU tensors, under several schedules; any finding is an error."""

    name = "simulator"
    device = "cpu"

    def why_not(self) -> None:
        return None

    def capability(self, kernel: str, plan: native.LaunchPlan | None) -> tuple[int, int]:
        if plan is not None:
            return plan.device.capability
        name = os.environ.get("ARCHFLASH_SIM_DEVICE") or native.describe(kernel).home_device
        known = native.find_known_device(name)
        assert known is not None
        return known.device.capability

    def kernels_and_dtypes(self, only: Iterable[str] = DTYPES) -> list[tuple[str, str]]:
        return [
            (kernel, dtype)
            for kernel in self.kernels()
            for dtype in self.dtypes_of(kernel, only)[-1 if kernel in EXPENSIVE else 0 :]
        ]

    def attend(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *, out_pad: int = 0,
        plan: native.LaunchPlan | None = None, schedules: Sequence[int] | None = None, **call: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        guarded = guarded_output(q, v, out_pad, call)
        if _launches_nothing(q, call):
            return _attend_once(kernel, q, k, v, guarded, call)
        if schedules is None:
            schedules = schedules_of(kernel, q, k, v, call)
        else:
            schedules = some_of(schedules, number_of(q, k, v, call))
        first: sim.Run | None = None
        for number in schedules:
            mode = MODES[number % len(MODES)]
            run = sim.run(
                q, k, v, implementation=kernel, mode=mode, seed=number, plan=plan, return_lse=True,
                out=guarded.view if first is None else None,
                race_check=looks_for_races(number, schedules), **call,
            )  # fmt: skip
            for report in run.reports:
                assert not unexplained(kernel, report), f"{mode}, seed {number}: {report}"
            first = first or run
            assert same_bits(run.out, first.out), f"other bits in mode {mode}, seed {number}"
            assert run.lse is not None
            assert first.lse is not None
            assert same_bits(run.lse, first.lse), f"other log-sum-exp in mode {mode}, seed {number}"
        guarded.assert_untouched_outside()
        assert first is not None
        assert first.lse is not None
        assert first.lse.dtype == torch.float32
        assert first.lse.is_contiguous()
        return first.out, first.lse

    def survive(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *, may_race: bool = False, **call: Any
    ) -> tuple[Tensor, Tensor]:
        guarded = guarded_output(q, v, 0, call)
        for number in [0] if may_race else schedules_of(kernel, q, k, v, call):
            run = sim.run(
                q, k, v, implementation=kernel, mode=MODES[number % len(MODES)], seed=number,
                return_lse=True, out=guarded.view, check=not may_race, **call,
            )  # fmt: skip
            for report in run.reports:
                found = unexplained(kernel, report)
                if may_race:
                    found = [f for f in found if f.kind != "race" or "CTA" not in f.message]
                assert not found, report
        guarded.assert_untouched_outside()
        assert run.lse is not None
        return run.out, run.lse

    def attend_with_kvcache(
        self, kernel: str, call: CacheCall, *, plan: native.LaunchPlan | None = None
    ) -> tuple[Tensor, Tensor, native.LaunchPlan]:
        runs: list[tuple[sim.Run, CacheCall]] = []
        q, k, v = call.q, call.k_cache, call.v_cache
        schedules = schedules_of(kernel, q, k, v, call.options)
        for number in schedules:
            mine = call.copied()
            run = sim.run(
                mine.q, mine.k_cache, mine.v_cache, implementation=kernel,
                mode=MODES[number % len(MODES)], seed=number, plan=plan, return_lse=True,
                race_check=looks_for_races(number, schedules), **mine.options,
            )  # fmt: skip
            for report in run.reports:
                assert not unexplained(kernel, report), f"seed {number}: {report}"
            runs.append((run, mine))
        first, written = runs[0]
        assert first.lse is not None
        for run, mine in runs[1:]:
            assert run.lse is not None
            pairs = (
                (run.out, first.out), (run.lse, first.lse), (mine.k_cache, written.k_cache),
                (mine.v_cache, written.v_cache),
            )  # fmt: skip
            assert all(same_bits(one, other) for one, other in pairs), "other bits"
        call.k_cache.copy_(written.k_cache)
        call.v_cache.copy_(written.v_cache)
        return first.out, first.lse, first.plan


def number_of(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> int:
    """A number that decides under which schedules a call runs."""
    return q.shape[-2] + k.shape[-2] + v.shape[-1] // 8 + len(call)


def schedules_of(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any], *, compared: bool = False
) -> Sequence[int]:
    """One schedule, or a fixed and a random one.

    Args:
        compared: whether the call promises the same bits of what CTAs add up: each second one has
            two.
    """
    if IN_FULL:
        return range(SEEDS)
    number = number_of(q, k, v, call)
    kind = number % len(MODES)
    if kernel in EXPENSIVE or q.dtype == TWIN or number % (2 if compared else 3) > 0:
        return [kind]
    return [kind % 2, kind % 2 + 2]


# Functions about numbers at an end of the range of their type.
OF_THE_RANGE = (
    "::test_values_at_the_end_of_the_type_do_not_overflow",
    "::test_each_key_of_a_row_of_the_lowest_numbers_weighs_the_same",
    "::test_rows_of_minus_infinity_are_zero_and_rows_of_the_lowest_number_are_the_mean",
    "::test_rows_that_see_nothing_and_rows_of_the_lowest_number",
    "::test_every_number_of_8_bits_is_rotated_and_rounded",
    "::test_every_number_of_8_bits_is_read_exactly",
    "::test_every_number_of_8_bits_is_converted_exactly",
    "::test_every_number_of_a_latent_cache_of_8_bits_is_converted_exactly",
)


# Functions whose last parameter has two values, of which `make test` runs each case with one, in
# turns: the next case has the other value.
ONE_OF_TWO = (
    "test_hopper_gradients.py::test_a_cta_has_all_query_rows_of_a_head",
    "test_hopper_gradients.py::test_blocks_without_rows_and_warpgroups_without_keys",
    "test_hopper_gradients.py::test_query_rows_that_ctas_share_out",
    "test_hopper_gradients.py::test_sums_of_dq_without_rows_and_columns_that_dq_has_not",
    "test_hopper_gradients.py::test_the_only_tile_of_a_head_writes_dq",
    "test_hopper_gradients.py::test_tiles_that_a_cta_takes_one_after_another",
    "test_kvcache.py::test_packed_sequences_of_few_rows_have_a_launch_of_their_own",
    "test_prefill_caches.py::test_a_kernel_serves_many_rows_as_the_reference_does",
    "test_prefill_caches.py::test_packed_sequences_of_few_rows_have_a_launch_of_their_own",
    "test_rounds_gradients.py::test_packed_sequences_with_rows_of_none_behind_them",
)


def others_of_two(tests: Sequence[str]) -> set[str]:
    """What ONE_OF_TWO leaves to test-rest, of tests in the order in which they are collected."""
    left = set()
    for function in ONE_OF_TWO:
        cases = [test for test in tests if test.partition("[")[0].endswith(f"/{function}")]
        left |= {test for n, test in enumerate(cases) if (n // 2 + n) % 2}
    return left


def left_to_rest(tests: set[str]) -> set[str]:
    """Two thirds of the tests in float16 that there are in bfloat16, too, always the same: most
    texts for float16 are made from those for bfloat16. A function keeps one at least, and all where
    it is about the range of numbers.
    """
    twins = sorted(
        (zlib.crc32(test.encode()) % 3 > 0, zlib.crc32(test.encode()), test)
        for test in tests
        if re.sub(r"(?<!b)float16", "bfloat16", test) in tests - {test}
    )
    kept: set[str] = set()
    left = set()
    for drop, _, test in twins:
        function = test.partition("[")[0]
        if drop and function in kept and not function.endswith(OF_THE_RANGE):
            left.add(test)
        kept.add(function)
    return left


def _launches_nothing(q: Tensor, call: dict[str, Any]) -> bool:
    """Whether a call has no row to write, or no sequence that a row could belong to."""
    ends = call.get("cu_seqlens_q")
    return q.numel() == 0 or (ends is not None and len(ends) == 1)


def _attend_once(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, guarded: Guarded, call: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    out, lse = archflash.attention(
        q, k, v, implementation=kernel, out=guarded.view, return_lse=True, **call
    )
    assert out is guarded.view
    guarded.assert_untouched_outside()
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    return out, lse


# --- a GPU ---


class Gpu(Executor):
    """Forced kernels with CUDA tensors, into a guarded output and into one of the library's own."""

    name = "gpu"
    device = "cuda"

    def why_not(self) -> str | None:
        if problem := _dispatch.driver_problem():
            return problem
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no CUDA device"
        return None

    def capability(self, kernel: str, plan: native.LaunchPlan | None) -> tuple[int, int]:
        return torch.cuda.get_device_capability()

    def kernels(self, feature: str = "") -> list[str]:
        """The implementations with code for this GPU; without a GPU all, to be skipped."""
        every = super().kernels(feature)
        if self.why_not() is not None:
            return every
        here = torch.cuda.get_device_capability()
        return [name for name in every if native.has_code(name, here)]

    def attend(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *, out_pad: int = 0,
        plan: native.LaunchPlan | None = None, schedules: Sequence[int] | None = None, **call: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        guarded = guarded_output(q, v, out_pad, call)
        if plan is None and not _pairs:
            call_with_lse = {**call, "return_lse": True}
            plan = plans.alone_for_pairs(kernel, q, k, v, call_with_lse)
        if plan is not None:
            options = {**call, "return_lse": True}
            out, lse = run_plan(plan, Inputs(q, k, v, options, guarded.view))
            guarded.assert_untouched_outside()
            again, lse_again = run_plan(plan, Inputs(q, k, v, options))
        else:
            out, lse = _attend_once(kernel, q, k, v, guarded, call)
            again, lse_again = archflash.attention(
                q, k, v, implementation=kernel, return_lse=True, **call
            )
        assert same_bits(again, out), "not the same bits the second time"
        assert same_bits(lse_again, lse), "not the same bits of the log-sum-exp the second time"
        return out, lse

    def survive(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, *, may_race: bool = False, **call: Any
    ) -> tuple[Tensor, Tensor]:
        guarded = guarded_output(q, v, 0, call)
        out, lse = archflash.attention(
            q, k, v, implementation=kernel, out=guarded.view, return_lse=True, **call
        )
        torch.cuda.synchronize()
        guarded.assert_untouched_outside()
        return out, lse

    def attend_with_kvcache(
        self, kernel: str, call: CacheCall, *, plan: native.LaunchPlan | None = None
    ) -> tuple[Tensor, Tensor, native.LaunchPlan]:
        again = call.copied()
        answers = []
        for mine in (call, again):
            tensors = (mine.q, mine.k_cache, mine.v_cache)
            if plan is None:
                decision = archflash.explain(
                    *tensors, implementation=kernel, return_lse=True, **mine.options
                )
                assert decision.plan is not None
                plan = decision.plan
            inputs = Inputs(*tensors, {**mine.options, "return_lse": True})
            answers.append(run_plan(plan, inputs))
        assert plan is not None
        (out, lse), (out_again, lse_again) = answers
        pairs = (
            (out, out_again), (lse, lse_again), (call.k_cache, again.k_cache),
            (call.v_cache, again.v_cache),
        )  # fmt: skip
        assert all(same_bits(one, other) for one, other in pairs), "not the same bits again"
        return out, lse, plan


def approximate_factors(on: Executor, dims: list[tuple[int, int]]) -> dict[str, list[Any]]:
    """What approximate calls on 8.0 and later are tried with in pairs, with these (d, dv)."""
    return {
        "dtype": ["float16", "bfloat16"],
        "layout": ["bhnd", "bnhd"],
        "lengths": on.pick(
            simulator=[(33, 70), (70, 33), (9, 140), (64, 64)],
            gpu=[(113, 203), (203, 113), (9, 799), (64, 64)],
        ),
        "dims": dims,
        "heads": [(2, 2), (6, 2), (4, 1)],
        "causal": [False, True],
        "window": [None, (17, None), (None, 5), (16, 9), (0, 0)],
        "q_offset": [None, 0, -5, 90, "tensor"],
        "sinks": [None, "float32", "bfloat16"],
        "scale": [None, 0.05],
        "transposed": [False, True],
        "out_pad": [0, 24],
    }  # fmt: skip


# --- the one that was chosen ---

EXECUTORS: dict[str, type[Executor]] = {"simulator": Simulator, "gpu": Gpu}
_chosen = "simulator"
_pairs = True


def choose(name: str, pairs: bool = True) -> None:
    """What `--executor` and `--no-pairs` say; before test modules are imported."""
    global _chosen, _pairs
    _chosen, _pairs = name, pairs


def executor() -> Executor:
    """The executor that `--executor` names."""
    return EXECUTORS[_chosen]()
