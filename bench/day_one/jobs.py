"""The jobs of a day, and what each does. Each runs in a process of its own (__main__.py), so that a
kernel that hangs or breaks its CUDA context does not affect the other jobs.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import environment, timing
from bench.cases import Case, load_cases
from bench.day_one import record
from bench.day_one.setup import (
    FIRST_LIMIT,
    MESSAGE_LENGTH,
    SANITIZER_LIMIT,
    SWITCH_LIMIT,
    TESTS_LIMIT,
    TIMING_LIMIT,
    TINY,
    VERIFY,
    WAITS,
    WITH_SWITCHES,
    Job,
    Setup,
    WrongError,
)
from bench.day_one.timings import check_gradients_setting, check_setting, time_peers, time_settings
from bench.results import Row
from bench.switches import plans, variants

if TYPE_CHECKING:
    import torch

    from archflash.verify import _setup as verify_setup

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
# What runs on CTAs alone, before any pair of CTAs has to work.
CORE_SET = (
    "features", "calls", "masks", "not_finite", "lengths", "memory", "packed", "fp8",
    "blackwell_dc_split_keys",
)  # fmt: skip
ALONE_TESTS = tuple(f"tests/core_set/test_{name}.py" for name in CORE_SET)
SIMULATED_TESTS = ("tests/core_set/test_masks.py",)
# What runs as the plans say, which take pairs where they expect them to be faster.
PAIR_TESTS = (
    *(f"tests/core_set/test_{name}.py" for name in ("blackwell_dc_tiles", "every_kernel")),
    *(f"tests/core_set/test_{name}.py" for name in ("features", "masks", "packed")),
    *(f"tests/gpu/test_gpu_{name}.py" for name in ("memory", "streams", "on_the_spot")),
)
# A small kernel in the shape of a pair, which has no tcgen05: on a GPU, and on the simulator.
LAUNCH_TEST = ("tests/gpu/test_gpu_on_the_spot.py", "pair_of_ctas_with_roles")
SIMULATED_LAUNCH_TEST = ("tests/sim/test_cluster.py", "pair_of_roles")
# Cases that bench/cases.toml lacks: their many keys show the speed of the loop over the keys.
LONG = tuple(
    Case(f"bf16 2x16 16384 d{d}{mask}", "bf16", 2, 16, 16, 16384, 16384, d, dv, mask != "")
    for (d, dv), mask in itertools.product(((64, 64), (128, 128), (192, 128)), ("", " c"))
)
# The cases on which switches are timed. They differ in what limits the kernel
# (src/blackwell_dc/NOTES.md), in length and in having a mask.
SWITCH_CASES = (
    "fp16 16x16 8192 d128", "bf16 1x32/8 16384 d128 c", "bf16 1x32/8 4096 d128 c",
    "bf16 64x64 1024 d64", "fp16 8x12 2048 d64 c", "bf16 2x16 4096 d256 c",
    "bf16 2x16 16384 d192 c", "bf16 1x32/8 1x131072 d128", "e4m3 16x16 8192 d128",
)  # fmt: skip
# The cases on which walks over tiles are timed: causal, with at least two tiles for each SM.
WALK_SWITCHES = ("dynamic_walk", "persistent", "longest_first")
WALK_CASES = tuple(
    Case(f"bf16 1x{heads} {n} d128 c", "bf16", 1, heads, heads, n, n, 128, 128, True)
    for heads, n in ((32, 4096), (32, 8192), (8, 16384), (16, 32768))
)
# The calls whose waits at barriers are counted, warp by warp.
COUNTED = tuple(
    f"--shape 2,16,{rows},{d}{more}"
    for rows, d, more in ((8192, 128, ""), (8192, 64, ""), (8192, 128, " --gradients"))
)
SANITIZERS = ("racecheck", "synccheck")
# The first compute-sanitizer that is trusted with tcgen05: that of CUDA 13.1.
SANITIZER_VERSION = (2025, 4)
SANITIZER_CALLS = 30


def make_jobs(implementation: str, dtypes: tuple[str, ...], simulate: bool) -> list[Job]:
    """All jobs, in their order.

    Args:
        implementation: the implementation that is examined.
        dtypes: dtypes of its inputs, as torch spells them.
        simulate: tiny problems for the simulator.
    """
    made = []
    kinds = [DTYPES[dtype] for dtype in dtypes if dtype in DTYPES]
    for dtype, dims in itertools.product(kinds, DIMS):
        run = functools.partial(first_calls, dtype, *dims)
        made.append(Job("correctness", first_name(dtype, dims[0]), FIRST_LIMIT, run))

    def tests(part: str, paths: Iterable[str], *options: str) -> None:
        only = f"{implementation} and sinks_far" if simulate else implementation
        for path in paths:
            run = functools.partial(run_tests, part, path, only, options)
            made.append(Job(part, path, TESTS_LIMIT, run))

    tests("correctness", SIMULATED_TESTS if simulate else ALONE_TESTS, "--no-pairs")
    launch = SIMULATED_LAUNCH_TEST if simulate else LAUNCH_TEST
    run = functools.partial(run_tests, "pairs", *launch, ())
    made.append(Job("pairs", "launch", TESTS_LIMIT, run))
    own = implementation == WITH_SWITCHES
    settings = variants.SETTINGS if own else ()
    for setting in settings:
        if setting.switch == "pairs":
            run = functools.partial(check_setting, "pairs", setting)
            made.append(Job("pairs", setting.name, SWITCH_LIMIT, run))
    if not simulate:
        for dtype, dims in itertools.product(kinds, DIMS) if own else ():
            run = functools.partial(long_calls, dtype, *dims)
            made.append(Job("pairs", f"long calls {dtype} d{dims[0]}", FIRST_LIMIT, run))
        tests("pairs", PAIR_TESTS)
        for name in verified(implementation):
            run = functools.partial(run_verified, name)
            made.append(Job(VERIFY, name, TESTS_LIMIT, run))
        for tool in SANITIZERS:
            run = functools.partial(run_sanitizer, tool)
            made.append(Job("sanitizers", tool, SANITIZER_LIMIT, run))
    for setting in settings:
        if setting.switch != "pairs":
            run = functools.partial(check_setting, "switches", setting)
            nvcc = bool(setting.assignment)
            made.append(Job("switches", setting.name, SWITCH_LIMIT, run, nvcc))
    if own:
        run = check_gradients_setting
        made.append(Job("switches", variants.GRADIENTS, SWITCH_LIMIT, run, True))
    cases = {case.name: case for case in (*load_cases(), *LONG)}

    def timings(part: str, chosen: Iterable[Case], time: Callable[..., Iterator[Row]]) -> None:
        for case in TINY if simulate else chosen:
            if case.dtype in kinds:
                run = functools.partial(time, case)
                made.append(Job(part, case.name, TIMING_LIMIT, run, part != "peers"))

    if own:
        walks = [setting for setting in settings if setting.switch in WALK_SWITCHES]
        timings(
            "switches", (cases[name] for name in SWITCH_CASES),
            functools.partial(time_settings, "switches", settings),
        )  # fmt: skip
        timings("walks", WALK_CASES, functools.partial(time_settings, "walks", walks))
        for call in COUNTED if not simulate else ():
            made.append(Job(WAITS, call, SWITCH_LIMIT, functools.partial(count_waits, call)))
    timings("peers", cases.values(), time_peers)
    return made


# --- correctness ---


def first_name(dtype: str, d: int) -> str:
    """The job of first_calls()."""
    return f"first calls {dtype} d{d}"


def first_calls(dtype: str, d: int, dv: int, setup: Setup) -> Iterator[Row]:
    """Compares a few calls of a head dimension with float64, on CTAs alone. They must work before
    all else.
    """
    import torch

    import archflash
    from archflash.cli.replay import Inputs, run_plan

    item = first_name(dtype, d)
    rows = 150 if setup.simulate else 700

    def tensors(nq: int, nk: int, heads: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        case = Case("first", dtype, 1, *heads, nq, nk, d, dv, False)
        return timing.make_sets(case, setup.device, 1)[0]

    def packed() -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors(rows, rows, (2, 1)))
        ends = torch.tensor([0, 7, 7, rows], dtype=torch.int32, device=setup.device)
        return (q, k, v), {"causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends}

    # Name, tensors, options that change the result, and options that do not.
    calls: list[tuple[str, tuple[torch.Tensor, ...], dict[str, Any], dict[str, Any]]] = [
        ("plain", tensors(128, 128, (1, 1)), {}, {}),
        ("causal, grouped heads", tensors(rows, rows + 33, (2, 1)), {"causal": True}, {}),
        (
            "window and softcap", tensors(rows, rows, (2, 2)),
            {"window": (70, 3), "softcap": 9.0}, {},
        ),
        ("one query row", tensors(1, 3 * rows, (4, 1)), {}, {}),
        ("packed sequences", *packed(), {}),
    ]  # fmt: skip
    if dtype != "e4m3":
        calls.append(
            ("keys in 3 shares", tensors(100, 3 * rows, (2, 1)), {"causal": True},
             {"num_splits": 3})
        )  # fmt: skip
    answered = 0
    for name, (q, k, v), call, how in calls:
        options = {**call, **how, "return_lse": True}
        try:
            plan = plans.alone_for_pairs(setup.implementation, q, k, v, options)
            if plan is None:
                out, lse = archflash.attention(
                    q, k, v, implementation=setup.implementation, **options
                )
            else:
                out, lse = run_plan(plan, Inputs(q, k, v, options))
        except archflash.ForcedImplementationError as error:
            yield record.make_row("correctness", item, "refused", f"{name}: {error}")
            continue
        _compare(setup, name, dtype, out, lse, q, k, v, call)
        answered += 1
        yield record.make_row("correctness", item, "note", f"{name}: right")
    if not answered:
        raise WrongError("every call was refused")


def _compare(
    setup: Setup, name: str, dtype: str, out: Any, lse: Any, q: Any, k: Any, v: Any,
    call: dict[str, Any],
) -> None:  # fmt: skip
    """Raises WrongError where a result is not that of float64 by the error rule."""
    import archflash
    from archflash import reference

    expected, expected_lse = reference.attention(q, k, v, **call)
    of_scores = 0.0
    if dtype == "e4m3":
        report = reference.check_fp8(out, expected, q, k, v, **call)
        ran = archflash.explain(q, k, v, implementation=setup.implementation, **call).plan
        if ran is not None:
            of_scores = reference.fp8_score_error(
                ran.implementation, ran.device.capability, q, k, v, **call
            )
    else:
        report = reference.check(out, expected, reference.baseline(q, k, v, **call))
    lse_report = reference.check_lse(lse, expected_lse, of_scores)
    if not report.ok:
        raise WrongError(f"{name}: breaks the error rule: {report}")
    if not lse_report.ok:
        raise WrongError(f"{name}: log-sum-exp: {lse_report}")


def long_calls(dtype: str, d: int, dv: int, setup: Setup) -> Iterator[Row]:
    """Compares calls with float64 that are long enough for pairs of CTAs, where there are any."""
    import archflash

    item = f"long calls {dtype} d{d}"
    for causal, n in ((False, 4096), (True, 8192)):
        case = Case("long", dtype, 1, 20, 10, n, n, d, dv, causal)
        q, k, v = timing.make_sets(case, setup.device, 1)[0]
        call = {"causal": causal}
        decision = archflash.explain(q, k, v, implementation=setup.implementation, **call)
        out, lse = archflash.attention(
            q, k, v, implementation=setup.implementation, return_lse=True, **call
        )
        _compare(setup, f"{n} rows", dtype, out, lse, q, k, v, call)
        tile = decision.plan.tile.name if decision.plan and decision.plan.tile else "no tile"
        said = f"{n} rows{', causal' if causal else ''}: right, by {tile}"
        yield record.make_row("pairs", item, "note", said)


def run_tests(
    part: str, path: str, only: str, options: tuple[str, ...], setup: Setup
) -> Iterator[Row]:
    """Runs the tests of one file that an expression of pytest's -k chooses."""
    try:
        import pytest  # noqa: F401
    except ImportError as error:
        raise WrongError(f"the grid is pytest's: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status, said = _run_aloud(
            [
                sys.executable, "-m", "pytest", path, "-v", "-k", only, f"--junitxml={report}",
                "-p", "no:cacheprovider",
                *([] if setup.simulate else ["--executor=gpu", *options]),
            ]
        )  # fmt: skip
        if not report.exists():
            raise WrongError(f"pytest wrote no report, exit status {status}: {said[-400:]}")
        root = ElementTree.parse(report).getroot()
    tests = list(root.iter("testcase"))
    bad = [(test, found) for test in tests if (found := _of(test, "failure", "error")) is not None]
    skips = [found for test in tests if (found := _of(test, "skipped")) is not None]
    passed = len(tests) - len(bad) - len(skips)
    counted = f"{passed} passed, {len(bad)} failed, {len(skips)} skipped"
    for test, found in bad:
        said = f"failed: {test.get('name')}: {_text(found)}"
        yield record.make_row(part, path, "note", said)
    if bad:
        raise WrongError(f"{counted}; the first: {_text(bad[0][1])[:300]}")
    # Exit status 5: no test of this file is about the implementation.
    if not passed and not (skips and status == 0) and status != 5:
        raise WrongError(f"{counted}: {said[-300:]}")
    if skips and not passed:
        counted += f", nothing was tried: {_text(skips[0])}"
    yield record.make_row(part, path, "note", counted)


