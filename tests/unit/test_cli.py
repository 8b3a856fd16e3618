"""The command line: what it prints, what it refuses, and its exit status."""

from __future__ import annotations

import json
import os
import re
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


@no_driver
def test_info_says_why_there_is_no_device(run: Run) -> None:
    lines = run().out.splitlines()
    assert lines[lines.index("devices") + 1] == f"  none: {native.driver_status().problem}"


def test_every_environment_variable_of_the_sources_is_documented(run: Run) -> None:
    package = Path(archflash.__file__).parent
    read = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"\"(ARCHFLASH_[A-Z_]+)\"", file.read_text())
    }
    text = run().out
    assert {"ARCHFLASH_FALLBACK", "ARCHFLASH_FORCE_IMPLEMENTATION"} <= read
    assert [name for name in sorted(read) if f"  {name}=" not in text] == []


# --- explain ---


@pytest.mark.parametrize("device", KNOWN)
def test_explain_prints_the_decision_for_a_known_device(run: Run, device: str) -> None:
    result = run("explain", "--device", device, "--shape", "4,16,512,64", "--dtype", "float32")
    q = torch.empty(4, 16, 512, 64, device="meta")
    assert (result.status, result.err) == (0, "")
    assert result.out == f"{archflash.explain(q, q, q, device=device)}\n"
    assert f" on {device} (compute capability " in result.out
    assert "  chosen  simt: " in result.out


def test_explain_takes_every_option_of_a_call(run: Run) -> None:
    result = run(
        *("explain", "--device", "h200", "--shape", "2x32x1x128", "--dtype", "bfloat16"),
        *("--heads-kv", "8", "--keys", "4096", "--dv", "64", "--causal", "--window", "128,"),
        *("--softcap", "30", "--sinks", "--lse", "--implementation", "simt"),
    )
    assert result.status == 0, result.err
    assert result.out.splitlines()[0] == (
        "bfloat16, batch 2, heads 32 over 8, 1 queries, 4096 keys, head dim 128 and 64, "
        "causal, window, softcap, sinks, LSE on H200 (compute capability 9.0, 132 SMs)"
    )
    assert "chosen  simt: it is forced" in result.out


def test_explain_takes_rows_before_heads_in_either_layout(run: Run) -> None:
    """--shape is B,H,N,D whatever the layout: only the strides differ."""
    arguments = ("explain", "--device", "L4", "--shape", "2,4,100,64", "--dtype", "float32")
    assert run(*arguments, "--layout", "bnhd").out == run(*arguments).out


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


def test_there_is_no_plan_to_write_when_torch_serves(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run(
        *("explain", "--device", "H200", "--shape", "1,2,300,64", "--plan", str(file)),
        *("--implementation", "torch"),
    )
    assert result.status == 1
    assert result.err == "archflash: --plan: torch serves this call, and only kernels have plans\n"
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--shape", "4,16,512"), "--shape '4,16,512': it must be four integers B,H,N,D"),
        (("--shape", "a,b,c,d"), "--shape 'a,b,c,d': it must be four integers"),
        (("--shape", "1,2,-3,64"), "--shape '1,2,-3,64': "),
        (("--window", "128"), "--window '128': it must be LEFT,RIGHT"),
        (
            ("--window=-1,0",),
            "--window '-1,0': it must be LEFT,RIGHT, either side an integer >= 0",
        ),
        (("--window", "1,2,3"), "--window '1,2,3'"),
        (("--device", "RTX 9090"), "no GPU called 'RTX 9090' in the table of known ones: T4, A100"),
        (("--heads-kv", "3"), "q has 4 heads and k has 3"),
        (("--softcap", "-1"), "softcap is -1"),
        (("--implementation", "volta"), "no implementation is called 'volta'"),
        (("--shape", "1,4,8,44", "--implementation", "simt"), "head_dim 44: simt takes multiples"),
        (("--plan", "/no/such/folder/plan.json"), "/no/such/folder/plan.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_explain_says_what_is_wrong_and_exits_1(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    good = ("explain", "--shape", "1,4,8,64", "--device", "A100", "--dtype", "float32")
    result = run(*good, *arguments)  # of a repeated option the last counts
    assert result.status == 1
    assert result.err.startswith("archflash: ")
    assert said in result.err
    assert "Traceback" not in result.err
    assert run(*good).status == 0


@no_driver
def test_explain_without_device_and_gpu_names_the_option(run: Run) -> None:
    result = run("explain", "--shape", "1,4,8,64")
    assert result.status == 1
    assert "there is no GPU to explain for" in result.err
    assert "name one with --device, such as 'RTX 5090'" in result.err


@pytest.mark.parametrize(
    "arguments",
    [("explain",), ("fly",), ("explain", "--shape", "1,1,1,8", "--dtype", "int8"), ("replay",)],
    ids=" ".join,
)
def test_arguments_that_do_not_parse_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    assert "usage: archflash" in capsys.readouterr().err


# --- replay ---


@no_driver
def test_replay_without_a_gpu_says_so_and_exits_1(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shape = ("--shape", "1,2,64,64", "--dtype", "float32")
    assert run("explain", "--device", "H200", *shape, "--plan", str(file)).status == 0
    result = run("replay", str(file))
    assert (result.status, result.out) == (1, "")
    assert result.err == f"archflash: replay needs a GPU: {native.driver_status().problem}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a plan of this version of archflash"),
        ("[]", "is not a plan of this version of archflash"),
        ("{}", "field 'implementation' is missing"),
    ],
)
def test_replay_of_what_is_no_plan_says_so(
    run: Run, tmp_path: Path, content: str, said: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    result = run("replay", str(file))
    assert result.status == 1
    assert str(file) in result.err
    assert said in result.err


def test_replay_of_a_missing_file_names_it(run: Run) -> None:
    result = run("replay", "/no/such/plan.json")
    assert result.status == 1
    assert "/no/such/plan.json" in result.err


def test_the_inputs_of_a_replay_make_exactly_the_plans_problem() -> None:
    """On the CPU: strides, options and packed sequences all come from the plan."""
    from archflash._api import make_problem
    from archflash.cli.replay import make_inputs

    cpu = torch.device("cpu")
    ends = torch.empty(4, dtype=torch.int32, device="meta")

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv = meta(2, 30, 3, 4, 64)
    packed = meta(50, 3, 4, 64, dtype=torch.bfloat16)
    for tensors, options in (
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
        # The output is a new tensor, so it need not be laid out as in the plan; all else must be.
        assert given.to_dict() | {"out": None} == wanted.to_dict() | {"out": None}


# --- as a program ---


def test_python_dash_m_archflash_runs() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "archflash", "explain", "--device", "B200", "--shape", "1,2,3,8"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "float16, batch 1, heads 2, 3 queries, 3 keys, head dim 8 on B200"
    )
