"""archflash.implementations() states what was built."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import archflash
from archflash import _archflash as native
from archflash import _registry

KERNELS = _registry.kernel_names()


def facts(name: str) -> archflash.Implementation:
    (found,) = [row for row in archflash.implementations() if row.name == name]
    return found


def loads_on(target: str) -> tuple[str, str | None]:
    """First and last capability for code of that name, by CUDA's compatibility rules."""
    kind, _, number = target.partition("_")
    digits = number.rstrip("af")
    major, minor = int(digits[:-1]), digits[-1]
    if kind == "compute" and digits == number:
        return f"{major}.{minor}", None
    if number.endswith("a"):
        return f"{major}.{minor}", f"{major}.{minor}"
    return f"{major}.{minor}", f"{major}.9"


def test_implementations_are_listed_best_first_and_torch_last() -> None:
    listed = [row.name for row in archflash.implementations()]
    assert listed == ["blackwell_dc", "blackwell_consumer", "ada", "ampere", "simt", "torch"]
    assert listed == list(_registry.names())
    assert set(KERNELS) == set(native.folder_names())


@pytest.mark.parametrize("name", KERNELS)
def test_capability_ranges_follow_from_what_was_built(name: str) -> None:
    row = facts(name)
    assert row.compiled == tuple(target.name for target in native.targets(name))
    assert row.capabilities == tuple((*loads_on(code), code) for code in row.compiled)


def test_simt_is_built_for_the_targets_of_the_design() -> None:
    assert facts("simt").compiled == ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_75")


def test_ampere_is_built_for_the_targets_of_the_design() -> None:
    row = facts("ampere")
    assert row.compiled == ("sm_80", "sm_90", "sm_100", "sm_120", "compute_80")
    assert row.capabilities == (
        ("8.0", "8.9", "sm_80"),
        ("9.0", "9.9", "sm_90"),
        ("10.0", "10.9", "sm_100"),
        ("12.0", "12.9", "sm_120"),
        ("8.0", None, "compute_80"),
    )
    assert row.dtypes == ("float16", "bfloat16")


def test_ada_is_built_for_the_targets_of_the_design() -> None:
    row = facts("ada")
    assert row.compiled == ("sm_89", "sm_90", "sm_100", "sm_120", "compute_89")
    assert row.capabilities == (
        ("8.9", "8.9", "sm_89"),
        ("9.0", "9.9", "sm_90"),
        ("10.0", "10.9", "sm_100"),
        ("12.0", "12.9", "sm_120"),
        ("8.9", None, "compute_89"),
    )
    assert row.dtypes == ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def test_blackwell_consumer_is_built_for_the_targets_of_the_design() -> None:
    row = facts("blackwell_consumer")
    assert row.compiled == ("sm_120f", "sm_90a", "compute_120f")
    assert row.capabilities == (
        ("12.0", "12.9", "sm_120f"),
        ("9.0", "9.0", "sm_90a"),
        ("12.0", "12.9", "compute_120f"),
    )
    assert row.dtypes == ("float16", "bfloat16", "float8_e4m3fn")


def test_blackwell_dc_is_built_for_the_targets_of_the_design() -> None:
    row = facts("blackwell_dc")
    assert row.compiled == ("sm_100f", "compute_100f")
    assert row.capabilities == (("10.0", "10.9", "sm_100f"), ("10.0", "10.9", "compute_100f"))
    assert row.dtypes == ("float16", "bfloat16", "float8_e4m3fn")


def test_only_simt_leaves_the_tensor_cores_unused() -> None:
    assert set(KERNELS) & _registry.WITHOUT_TENSOR_CORES == {"simt"}


@pytest.mark.parametrize("name", KERNELS)
def test_only_ptx_is_open_towards_newer_gpus(name: str) -> None:
    open_ended = [code for _, last, code in facts(name).capabilities if last is None]
    assert all(code.startswith("compute_") for code in open_ended)
    if name in ("blackwell_consumer", "blackwell_dc"):  # the PTX of a family stays in it
        assert open_ended == []
        return
    lowest = min(target.first for target in native.targets(name))
    assert [int(code.removeprefix("compute_")) for code in open_ended] == [lowest]


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_folder_says_of_itself_is_what_is_shown(name: str) -> None:
    row, said = facts(name), native.describe(name)
    assert said.name == name
    assert row.description == said.summary
    assert row.dtypes == tuple(said.dtypes)
    assert row.head_dims == said.head_dims
    assert row.features == tuple(said.features)
    assert native.find_known_device(said.home_device) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_exactly_the_dtypes_that_it_states(name: str, dtype: torch.dtype) -> None:
    home = native.describe(name).home_device
    q = torch.empty(1, 2, 16, 64, dtype=dtype, device="meta")
    given = str(dtype).removeprefix("torch.")
    if given in facts(name).dtypes:
        chosen = archflash.explain(q, q, q, device=home, implementation=name).chosen
        assert chosen == name
    else:
        with pytest.raises(archflash.ForcedImplementationError, match=f"dtype {given}"):
            archflash.explain(q, q, q, device=home, implementation=name)


def test_the_row_of_torch_says_where_it_runs() -> None:
    row = facts("torch")
    assert row.compiled[0].startswith(f"torch {torch.__version__} on ")
    assert "nothing in this build" not in str(row)
    assert "any" in str(row).splitlines()[1]


def test_a_row_prints_every_fact() -> None:
    text = str(facts("simt"))
    assert text.splitlines()[0] == f"simt: {facts('simt').description}"
    assert "8.0 to 8.9 (sm_80)" in text
    assert "7.5 and newer (compute_75)" in text
    assert "float32, float16, bfloat16" in text
    assert "multiples of 8 up to 256" in text
    assert "compiled  sm_75, sm_80, sm_90, sm_100, sm_120, compute_75" in text


def test_a_row_of_a_folder_that_was_left_out_says_so() -> None:
    left_out = dataclasses.replace(facts("simt"), capabilities=(), compiled=())
    last = str(left_out).splitlines()[-1]
    assert last.startswith("  compiled  no: ")
    assert "ARCHFLASH_ARCHS" in last
