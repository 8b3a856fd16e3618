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


def dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


# The rules of CUDA's programming guide: the first capability and the last, None: any newer one.
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("sm_75", (7, 5), (7, 9)),
        ("sm_80", (8, 0), (8, 9)),
        ("sm_89", (8, 9), (8, 9)),
        ("sm_90", (9, 0), (9, 9)),
        ("sm_90a", (9, 0), (9, 0)),
        ("sm_100f", (10, 0), (10, 9)),
        ("sm_103f", (10, 3), (10, 9)),
        ("sm_103a", (10, 3), (10, 3)),
        ("sm_120f", (12, 0), (12, 9)),
        ("compute_75", (7, 5), None),
        ("compute_100", (10, 0), None),
        ("compute_100f", (10, 0), (10, 9)),
        ("compute_90a", (9, 0), (9, 0)),
    ],
)
def test_code_loads_on_the_capabilities_that_cuda_says(
    name: str, first: tuple[int, int], last: tuple[int, int] | None
) -> None:
    target = native.target(name)
    assert (target.name, target.first, target.last) == (name, first, last)
    for major, minor in [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0),
                         (12, 0), (12, 1), (13, 0)]:  # fmt: skip
        loads = first <= (major, minor) and (last is None or (major, minor) <= last)
        assert target.loads_on((major, minor)) == loads


@pytest.mark.parametrize("name", ["", "sm_", "sm_9", "sm_90x", "sm_90af", "ptx_90", "90", "sm90"])
def test_what_is_no_target_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no target"):
        native.target(name)


@pytest.mark.parametrize(
    ("capability", "picked"),
    [
        ((7, 5), None),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((9, 1), "sm_90"),
        ((10, 0), "compute_90"),
        ((12, 1), "compute_120f"),
        ((13, 0), "compute_90"),
    ],
)
def test_machine_code_is_picked_before_ptx_and_the_newest_of_either(
    capability: tuple[int, int], picked: str | None
) -> None:
    names = ["compute_80", "sm_80", "sm_90", "sm_90a", "sm_89", "compute_90", "compute_120f"]
    for order in (names, names[::-1]):
        assert native.pick_target(order, capability) == picked


def test_implementations_are_listed_best_first_and_torch_last() -> None:
    listed = [row.name for row in archflash.implementations()]
    assert listed == [
        *("blackwell_dc", "hopper", "blackwell_consumer", "ada", "ampere", "simt", "torch")
    ]
    assert listed == list(_registry.names())
    assert set(KERNELS) == set(native.folder_names())


@pytest.mark.parametrize("name", KERNELS)
def test_capability_ranges_follow_from_what_was_built(name: str) -> None:
    row = facts(name)
    assert row.compiled == tuple(target.name for target in native.targets(name))
    ranges = [(target.first, target.last) for target in map(native.target, row.compiled)]
    assert row.capabilities == tuple(
        (dotted(first), last and dotted(last), code)
        for (first, last), code in zip(ranges, row.compiled, strict=True)
    )


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
    assert row.compiled == ("sm_120f", "sm_90a")
    assert row.capabilities == (("12.0", "12.9", "sm_120f"), ("9.0", "9.0", "sm_90a"))
    assert row.dtypes == ("float16", "bfloat16", "float8_e4m3fn")


def test_blackwell_dc_is_built_for_the_targets_of_the_design() -> None:
    row = facts("blackwell_dc")
    assert row.compiled == ("sm_100f", "sm_110f")
    assert row.capabilities == (("10.0", "10.9", "sm_100f"), ("11.0", "11.9", "sm_110f"))
    assert row.dtypes == ("float16", "bfloat16", "float8_e4m3fn")


def test_hopper_is_built_for_the_target_of_the_design() -> None:
    row = facts("hopper")
    assert row.compiled == ("sm_90a",)
    assert row.capabilities == (("9.0", "9.0", "sm_90a"),)
    assert row.dtypes == ("float16", "bfloat16", "float8_e4m3fn")


def test_only_simt_leaves_the_tensor_cores_unused() -> None:
    assert [name for name in KERNELS if not _registry.uses_tensor_cores(name)] == ["simt"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_folder_is_compiled_for_nothing_older_than_its_instructions(name: str) -> None:
    needs = native.describe(name).needs_capability
    lowest = min(target.first for target in native.targets(name))
    assert lowest == needs


def test_tiles_of_ada_for_16_bits_are_made_for_8_9_alone() -> None:
    homes = {name: native.describe(name).sixteen_bits_made_for for name in KERNELS}
    assert homes == dict.fromkeys(KERNELS) | {"ada": (8, 9)}
    assert _registry.made_for("ada", "float16", (8, 9))
    assert not _registry.made_for("ada", "bfloat16", (12, 0))
    assert _registry.made_for("ada", "float8_e4m3fn", (12, 0))


def test_blackwell_consumer_and_hopper_serve_9_0_where_forced_or_measured() -> None:
    majors = {name: native.describe(name).only_forced_on_majors for name in KERNELS}
    forced = ("blackwell_consumer", "hopper")
    assert majors == {name: [9] if name in forced else [] for name in KERNELS}
    assert _registry.only_forced("blackwell_consumer", (9, 0))
    assert not _registry.only_forced("blackwell_consumer", (12, 0))


@pytest.mark.parametrize("name", KERNELS)
def test_only_ptx_is_open_towards_newer_gpus(name: str) -> None:
    open_ended = [code for _, last, code in facts(name).capabilities if last is None]
    assert all(code.startswith("compute_") for code in open_ended)
    # The PTX of a family, or of one architecture, would serve no GPU but those of its machine code.
    if name in ("blackwell_consumer", "blackwell_dc", "hopper"):
        assert open_ended == []
        return
    lowest = min(target.first for target in native.targets(name))
    assert [native.target(code).first for code in open_ended] == [lowest]


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
    assert "multiples of 8 up to 256 (float32: 512)" in text
    assert "compiled  sm_75, sm_80, sm_90, sm_100, sm_120, compute_75" in text


def test_a_row_of_a_folder_that_was_left_out_says_so() -> None:
    left_out = dataclasses.replace(facts("simt"), capabilities=(), compiled=())
    last = str(left_out).splitlines()[-1]
    assert last.startswith("  compiled  no: ")
    assert "ARCHFLASH_ARCHS" in last


def test_an_added_image_is_found_by_name_and_replaces_none() -> None:
    assert native.code_of("test/added", "") == b""
    native.add_image("test/added", b"\0code")
    native.add_image("test/added", b"\0code")
    assert native.code_of("test/added", "") == b"\0code"
    built = native.image_names()[0]
    for name in ("test/added", built):
        with pytest.raises(ValueError, match=f"another image with the name '{name}'"):
            native.add_image(name, b"other")
    for name in ("", "stem", "/stem", "folder/"):
        with pytest.raises(ValueError, match=f"'{name}': it must be '<folder>/<stem>'"):
            native.add_image(name, b"other")
    with pytest.raises(ValueError, match="the image 'test/empty' is empty"):
        native.add_image("test/empty", b"")
    assert native.code_of(built, "") == b""
    assert "test/added" not in native.image_names()