def _of(test: ElementTree.Element, *kinds: str) -> ElementTree.Element | None:
    """What a test of a report ended with, if it is one of these kinds."""
    return next((found for kind in kinds if (found := test.find(kind)) is not None), None)


def _text(found: ElementTree.Element) -> str:
    """What went wrong in a test: the lines that pytest marks by E, else the message."""
    marked = [line[2:] for line in (found.text or "").splitlines() if line.startswith("E ")]
    return " ".join((" ".join(marked) or found.get("message", "")).split())[:MESSAGE_LENGTH]


def verified(
    implementation: str, setup: verify_setup.Setup | None = None
) -> dict[str, verify_setup.Job]:
    """The jobs of `archflash verify --full` about what the tests above leave out, by name.

    Args:
        implementation: the implementation that is examined.
        setup: of a GPU; without one the jobs can be named only.
    """
    from archflash import _archflash as native
    from archflash.verify import _jobs, _setup

    if setup is None:
        targets = native.targets(implementation)
        capability = targets[0].first if targets else (0, 0)
        setup = _setup.Setup("", "cuda:0", capability, 1 << 33, True, (implementation,))
    parts = (_jobs.GRADIENTS, _jobs.CACHES, _jobs.DECODING)
    return {job.name: job for job in _jobs.make_jobs(setup) if job.part in parts}


