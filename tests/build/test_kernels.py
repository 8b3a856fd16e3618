"""The machine code that was built: its targets, its PTX, its registers, and that plans find it."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import struct
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from archflash import _archflash as native
from archflash import _registry
from archflash._api import find_device, make_problem
from tests.kernel_files import KERNELS, groups_of, own_groups_of, ptx_texts, sources_of
from tests.many_cases import one_test_for_each

from . import every_plan
from .conftest import LEFT_OUT, built_of
from .machine_code import (
    OPCODE,
    assembler_of,
    has_lane_loop,
    instructions_of,
    kept,
    lane_loops,
    opcodes_of,
    version_of,
)

IMAGES = native.image_names()
SOURCES = Path(__file__).parents[2] / "src"
FOLDERS = [name for name in native.folder_names() if native.targets(name)]  # of attention
# What quantize_fp8, merge_attention and copies of odd tensors launch lies in folders of their own.
FOLDERS_OF_KERNELS = [
    kernels.parent.name
    for kernels in sorted(SOURCES.glob("*/kernels"))
    if native.targets(kernels.parent.name)
]
RESOURCES = {
    f"{file.parent.name}/{file.stem}": json.loads(file.read_text())
    for file in sorted(KERNELS.glob("*/*.json"))
}
# simt's kernels on tensor cores are for 9.0 alone, where they were measured.
ON_9_0 = ("simt/tensor_f32", "simt/tensor_bwd_f32")
PROBES = "probes"  # programs of one instruction, which are for the GPUs that have it
FILES = sources_of()
ANY_NEWER = [x for x in IMAGES if any("ptx" in targets for targets in groups_of(FILES[x]).values())]
NAMES = (*FOLDERS_OF_KERNELS, *IMAGES)
ALL_TARGETS = sorted({target.name for name in NAMES for target in native.targets(name)})
REGISTERS_PER_SM = 65536  # 7.5 to 12.1
REGISTERS_PER_THREAD = 255

# The scope makes pytest run all tests of an image one after another: what they unpack is kept.
every_image = pytest.mark.parametrize("image", IMAGES, scope="module")


def targets_of(image: str, prefix: str) -> list[str]:
    """ "sm_": what there is machine code for; "compute_": the text that newer GPUs may compile."""
    built = [(text, of) for text, targets in groups_of(FILES[image]).items() for of in targets]
    names = [f"compute_{text}" if of == "ptx" else f"sm_{of}" for text, of in built]
    return sorted(name for name in names if name.startswith(prefix))


def lowest_ptx_of(image: str) -> str:
    """The PTX text of the oldest GPUs that the kernels are for."""
    targets = (target for name, target, _ in texts_of(image.partition("/")[0]) if name == image)
    return min(targets, key=lambda name: int(re.sub(r"\D", "", name)))


def ptx_text(image: str, target: str) -> str:
    texts = texts_of(image.partition("/")[0])
    (text,) = (text for name, of, text in texts if (name, of) == (image, target))
    return text


@functools.lru_cache(maxsize=1)  # all images of a folder are asked for one after another
def texts_of(folder: str) -> list[tuple[str, str, str]]:
    return list(ptx_texts(folder))


@functools.cache
def entries_of(folder: str) -> dict[tuple[str, str], set[str]]:
    return {(image, target): entries(text) for image, target, text in texts_of(folder)}


def entries(ptx: str) -> set[str]:
    return set(re.findall(r"\.entry\s+(\w+)", ptx))


# --- what was compiled ---


def test_every_kernel_file_became_an_image() -> None:
    expected = [image for image in FILES if image.partition("/")[0] in FOLDERS_OF_KERNELS]
    assert sorted(IMAGES) == sorted(expected)
    assert native.code_of("simt/no_such_file", "sm_80") == b""


@every_image
def test_an_image_holds_machine_code_for_exactly_the_registrys_targets(image: str) -> None:
    code = {name: native.code_of(image, name) for name in ALL_TARGETS if name.startswith("sm_")}
    built = [name for name in targets_of(image, "sm_") if name not in LEFT_OUT]
    assert [name for name in code if code[name]] == built
    for name in built:
        (flags,) = struct.unpack_from("<I", code[name], 0x30)  # of an ELF file
        assert flags >> 8 & 0xFF == int(re.sub(r"\D", "", name)), name


@every_image
def test_the_lowest_ptx_serves_newer_gpus_where_it_can(image: str) -> None:
    lowest = lowest_ptx_of(image)
    assert targets_of(image, "compute_") in ([], [lowest])
    assert native.code_of(image, lowest).decode() == ptx_text(image, lowest)


# One of each folder. The build has assembled every text for 10.x and 12.x, or for what is newest.
@pytest.mark.parametrize(
    "image", [min(of) for _, of in itertools.groupby(ANY_NEWER, lambda x: x.partition("/")[0])]
)
def test_the_lowest_ptx_assembles_for_a_gpu_that_no_machine_code_covers(
    image: str, ptxas: Path, tmp_path: Path
) -> None:
    source, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    text = ptx_text(image, lowest_ptx_of(image))
    source.write_text(text)
    # The assembler checks every instruction of a text, whichever kernel it is asked for: one
    # without optimisation takes a tenth of the time of all.
    options = ["-O0", "-arch=sm_110", f"--entry={min(entries(text), key=len)}"]
    command = [ptxas, *options, "-o", cubin, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert cubin.stat().st_size > 0


@pytest.mark.parametrize(
    ("folder", "ptx"),
    [
        ("simt", "compute_75"),
        ("ampere", "compute_80"),
        ("ada", "compute_89"),
        ("blackwell_consumer", "compute_90a"),
        ("blackwell_dc", "compute_100f"),
        ("hopper", "compute_90a"),
    ],
)
def test_the_lowest_ptx_of_a_folder_is_that_of_its_oldest_gpus(folder: str, ptx: str) -> None:
    images = [image for image, file in sources_of(folder).items() if own_groups_of(file) is None]
    assert images
    for image in images:
        assert lowest_ptx_of(image) == ptx
        text = ptx_text(image, ptx)
        assert re.search(rf"^\.target {ptx.replace('compute_', 'sm_')}$", text, re.MULTILINE)
        (built,) = {frozenset(kernels) for kernels in RESOURCES[image].values()}
        assert entries(text) == built


@every_image
def test_ptx_names_no_path_of_the_building_machine(image: str) -> None:
    text = ptx_text(image, lowest_ptx_of(image))
    files = re.findall(r'^\s*\.file\s+\d+\s+"([^"]*)"', text, flags=re.MULTILINE)
    assert files  # line information is there
    folders = [*FOLDERS_OF_KERNELS, "common", "cuda"]
    assert [name for name in files if name.partition("/")[0] not in folders] == []
    assert not re.search(r'"/|/home/|/tmp/|/root/', text)


@every_image
def test_every_target_has_the_same_entries_as_the_ptx(image: str) -> None:
    names = entries(ptx_text(image, lowest_ptx_of(image)))
    assert names
    assert sorted(RESOURCES[image]) == targets_of(image, "sm_")
    for target, kernels in RESOURCES[image].items():
        assert set(kernels) == names, target


# --- what the assembler reports ---


@one_test_for_each(
    {
        image: [
            (image, target, kernel)
            for target, kernels in of_target.items()
            if target not in LEFT_OUT
            for kernel in kernels
        ]
        for image, of_target in RESOURCES.items()
        if not LEFT_OUT.issuperset(of_target)
    }
)
def test_no_kernel_spills_registers(image: str, target: str, kernel: str) -> None:
    used = RESOURCES[image][target][kernel]
    assert (used["spill_store_bytes"], used["spill_load_bytes"]) == (0, 0)
    assert 0 < used["registers"] <= REGISTERS_PER_THREAD


@pytest.mark.parametrize("image", ["blackwell_dc/fwd_103_bf16", "blackwell_dc/fwd_103_e4m3"])
def test_sm_100f_ptx_does_not_spill_on_sm_103a(image: str, ptxas: Path, tmp_path: Path) -> None:
    """Of the kernel for the largest head dimension, whose threads hold most."""
    text = ptx_text(image, "compute_100f").replace(".target sm_100f", ".target sm_103a")
    (tmp_path / "kernel.ptx").write_text(text)
    kernel = max(entries(text), key=lambda name: int(re.findall(r"_d(\d+)", name)[0]))
    options = ["-O3", "-v", "-arch=sm_103a", f"--entry={kernel}"]
    command = [ptxas, *options, "-o", "kernel.cubin", "kernel.ptx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stdout + done.stderr)
    assert spills == ["0", "0"]


@pytest.mark.parametrize("folder", FOLDERS_OF_KERNELS)
def test_every_target_of_every_image_was_looked_at_for_spills(folder: str) -> None:
    looked_at = {
        (image, target)
        for image, of_target in RESOURCES.items()
        for target, kernels in of_target.items()
        if kernels and all(kernels.values())
    }
    images = [image for image in IMAGES if image.startswith(f"{folder}/")]
    assert images
    every = {(image, target) for image in images for target in targets_of(image, "sm_")}
    built_of(target for _, target in every)
    assert {(image, target) for image, target in every if target not in LEFT_OUT} <= looked_at


# --- the machine code ---

# What kernels are made for, by how their names start: instructions that each has on every target.
TILES = ("LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS.128")
ROLES = ("LDSM.16.M88.4", "LDSM.16.MT88.4", "UTMALDG.4D", "SYNCS.PHASECHK")
WARPGROUPS = ("WARPGROUP.ARRIVE", "UTMALDG.4D", "SYNCS.PHASECHK", "MUFU.EX2")
TENSOR_MEMORY = (
    "UTCBAR",
    "UTMALDG.4D",
    "UTMASTG.4D",
    "LDTM.x",
    "STTM.x",
    "FFMA2",
    "FMNMX3.NAN",
    "MUFU.EX2",
    "USETMAXREG",
    "SYNCS.PHASECHK",
)
COMBINES = ("LDG.E.128", "MUFU.EX2", "SHFL.BFLY")
INSTRUCTIONS = {
    "ada_attention_fwd_bf16_": ("HMMA.16816.F32", *TILES),
    "ada_attention_fwd_e": (*TILES, "F2FP.SATFINITE.E4M3.F32", "PRMT"),
    "ada_attention_fwd_f16_": ("HMMA.16816.F32", *TILES),
    "ada_int8_mean_": ("FADD", "LDG.E.128"),
    "ada_int8_values_": ("LDG.E.128", "F2I"),
    "quantize_at_once_": ("F2FP.SATFINITE.E4M3.F32", "F2FP.SATFINITE.E5M2.F32", "LDG.E.128"),
    "quantize_descale": ("FMNMX",),
    "quantize_largest_": ("FMNMX", "LDG.E.128"),
    "quantize_values_": ("F2FP.SATFINITE.E4M3.F32", "F2FP.SATFINITE.E5M2.F32", "LDG.E.128"),
    "ada_combine_": COMBINES,
    "ampere_append_": ("LDG.E", "STG.E"),
    "ampere_approximate_bf16_": ("HMMA.16816.F32", "HMMA.16816.F16", *TILES),
    "ampere_approximate_convert": ("LDG.E.128", "F2I", "SHFL.BFLY"),
    "ampere_approximate_f16_": ("HMMA.16816.F32", "HMMA.16816.F16", *TILES),
    "ampere_approximate_int8_d": ("HMMA.16816.F16", *TILES),
    "ampere_approximate_int8_pv_": ("IMMA.16832.S8.S8", "IMMA.16832.U8.S8", *TILES),
    "ampere_approximate_stats": ("LDG.E.128", "FMNMX"),
    "ampere_attention_": ("HMMA.16816.F32", *TILES),
    "ampere_backward_dq_": ("LDG.E.128", "STG.E.128"),
    "ampere_backward_keys_": ("LDG.E.128", "STG.E.128"),
    "ampere_backward_order_": ("LDG.E", "LDS", "STS", "STG.E"),
    "ampere_backward_rows_": ("LDG.E.128", "SHFL.BFLY"),
    "ampere_backward_shares_": ("LDG.E.128", "STG.E.128"),
    "ampere_backward_sinks_": ("MUFU.EX2", "SHFL.BFLY"),
    "ampere_combine_bf16": COMBINES,
    "ampere_combine_f16": COMBINES,
    "ampere_combine_shares_": ("LDG.E.128", "MUFU.EX2", "STG.E.64"),
    "blackwell_consumer_attention_fwd_bf16_": ("HMMA.16816.F32", *ROLES),
    "blackwell_consumer_attention_fwd_e": (*ROLES, "F2FP.SATFINITE.E4M3.F32", "PRMT"),
    "blackwell_consumer_attention_fwd_f16_": ("HMMA.16816.F32", *ROLES),
    "blackwell_consumer_attention_fwd_nvfp4_": (
        *("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "F2FP.SATFINITE.E2M1.F32", "UBLKCP", "LDSM"),
    ),
    "blackwell_consumer_nvfp4_chunks_": ("F2FP.SATFINITE.E2M1.F32", "LDG.E.128", "STG.E.64"),
    "blackwell_consumer_nvfp4_copies_": ("LDG.E.64", "LDG.E.U8", "STG.E.64"),
    "blackwell_consumer_nvfp4_means_": ("LDG.E.128", "SHFL.BFLY"),
    "blackwell_dc_attention_bwd_": (
        *("UTCHMMA", "UTCBAR", "UTMALDG.4D", "LDTM.x", "STTM.x", "FFMA2", "MUFU.EX2", "UBLKRED"),
    ),
    "blackwell_dc_attention_fwd_bf16_": ("UTCHMMA", *TENSOR_MEMORY),
    "blackwell_dc_attention_fwd_e": (*TENSOR_MEMORY, "F2FP.SATFINITE.E4M3.F32"),
    "blackwell_dc_attention_fwd_f16_": ("UTCHMMA", *TENSOR_MEMORY),
    "blackwell_consumer_combine_": COMBINES,
    "blackwell_dc_backward_dq_": ("LDG.E.128", "STG.E.128"),
    "blackwell_dc_backward_rows_": ("LDG.E.128", "SHFL.BFLY", "STG.E.128"),
    "blackwell_dc_backward_sinks_": ("MUFU.EX2", "SHFL.BFLY"),
    "blackwell_dc_combine_": COMBINES,
    "copy_lse_": ("LDG.E", "STG.E"),
    "copy_gather": ("LDG.E.64", "LDG.E.U8", "STG.E.128"),
    "copy_scatter": ("LDG.E.128", "STG.E.64", "STG.E.U8"),
    "hopper_append_": ("LDG.E", "STG.E"),
    "hopper_attention_bwd_": ("HGMMA.64x", *WARPGROUPS, "STSM.16.MT88.4", "UBLKRED"),
    "hopper_attention_fwd_bf16_": ("HGMMA.64x", *WARPGROUPS),
    "hopper_attention_fwd_f16_": ("HGMMA.64x", *WARPGROUPS),
    "hopper_attention_fwd_e4m3_": ("QGMMA.64x", *WARPGROUPS),
    "hopper_backward_dq_": ("LDG.E.128", "STG.E.128"),
    "hopper_backward_kept_": ("LDG.E.128", "STG.E"),
    "hopper_backward_keys_": ("LDG.E.128", "STG.E.128"),
    "hopper_backward_order_": ("LDG.E", "LDS", "STS", "STG.E"),
    "hopper_backward_rows_": ("LDG.E.128", "SHFL.BFLY", "STG.E.128"),
    "hopper_backward_shares_": ("LDG.E.128", "STG.E.128"),
    "hopper_backward_sinks_": ("MUFU.EX2", "SHFL.BFLY"),
    "hopper_clear_counter_": ("STG.E",),
    "hopper_combine_": COMBINES,
    "hopper_convert_cache_": ("LDG.E.128", "HMUL2", "STG.E.128"),
    "hopper_copy_mask_": ("LDG.E.U16", "STG.E"),
    "hopper_order_mixed_": ("LDG.E", "SHFL.UP", "STG.E.128"),
    "hopper_order_packed_": ("LDG.E", "REDUX", "STG.E.128"),
    "hopper_order_tiles_": ("LDG.E", "ATOMS", "REDUX", "STG.E"),
    "hopper_prepare_mask_": ("LDG.E", "VOTE", "STG.E.128"),
    "hopper_sum_mask_gradients_": ("LDG.E.128", "LDS", "STG.E"),
    "hopper_summarize_mask_": ("LDG.E", "SHFL.BFLY", "VOTE", "STG.E"),
    "hopper_summarize_low_mask_": ("LDG.E", "VOTE", "STG.E"),
    "hopper_summarize_wide_mask_": ("LDG.E", "VOTE", "STG.E"),
    "hopper_summarize_ranges_": ("LDG.E", "VOTE", "STG.E"),
    "hopper_transpose_v": ("LDGSTS.E", "LDSM.16.MT88", "PRMT", "STG.E.128"),
    "merge_attention": ("LD.E.128", "LD.E.64", "MUFU.EX2", "STG.E.128"),
    "probe_": (),  # their bits are compared (tests/sim/test_probes.py)
    "simt_append_": ("LDG.E", "STG.E"),
    "simt_attention_": ("FFMA", "MUFU.EX2"),
    "simt_backward_dq_": ("LDG.E", "STG.E"),
    "simt_backward_keys_": ("LDG.E.128", "STG.E.128"),
    "simt_backward_order_": ("LDG.E", "LDS", "STS", "STG.E"),
    "simt_backward_rows_": ("LDG.E.128", "SHFL.BFLY"),
    "simt_backward_shares_": ("LDG.E.128", "STG.E.128"),
    "simt_backward_sinks_": ("MUFU.EX2", "SHFL.BFLY"),
    "simt_combine_": COMBINES,
}
# Instructions of two CTAs that multiply together. An arrival at the barrier of the other CTA is a
# reduction there.
PAIR = ("UTCHMMA.2CTA", "UTCBAR.2CTA.MULTICAST", "UTMALDG.4D.2CTA", "SYNCS.ARRIVE.TRANS64.RED")
# 8-bit floating-point products: 9.0 and 10.0 make those of mma.sync of 16-bit ones.
FP8_PRODUCTS = dict.fromkeys(("sm_89", "sm_120"), "QMMA.16832.F32") | {
    "sm_120f": "QMMA.SF.16832.F32",  # with block scales
    "sm_100f": "UTCQMMA",
    "sm_110f": "UTCQMMA",
}
WITHOUT_TENSOR_CORES = (
    *("simt_", "copy_", "quantize_", "merge_", "ada_int8_", "hopper_transpose_v"),
    *("hopper_convert_cache_", "hopper_copy_", "hopper_order_", "hopper_prepare_"),
    *("hopper_summarize_", "hopper_sum_mask_"),
    *("ampere_append_", "hopper_append_", "ampere_backward_", "hopper_backward_"),
    *("ampere_approximate_convert", "ampere_approximate_stats"),
    "blackwell_dc_backward_",
    *("ada_combine_", "ampere_combine_", "blackwell_consumer_combine_"),
    "blackwell_consumer_nvfp4_",
    *("blackwell_dc_combine_", "hopper_combine_", "hopper_clear_counter_"),
)
TENSOR_CORES = ("HMMA", "HGMMA", "IMMA", "OMMA", "QMMA", "QGMMA", "UTC")  # from 8.0 to 12.1


Opcodes = dict[str, dict[str, dict[str, list[str]]]]


@pytest.fixture(scope="session")
def opcodes(nvdisasm: Path) -> Opcodes:
    """The instructions that each kernel has, without operands and predicates, by image and target,
    each named once.
    """

    def make() -> Opcodes:
        cubins: dict[str, dict[str, bytes]] = {}
        for image in IMAGES:
            for target in sorted({*targets_of(image, "sm_")} - LEFT_OUT):
                cubins.setdefault(target, {})[image] = native.code_of(image, target)
        found: Opcodes = {image: {} for image in IMAGES}
        for target, of_target in cubins.items():
            for image, kernels in opcodes_of(nvdisasm, target, of_target).items():
                found[image][target] = {name: sorted(set(x)) for name, x in kernels.items()}
        return found

    module = Path(str(native.__file__)).read_bytes()
    return cast(Opcodes, kept([b"opcodes", version_of(nvdisasm), module], make))


@every_image
def test_every_kernel_has_the_instructions_that_it_was_made_for(
    image: str, opcodes: Opcodes
) -> None:
    assert sorted(opcodes[image]) == built_of(targets_of(image, "sm_"))
    for target, found in opcodes[image].items():
        assert set(found) == set(RESOURCES[image][target])
        for kernel, instructions in found.items():
            for wanted in made_for(kernel, target):
                assert any(has.startswith(wanted) for has in instructions), (kernel, target, wanted)


def made_for(kernel: str, target: str) -> list[str]:
    (start,) = (start for start in INSTRUCTIONS if kernel.startswith(start))
    expected = list(INSTRUCTIONS[start])
    if start.endswith("_attention_fwd_e"):
        expected.append(FP8_PRODUCTS.get(target, "HMMA.16816.F32"))
    if kernel.startswith("simt_") and kernel.endswith("_tensor"):
        expected.append("HMMA.1688.F32.TF32")
    if "_int8_d" in kernel:
        expected.append("IMMA.16832.S8.S8")
    if kernel.startswith("hopper_attention_fwd_") and kernel.endswith("_mla"):
        expected = [name.replace("UTMALDG.4D", "UTMALDG.5D") for name in expected]
    if kernel.startswith("hopper_attention_fwd_") and kernel.endswith(
        ("_gather", "_gather_large", "_gather_capped", "_mla_packed", "_mla_packed_capped")
    ):
        expected = [name.replace("UTMALDG.4D", "LDGSTS.E.BYPASS.128") for name in expected]
    if kernel.startswith("hopper_attention_fwd_") and "_mla_packed_pair" in kernel:
        expected = [name.replace("UTMALDG.4D", "UBLKCP.S.S") for name in expected]
    if kernel.startswith("ampere_attention_bwd_") and kernel.endswith("_lists"):
        expected.append("RED.E.ADD.F32" if target == "sm_80" else "REDG.E.ADD.F32x4")
    if kernel.startswith("hopper_attention_bwd_") and kernel.endswith("_lists"):
        expected = ["HGMMA.64x", "WARPGROUP.ARRIVE", "LDGSTS.E.BYPASS.128", "STSM.16.MT88.4"]
        expected.append("STG.E.128" if "_kept_" in kernel else "REDG.E.ADD.F32x4")
    # By warps, not by TMA.
    if kernel.startswith("hopper_attention_bwd_") and re.search(r"_d(192|256)(_dense.*)?$", kernel):
        expected = [name.replace("UBLKRED", "REDG.E.ADD.F32x4") for name in expected]
    if kernel.startswith("hopper_attention_bwd_") and re.search("_one$|_rows", kernel):
        expected = [name.replace("UBLKRED", "STG.E.128") for name in expected]  # dQ itself
    if kernel.startswith("hopper_attention_bwd_") and kernel.endswith("_turns"):
        expected = [name.replace("UBLKRED", "UTMASTG.4D") for name in expected]  # the same
        expected += ["UBLKCP.S.G", "UBLKCP.G.S"]  # sums, both ways
    if target == "sm_110f" and "FFMA2" in expected:  # it has no packed fp32
        expected.remove("FFMA2")
    if kernel.startswith("blackwell_dc_") and kernel.endswith("_pair"):
        expected += PAIR
    return expected


@every_image
def test_tensor_cores_are_used_where_the_registry_says_so(image: str, opcodes: Opcodes) -> None:
    folder = image.partition("/")[0]
    built_of(targets_of(image, "sm_"))
    for target, found in opcodes[image].items():
        for kernel, instructions in found.items():
            assert instructions
            with_tensor_cores = image in ON_9_0 or not kernel.startswith(WITHOUT_TENSOR_CORES)
            if folder == PROBES:
                with_tensor_cores = re.match("probe_(mma|wgmma|tcgen05|tmem)", kernel) is not None
            used = any(has.startswith(TENSOR_CORES) for has in instructions)
            assert used == with_tensor_cores, (kernel, target)
            if folder in FOLDERS and not _registry.uses_tensor_cores(folder):
                assert with_tensor_cores == (image in ON_9_0), kernel


# Where each lane starts the copy of a box of its own, and what must not be in the loop over them.
LANES_COPY = re.compile("hopper_attention_fwd_.*_(cache|mixed)$")
OF_ONE_LANE = re.compile("HGMMA|WARPGROUP|SYNCS")


@every_image
def test_no_instruction_goes_from_lane_to_lane(
    image: str, opcodes: Opcodes, cuobjdump: Path, nvdisasm: Path
) -> None:
    """ptxas must see that one lane, chosen by elect.sync, starts what a warp starts once."""
    built_of(targets_of(image, "sm_"))
    for target, found in opcodes[image].items():
        if any(map(has_lane_loop, found.values())):
            loops = lane_loops(cuobjdump, nvdisasm, target, native.code_of(image, target))
            for kernel in filter(LANES_COPY.match, found):
                of_copies = "\n".join(loops.pop(kernel))
                assert "UTMALDG" in of_copies, kernel
                assert not OF_ONE_LANE.search(of_copies), kernel
            assert loops == {}, target


@pytest.mark.parametrize("folder", FOLDERS_OF_KERNELS)
def test_instructions_of_one_operation_have_one_name(
    folder: str, cuobjdump: Path, nvdisasm: Path
) -> None:
    """What the tests above read is what the disassembler says of every single instruction."""
    images = [image for image in IMAGES if image.startswith(f"{folder}/")]
    built_of(target for image in images for target in targets_of(image, "sm_"))
    cubins = {
        (image, target): native.code_of(image, target)
        for image in images
        for target in [x for x in targets_of(image, "sm_") if x not in LEFT_OUT][:1]
    }
    (image, target), cubin = min(cubins.items(), key=lambda item: len(item[1]))
    quick = opcodes_of(nvdisasm, target, {image: cubin})[image]
    for kernel, texts in instructions_of(cuobjdump, cubin).items():
        each = [match[1] for match in map(OPCODE.match, texts) if match]
        # Moves, shifts and sums of the multiplier have names of their own.
        assert list(map(without_alias, quick[kernel])) == list(map(without_alias, each))


def without_alias(opcode: str) -> str:
    return "IMAD" if opcode.startswith("IMAD") else opcode


# A product and a commit, which a lane starts that LANE chooses.
ONE_LANE = """.version 9.0
.target sm_100f
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry one_lane(.param .u32 address)
{
.reg .pred %p<3>;
.reg .b32 %r<5>;
.reg .b64 %rd<3>;
mov.u32 %r0, %tid.x;
mov.u32 %r1, memory;
ld.param.u32 %r2, [address];
and.b32 %r3, %r0, 31;
LANE
@!%p0 bra DONE;
cvt.u64.u32 %rd0, %r2;
mov.b64 %rd1, 123456;
setp.ne.u32 %p1, %r2, 7;
tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd0, %rd1, %r2, %p1;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
DONE:
ret;
}
"""


@pytest.mark.parametrize(
    ("lane", "found"),
    [("elect.sync _|%p0, -1;", []), ("setp.eq.u32 %p0, %r3, 0;", ["UTCHMMA", "UTCBAR"])],
    ids=["elected", "first"],
)
def test_a_lane_that_was_not_elected_is_noticed(
    lane: str, found: list[str], ptxas: Path, cuobjdump: Path, nvdisasm: Path, tmp_path: Path
) -> None:
    source, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(ONE_LANE.replace("LANE", lane))
    subprocess.run([ptxas, "-arch=sm_100f", "-o", cubin, source], check=True, timeout=60)
    loops = lane_loops(cuobjdump, nvdisasm, "sm_100f", cubin.read_bytes())
    inside = loops.get("one_lane", [])
    tensor = [text.split()[0] for text in inside if text.startswith("UTC")]
    assert tensor == found
    assert bool(inside) == bool(found)


def test_the_newer_assembler_leaves_the_products_of_12_x_unpadded(nvdisasm: Path) -> None:
    """ptxas 13.0 lays a NOP behind three of four HMMA; the build says where it has no newer one."""
    built_of(["sm_120f"])
    cubin = native.code_of("blackwell_consumer/fwd_f16", "sm_120f")
    assembler = assembler_of(cubin)
    if assembler < (13, 4):
        pytest.skip(f"ptxas {assembler[0]}.{assembler[1]} assembled this build, not 13.4 or newer")
    kernels = opcodes_of(nvdisasm, "sm_120f", {"": cubin})[""]
    found = [op for ops in kernels.values() for op in ops]
    products = sum(op.startswith("HMMA") for op in found)
    assert products > 0
    assert found.count("NOP") < 0.4 * products


# --- plans and code agree ---

DEVICES = [row.device.name for row in native.known_devices()]


@functools.cache
def problems() -> tuple[native.Problem, ...]:
    """Calls that reach every kernel: each dtype and head dim, filling a GPU and not."""
    found = []
    floats = (torch.float32, torch.float16, torch.bfloat16)
    for dtype in (*floats, torch.float8_e4m3fn, torch.float8_e5m2):
        wide = ((384, 384), (512, 512))
        for d, dv in ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), *wide):
            for b, h, n in (
                (1, 1, 1),
                (1, 8, 100),
                (2, 16, 512),
                (16, 32, 100),
                (16, 32, 1024),
                (1, 32, 8192),
            ):
                q = torch.empty(b, h, n, d, dtype=dtype, device="meta")
                v = torch.empty(b, h, n, dv, dtype=dtype, device="meta")
                found.append(make_problem(q, q, v).as_if_on_cuda())
                if dtype == torch.float8_e4m3fn:
                    descale = torch.empty(b, h, -(-n // 64), device="meta")
                    by_block = {f"{name}_descale": descale for name in "qkv"}
                    found.append(make_problem(q, q, v, **by_block).as_if_on_cuda())
                if dtype in floats and (b, n) == (1, 100):
                    ranges = torch.empty(1, 1, n, 2, 2, dtype=torch.int32, device="meta")
                    found.append(make_problem(q, q, v, key_ranges=ranges).as_if_on_cuda())
                if dtype in (torch.float16, torch.bfloat16):
                    options: dict[str, Any]
                    for options in (
                        {"approximate": "int8_qk"},
                        {"approximate": "int8"},
                        {"approximate": "int8", "softcap": 5.0},
                        {"approximate": "int8_pv"},
                        {"approximate": "int8_pv", "softcap": 5.0},
                        {"approximate": "fp16_accumulate"},
                        {"approximate": "fp16_accumulate", "softcap": 5.0},
                        {"num_splits": 2},
                        {"causal": True},
                    ):
                        found.append(make_problem(q, q, v, **options).as_if_on_cuda())
    return tuple(found)


@functools.cache
def plans(device: str) -> list[native.LaunchPlan]:
    answers = [
        native.plan(folder, problem, find_device(device))
        for folder in FOLDERS
        for problem in problems()
    ]
    return [answer for answer in answers if isinstance(answer, native.LaunchPlan)]


def launches(plan: native.LaunchPlan) -> list[dict[str, Any]]:
    return list(plan.to_dict()["launches"])


@pytest.mark.parametrize("device", DEVICES)
def test_every_planned_kernel_is_in_its_image(device: str) -> None:
    planned = {
        (launch["image"], launch["kernel"], plan.code.split()[0])
        for plan in plans(device)
        for launch in launches(plan)
    }
    assert planned
    for image, kernel, code in planned:
        if code.startswith("compute_"):
            assert kernel in entries_of(image.partition("/")[0])[image, code]
        else:
            assert kernel in RESOURCES[image][code]


def test_every_kernel_is_planned_somewhere() -> None:
    planned = {
        launch["kernel"]
        for device in DEVICES
        for plan in plans(device)
        for launch in launches(plan)
    }
    built = {kernel for of_target in RESOURCES.values() for k in of_target.values() for kernel in k}
    # The probes of `archflash verify` are launched by themselves (tests/sim/test_probes.py).
    planned |= every_plan.all_kernels()
    assert planned <= built
    assert {kernel for kernel in built - planned if not kernel.startswith("probe_")} == set()


@pytest.mark.parametrize("device", DEVICES)
def test_registers_and_shared_memory_allow_the_blocks_per_sm_that_a_plan_counts_on(
    device: str,
) -> None:
    limits = find_device(device)
    planned = [x for x in plans(device) if not x.code.startswith("compute_")]  # by the driver
    built_of({plan.code for plan in planned})
    for plan in planned:
        if plan.code in LEFT_OUT:
            continue
        for launch in launches(plan):
            used = RESOURCES[launch["image"]][plan.code][launch["kernel"]]
            assert plan.tile is not None
            resident, threads = plan.tile.ctas_per_sm, math.prod(launch["block"])
            registers = -(-used["registers"] // 8) * 8  # given out by 8 for each thread
            assert resident * threads * registers <= REGISTERS_PER_SM, launch["kernel"]
            assert resident * threads <= limits.threads_per_sm
            shared = launch["shared_bytes"] + used["shared_bytes"]
            assert shared <= limits.shared_per_block
            assert resident * shared <= limits.shared_per_sm
