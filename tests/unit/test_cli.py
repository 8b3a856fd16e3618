"""The command line: what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash.__main__ import main
from archflash._api import make_problem
from archflash.cli import info
from archflash.cli.replay import bytes_needed

KNOWN = [row.device.name for row in native.known_devices()]
no_driver = pytest.mark.skipif(native.driver_status().usable, reason="a GPU is here")


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Result:
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return Result(status, out, err)

    return call


# --- info ---


def test_without_a_command_the_installation_is_described(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHFLASH_FALLBACK", "error")
    monkeypatch.delenv("ARCHFLASH_FORCE_IMPLEMENTATION", raising=False)
    result = run()
    assert (result.status, result.err) == (0, "")
    first, *rest = result.out.splitlines()
    assert first == f"archflash {archflash.__version__}, torch {torch.__version__}"
    text = "\n".join(rest)
    for implementation in archflash.implementations():
        for line in str(implementation).splitlines():
            assert f"  {line}" in rest
    assert re.search(r"ARCHFLASH_FALLBACK=.*; now 'error'$", text, flags=re.MULTILINE)
    assert re.search(r"ARCHFLASH_FORCE_IMPLEMENTATION=.*; now unset$", text, flags=re.MULTILINE)
    assert f"  {', '.join(KNOWN)}" in rest
    assert run("info").out == result.out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"archflash {archflash.__version__}\n"


def test_every_environment_variable_of_the_sources_is_documented(run: Run) -> None:
    package = Path(archflash.__file__).parent
    read = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"\"(ARCHFLASH_[A-Z_]+)\"", file.read_text())
    }
    read -= {"ARCHFLASH_MLA", "ARCHFLASH_MLA_SPARSE"}  # names of backends in vLLM
    text = run().out
    assert {"ARCHFLASH_FALLBACK", "ARCHFLASH_FORCE_IMPLEMENTATION"} <= read
    assert [name for name in sorted(read) if f"  {name}=" not in text] == []


# --- explain ---


def test_explain_prints_the_decision_for_every_known_device(run: Run) -> None:
    q = torch.empty(4, 16, 512, 64, device="meta")
    for device in KNOWN:
        result = run("explain", "--device", device, "--shape", "4,16,512,64", "--dtype", "float32")
        assert (result.status, result.err) == (0, "")
        assert result.out == f"{archflash.explain(q, q, q, device=device)}\n"
        assert f" on {device} (compute capability " in result.out


def test_explain_takes_every_option_of_a_call(run: Run) -> None:
    result = run(
        *("explain", "--device", "h200", "--shape", "2x32x1x128", "--dtype", "bf16"),
        *("--heads-kv", "8", "--keys", "4096", "--dv", "64", "--causal", "--window", "128,"),
        *("--softcap", "30", "--sinks", "--lse", "--implementation", "simt"),
    )
    assert result.status == 0, result.err
    assert result.out.splitlines()[0] == (
        "bfloat16, batch 2, heads 32 over 8, 1 queries, 4096 keys, head dim 128 and 64, "
        "causal, window, softcap, sinks, LSE on H200 (compute capability 9.0, 132 SMs)"
    )
    assert "chosen  simt: it is forced" in result.out


def test_explain_writes_the_plan_as_json_that_loads(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run(
        *("explain", "--device", "RTX 5090", "--shape", "1,2,300,64", "--dtype", "float32"),
        *("--layout", "bnhd", "--plan", str(file)),
    )
    assert result.status == 0, result.err
    assert f"plan written to {file}" in result.out
    fields = json.loads(file.read_text())
    plan = native.LaunchPlan.from_dict(fields)
    q = torch.empty(1, 300, 2, 64, device="meta")
    expected = archflash.explain(q, q, q, device="RTX 5090", layout="bnhd").plan
    assert expected is not None
    assert plan.to_dict() == expected.to_dict() == fields


def test_explain_says_who_computes_gradients(run: Run, tmp_path: Path) -> None:
    call = ("explain", "--device", "H200", "--shape", "2,4,512,64", "--backward")
    q = torch.empty(2, 4, 512, 64, dtype=torch.float16, device="meta")
    assert run(*call).out == f"{archflash.explain(q, q, q, device='H200', backward=True)}\n"
    refused = run(*call, "--plan", str(tmp_path / "plan.json"))
    assert refused.status == 2
    assert "--backward" in refused.err


@no_driver
def test_explain_without_device_and_gpu_names_the_option(run: Run) -> None:
    result = run("explain", "--shape", "1,4,8,64")
    assert result.status == 2
    assert "there is no GPU to explain for" in result.err
    assert "name one with --device, such as 'RTX 5090'" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain",), ("fly",), ("explain", "--shape", "1,1,1,8", "--dtype", "int8"), ("replay",),
        ("explain", "--shape", "1,1,1,8", "--no-such"), ("sim", "run", "--no-such", "1"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_arguments_that_do_not_parse_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("archflash")
    assert error.count("\n") == 1
    assert error.endswith("--help)\n")
    if "--no-such" in arguments:
        command = " ".join(itertools.takewhile(lambda x: not x.startswith("--"), arguments))
        assert f"(see archflash {command} --help)" in error


# --- replay ---


@no_driver
def test_replay_needs_a_gpu_and_shows_how_a_plan_was_changed(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shape = ("--shape", "1,2,64,64", "--dtype", "float32")
    assert run("explain", "--device", "H200", *shape, "--plan", str(file)).status == 0
    result = run("replay", str(file))
    assert (result.status, result.out) == (1, "")
    assert result.err == f"archflash: replay needs a GPU: {native.driver_status().problem}\n"
    fields = json.loads(file.read_text())
    fields["launches"][0]["params"] = "ef" * 8 + fields["launches"][0]["params"][16:]
    fields["launches"][0]["grid"] = [7, 1, 1]
    file.write_text(json.dumps(fields))
    result = run("replay", str(file))
    assert result.status == 2
    assert "'launches[0].grid' is [7, 1, 1]; planned: [" in result.err
    assert "'launches[0].params' is from character 0 on 'efefefefefefefef" in result.err
    assert result.err.count("\n") == 1


def test_the_inputs_of_a_replay_make_exactly_the_plans_problem() -> None:
    """On the CPU: strides, options and packed sequences all come from the plan."""
    from archflash.cli.replay import make_inputs

    cpu = torch.device("cpu")
    ends = torch.empty(4, dtype=torch.int32, device="meta")

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv = meta(2, 30, 3, 4, 64)
    packed = meta(50, 3, 4, 64, dtype=torch.bfloat16)
    e4m3, e8m0 = torch.float8_e4m3fn, getattr(torch, "float8_e8m0fnu", torch.float32)
    block_scales = {"q_descale": meta(2, 4, 9, 2, dtype=e8m0)}  # those of k in a wider tensor
    block_scales["k_descale"] = meta(2, 2, 70, 5, dtype=e8m0)[..., 1:3]
    block_scales["v_descale"] = meta(2, 2, 3, 48, dtype=e8m0)
    of_mxfp8 = [meta(2, h, n, d, dtype=e4m3) for h, n, d in ((4, 9, 64), (2, 70, 64), (2, 70, 48))]
    for tensors, options in (
        *([(of_mxfp8, block_scales)] if e8m0 != torch.float32 else []),
        ([qkv[:, :, i].transpose(1, 2) for i in range(3)], {"causal": True, "softcap": 5.0}),
        (
            [meta(2, 4, 9, 32), meta(2, 2, 70, 32), meta(2, 2, 70, 8)],
            {"window": (3, 4), "q_offset": 11, "sinks": meta(4), "return_lse": True},
        ),
        ([meta(2, 4, 9, 32, dtype=torch.float16)] * 3, {"approximate": "int8_qk"}),
        ([meta(2, 4, 9, 32, dtype=torch.float16)] * 3, {"num_splits": 3}),
        (
            [meta(2, h, n, 32, dtype=torch.float8_e4m3fn) for h, n in ((4, 9), (2, 70), (2, 70))],
            {"k_descale": meta(2, 2, 2), "q_descale": meta(4), "out_dtype": torch.float16},
        ),
        (
            [packed[:, i] for i in range(3)],
            {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 20},
        ),
    ):
        wanted = make_problem(*tensors, **options)
        inputs = make_inputs(wanted.to_dict(), cpu)
        given = make_problem(inputs.q, inputs.k, inputs.v, **inputs.options)
        assert set(inputs.options) <= set(inspect.signature(archflash.attention).parameters)
        # The output is a new tensor, so it need not be laid out as in the plan; all else must be.
        assert given.to_dict() | {"out": None} == wanted.to_dict() | {"out": None}


@no_driver
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x93\xff\x00", "'utf-8' codec can't decode"),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        (b'{"version": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b" " * (1 << 21), "it has more than 1048576 bytes"),
        (b'{"version": NaN}', "field 'version' is nan: it must be a text"),
        (b"null", "None is no object with named fields"),
        (b"{", "is not a plan of this version of archflash"),
        (b"{}", "field 'version' is missing"),
    ],
    ids=["binary", "deep", "digits", "long", "nan", "null", "open", "empty"],
)
def test_replay_of_an_odd_file_is_one_line(
    run: Run, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    result = run("replay", str(file))
    assert (result.status, result.out) == (2, "")
    assert said in result.err
    assert result.err.count("\n") == 1


def test_the_bytes_of_a_replay_are_counted_before_its_tensors_are_made() -> None:
    def needed(*shape: int) -> int:
        q = torch.empty(shape, dtype=torch.float16, device="meta")
        return bytes_needed(make_problem(q, q, q).to_dict())

    assert 4 * 8 * 6 * 8 * 100 * 64 <= needed(6, 8, 100, 64) < 2 * 4 * 8 * 6 * 8 * 100 * 64
    assert needed(1 << 20, 1 << 10, 1 << 10, 8) > 1 << 43
    assert needed(0, 4, 8, 16) == 0
    wide = torch.empty(1, device="meta").expand(2, 3, 1 << 30, 8)
    assert bytes_needed(make_problem(wide, wide, wide).to_dict()) > 1 << 35
    far = torch.empty_strided((1, 1, 2, 8), (0, 0, 1 << 50, 1), device="meta")
    assert bytes_needed(make_problem(far, far, far).to_dict()) > 1 << 50


# --- user errors ---

EXPLAIN = ("explain", "--device", "A100")
SIM = ("sim", "run", "--implementation", "simt", "--dtype", "float32")
TRACE = ("sim", "trace", "--implementation", "simt", "--dtype", "float32")
BEYOND = str(1 << 62)

# Found by running random arguments; what the one line says.
USER_ERRORS: list[tuple[tuple[str, ...], str]] = [
    ((*EXPLAIN, "--shape", f"{BEYOND},1,1,64"), "q would have more than 2^59 elements"),
    ((*EXPLAIN, "--shape", "1,1,1,64", "--keys", BEYOND), "k and v would have more than 2^59"),
    ((*EXPLAIN, "--shape", "1,1,1,0"), "the head dim is 0 for q and k and 0 for v"),
    ((*EXPLAIN, "--shape", "1,4,1,64", "--heads-kv", "0"), "q has 4 heads and k has 0"),
    ((*EXPLAIN, "--shape", "9" * 5000 + ",1,1,1"), "it must be four integers B,H,N,D"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--window=-1,0"), "either side an integer >= 0"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--implementation", "volta"), "is called 'volta'"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--implementation", "torch", "--plan", "x"), "--plan: torch"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--window", "\u00b2,"), "it must be LEFT,RIGHT"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--window", "9" * 5000 + ","), "at most 2^59"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--softcap", "nan"), "softcap is nan: it must be finite"),
    ((*EXPLAIN, "--shape", "1,1,1,999", "--implementation", "simt"), "head_dim 1000 (999 and"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--device", "cuda:" + "9" * 20), "no GPU called 'cuda:9999"),
    ((*EXPLAIN, "--shape", "1,1,1,8", "--dtype", "float32", "--plan", "/"), "Is a directory"),
    ((*SIM, "--shape", "1,1,99999999,64"), "the simulator's commands take at most 2^29"),
    ((*SIM, "--shape", "1,1,1,8", "--seed", "-1"), "--seed -1: it must be an integer from 0"),
    (
        (*SIM, "--shape", "1,1,1,8", "--implementation", "torch"),
        "kernels are not simulated; choose",
    ),
    ((*TRACE, "--shape", "1,1,1,8", "x.json", "--ctas", "9" * 30), "indices of CTAs"),
    ((*TRACE, "--shape", "1,1,1,8", "x.json", "--stretch", BEYOND), f"--stretch {BEYOND}: it must"),
    ((*TRACE, "--shape", "1,1,1,8", "x.json", "--part", "a,"), "it must be BEGIN,END"),
    ((*TRACE, "--shape", "1,1,0,8", "x.json"), "no kernel runs: give sizes of at least 1"),
    ((*TRACE, "--shape", "1,1,1,8", ""), "its name must end in .json, .svg, .png"),
    (("replay", "/no/such/plan.json"), "/no/such/plan.json"),
    (("replay", "/dev/zero"), "it has more than 1048576 bytes"),
    *(
        ((name, "--any"), f"`archflash {name}` is in archflash's source tree and not in the wheel")
        for name in ("demo", "show", "ladder")
    ),
]


@pytest.mark.parametrize(
    ("arguments", "said"), USER_ERRORS, ids=[str(i) for i in range(len(USER_ERRORS))]
)
def test_a_user_error_is_one_line_and_exits_2(
    run: Run, arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.status == 2
    assert result.err.startswith("archflash: ")
    assert said in result.err
    assert result.err.count("\n") == 1
    assert len(result.err) < 2000
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line_and_exits_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr(info, "run", interrupted)
    # A shell that starts a job in the background makes it ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = run("info")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.status, result.out, result.err) == (130, "", "archflash: interrupted\n")


@pytest.mark.slow
def test_the_program_explains_and_a_reader_that_has_gone_is_no_traceback() -> None:
    # Two processes that have imported torch.
    code = """