def run_verified(name: str, setup: Setup) -> Iterator[Row]:
    """Runs a job of `archflash verify --full`, all of whose items are tried."""
    import torch

    from archflash.verify import _setup, _worker, _wrong

    free, _ = torch.cuda.mem_get_info()
    capability = torch.cuda.get_device_capability()
    gpu = torch.cuda.get_device_name()
    own = _setup.Setup(gpu, "cuda:0", capability, free, True, (setup.implementation,))
    bad = []
    for item in verified(setup.implementation, own)[name].items:
        told, alive = _worker.try_item(item, own)
        said = "; ".join([f"{item.name}: {told['status']}", *_wrong.as_text(told.get("where", {}))])
        yield record.make_row(VERIFY, name, "note", f"{said}; {told['detail']}")
        if told["status"] in (_worker.WRONG, _worker.FAILED):
            bad.append(f"{item.name}: {told['detail']}")
        if not alive:
            break
    if bad:
        raise WrongError(f"{len(bad)} wrong; the first: {bad[0][:MESSAGE_LENGTH]}")


def find_sanitizer() -> tuple[str | None, tuple[int, int], str]:
    """compute-sanitizer, its version and how it says that; (None, (0, 0), "") if it is not here."""
    for name in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"):
        if path := shutil.which(name):
            done = subprocess.run([path, "--version"], capture_output=True, text=True)
            if said := re.search(r"Version (\d+)\.(\d+)\S*", done.stdout):
                return path, (int(said[1]), int(said[2])), said[0]
    return None, (0, 0), ""


