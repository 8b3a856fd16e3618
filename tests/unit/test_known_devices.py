"""The table of GPUs that plans can be made for without having one."""

from __future__ import annotations

import re

import pytest

from archflash import _archflash as native

KNOWN = {row.device.name: row for row in native.known_devices()}

# Every name and alias of each row; the driver's full name is among them.
NAMES = {
    "T4": ["T4", "Tesla T4", "NVIDIA T4"],
    "A100": ["NVIDIA A100-SXM4-80GB", "A100 80GB", "A100 SXM", "A100 SXM 80GB", "A100-80GB"],
    "RTX 3090": ["NVIDIA GeForce RTX 3090", "3090"],
    "A10G": ["NVIDIA A10G"],
    "Jetson AGX Orin": ["Orin", "AGX Orin", "Jetson AGX Orin 64GB", "Jetson Orin"],
    "L4": ["NVIDIA L4"],
    "L40S": ["NVIDIA L40S"],
    "RTX 4090": ["NVIDIA GeForce RTX 4090", "4090"],
    "H100": ["NVIDIA H100 80GB HBM3", "H100 SXM", "H100 SXM5", "H100 80GB", "H100-SXM5-80GB"],
    "H200": ["NVIDIA H200", "H200 SXM", "H200 141GB", "NVIDIA H200 141GB HBM3e"],
    "B200": ["NVIDIA B200", "B200 SXM", "B200 SXM6"],
    "B300": ["NVIDIA B300 SXM6 AC", "NVIDIA B300", "B300 SXM", "B300 SXM6", "Blackwell Ultra"],
    "Jetson Thor": ["NVIDIA Thor", "Thor", "Jetson AGX Thor", "Jetson T5000"],
    "RTX 5060 Laptop": ["NVIDIA GeForce RTX 5060 Laptop GPU", "RTX 5060 Mobile", "5060 Laptop"],
    "RTX 5080": ["NVIDIA GeForce RTX 5080", "5080"],
    "RTX 5090": ["NVIDIA GeForce RTX 5090", "5090"],
    "RTX PRO 6000": [
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "RTX PRO 6000 Blackwell",
        "PRO 6000",
        "RTX PRO 6000 Workstation",
    ],
    "GB10": ["NVIDIA GB10", "DGX Spark"],
}

# Opt-in KB of shared memory per block and threads per SM of each capability.
# Source: CUDA programming guide, "Compute capabilities".
LIMITS_KB = {
    (7, 5): (64, 1024),
    (8, 0): (163, 2048),
    (8, 6): (99, 1536),
    (8, 7): (163, 1536),
    (8, 9): (99, 1536),
    (9, 0): (227, 2048),
    (10, 0): (227, 2048),
    (10, 3): (227, 2048),
    (11, 0): (227, 1536),
    (12, 0): (99, 1536),
    (12, 1): (99, 1536),
}

every_row = pytest.mark.parametrize("name", KNOWN)


def test_the_table_holds_these_gpus() -> None:
    assert list(KNOWN) == list(NAMES)


@pytest.mark.parametrize(
    ("name", "alias"), [(name, alias) for name, aliases in NAMES.items() for alias in aliases]
)
def test_every_spelling_finds_its_row(name: str, alias: str) -> None:
    for spelling in (alias, alias.upper(), alias.lower(), alias.replace(" ", "-"), f"  {alias} "):
        found = native.find_known_device(spelling)
        assert found is not None, spelling
        assert found.device.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nvidia",
        "geforce",
        "RTX",
        "RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "H100 PCIe",
        "A100-SXM4-40GB",
        "A10",
        "RTX 5060",
        "cpu",
    ],
)
def test_another_gpu_is_never_taken_for_a_known_one(name: str) -> None:
    assert native.find_known_device(name) is None


@every_row
def test_limits_are_those_of_the_capability(name: str) -> None:
    device = KNOWN[name].device
    block_kb, threads = LIMITS_KB[device.capability]
    assert device.shared_per_block == block_kb * 1024
    # From 8.0 on the driver keeps 1 KB for each block.
    reserved_kb = 0 if device.capability == (7, 5) else 1
    assert device.shared_per_sm == (block_kb + reserved_kb) * 1024
    assert device.threads_per_sm == threads
    assert device.registers_per_sm == 65536


def test_rows_are_in_order_of_capability() -> None:
    capabilities = [row.device.capability for row in KNOWN.values()]
    assert capabilities == sorted(capabilities)
    assert set(capabilities) == set(LIMITS_KB)


@every_row
def test_fp32_peak_is_cores_times_clock(name: str) -> None:
    row = KNOWN[name]
    cores_per_sm = 64 if row.device.capability in [(7, 5), (8, 0)] else 128
    derived = row.device.sm_count * cores_per_sm * 2 * row.boost_mhz * 1e6 / 1e12
    assert row.fp32_tflops == pytest.approx(derived, rel=0.02)


@every_row
def test_tensor_core_peaks_are_above_the_cuda_cores(name: str) -> None:
    row = KNOWN[name]
    assert row.fp16_tflops >= 1.9 * row.fp32_tflops
    if row.device.capability < (8, 9):
        assert row.fp8_tflops == 0
    else:
        assert row.fp8_tflops == pytest.approx(2 * row.fp16_tflops, rel=0.02)


@every_row
def test_sizes_are_of_the_right_magnitude(name: str) -> None:
    row = KNOWN[name]
    assert 16 <= row.device.sm_count <= 192
    assert 1 << 22 <= row.device.l2_bytes <= 1 << 28
    assert 1000 <= row.boost_mhz <= 3000
    assert 200 <= row.bandwidth_gbps <= 8000


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ("T4", "A100"),
        ("A10G", "RTX 3090"),
        ("L4", "L40S"),
        ("A100", "H100"),
        ("H100", "H200"),
        ("H200", "B200"),
        ("RTX 5060 Laptop", "RTX 5080"),
        ("RTX 5080", "RTX 5090"),
    ],
)
def test_a_larger_gpu_is_no_slower_in_any_respect(smaller: str, larger: str) -> None:
    a, b = KNOWN[smaller], KNOWN[larger]
    assert a.bandwidth_gbps < b.bandwidth_gbps
    assert a.fp32_tflops <= b.fp32_tflops
    assert a.fp16_tflops <= b.fp16_tflops
    assert a.fp8_tflops <= b.fp8_tflops


@every_row
def test_every_row_names_its_source(name: str) -> None:
    source = KNOWN[name].source
    assert len(source) > 20
    assert re.search(r"[A-Z][A-Za-z]+", source)


@every_row
def test_a_device_round_trips_through_a_dict(name: str) -> None:
    device = KNOWN[name].device
    fields = device.to_dict()
    assert native.Device.from_dict(fields).to_dict() == fields
    assert fields["name"] == name
    assert (fields["major"], fields["minor"]) == device.capability