import os, runpy, sys, torch
sys.argv = ["archflash", "explain", "--device", "B200", "--shape", "1,2,3,8"]
for gone in (False, True):
    reads, writes = os.pipe()
    if gone:
        os.close(reads)
    if os.fork() == 0:
        os.dup2(writes, 1)
        runpy.run_module("archflash", run_name="__main__", alter_sys=True)
    os.close(writes)
    said = "" if gone else os.fdopen(reads).readline()
    print(os.waitstatus_to_exitcode(os.wait()[1]), said, end="" if said else "\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    served, gone = done.stdout.splitlines()
    assert served.startswith("0 float16, batch 1, heads 2, 3 queries")
    assert gone.split() == ["141"]


def test_a_closed_standard_output_is_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert (result := run("info")).status == 0, result.err


def test_a_kernel_that_fails_exits_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> int:
        raise archflash.LaunchError("launching x:\n  refused")

    monkeypatch.setattr(info, "run", fail)
    result = run("info")
    assert (result.status, result.err) == (1, "archflash: launching x: refused\n")


def test_sim_run_judges_fp8_by_the_rule_of_fp8(run: Run) -> None:
    """On these data the rule of the other dtypes calls a right output wrong."""
    shape = ("--shape", "1,8,8,16", "--heads-kv", "1", "--causal", "--window", "3,50")
    options = ("--softcap", "30", "--sinks", "--implementation", "blackwell_consumer")
    result = run("sim", "run", "--dtype", "float8_e4m3fn", *shape, *options)
    assert (result.status, result.err) == (0, "")


@pytest.mark.parametrize("implementation", ["ada", "hopper"])
def test_sim_run_knows_where_fp8_scores_lose_bits(run: Run, implementation: str) -> None:
    call = ("--shape", "1,1,64,128", "--dtype", "float8_e4m3fn", "--lse")
    result = run("sim", "run", *call, "--implementation", implementation)
    assert "log-sum-exp: ok: " in result.out
    assert (result.status, result.err) == (0, "")