def run_sanitizer(tool: str, setup: Setup) -> Iterator[Row]:
    """Runs random calls of the implementation under a tool of compute-sanitizer."""
    path, version, said = find_sanitizer()
    if path is None:
        yield record.make_row("sanitizers", tool, "refused", "compute-sanitizer is not found")
        return
    if setup.implementation == WITH_SWITCHES and version < SANITIZER_VERSION:
        reason = f"{said} is older than CUDA 13.1's, {'.'.join(map(str, SANITIZER_VERSION))}"
        yield record.make_row("sanitizers", tool, "refused", reason)
        return
    status, told = _run_aloud(
        [
            path, "--tool", tool, "--kernel-name", "kns=attention_fwd", sys.executable, "-m",
            "tests.gpu.sanitizer_sample", "--kernel", setup.implementation, "--count",
            str(SANITIZER_CALLS),
        ]
    )  # fmt: skip
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) .*", told)
    if status != 0 or summary != ["0"]:
        raise WrongError(f"{said}, exit status {status}: {told[-600:]}")
    calls = re.findall(r"\d+ calls made.*", told)
    yield record.make_row("sanitizers", tool, "note", f"{said}: nothing found; {calls[-1]}")


def _run_aloud(command: list[str]) -> tuple[int, str]:
    """Exit status of a command and what it prints. The output is passed on at once, because the
    record of a command that hangs has nothing but the end of it.
    """
    said = b""
    with subprocess.Popen(
        command, cwd=environment.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            os.write(sys.stdout.fileno(), piece)
            said += piece
    return process.returncode, said.decode(errors="replace")


def count_waits(call: str, setup: Setup) -> Iterator[Row]:
    """Counts how long each warp waits at each barrier of a call (bench/waits.py)."""
    command = [sys.executable, "-m", "bench.waits", "--implementation", setup.implementation]
    status, told = _run_aloud([*command, "--dtype", "bfloat16", *call.split()])
    if status != 0:
        raise WrongError(f"exit status {status}: {told[-MESSAGE_LENGTH:]}")
    for line in told.splitlines():
        yield record.make_row(WAITS, call, "note", line)


def find(jobs: list[Job], part: str, name: str) -> Job:
    """The job with this part and name."""
    return next(job for job in jobs if (job.part, job.name) == (part, name))
