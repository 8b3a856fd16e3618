"""Kernels that nvcc compiles on the spot, as the ladder and the switches take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench import on_the_spot
from bench.switches import variants

import archflash
from archflash import _archflash as native

from . import pair_of_roles
from .gpu_cases import kernels, qkv

pytestmark = pytest.mark.gpu
NVCC = on_the_spot.find_nvcc()


def source_of(kernel: str, folder: str) -> str:
    """A source with one kernel of a folder."""
    for file in sorted((on_the_spot.SOURCES / folder / "kernels").glob("*.cu")):
        for image in on_the_spot.images_of(file):
            text = on_the_spot.text_for(file, image)
            for line in text.splitlines():
                if f"({kernel}," in line:
                    return text.split("ARCHFLASH_")[0] + line + "\n"
    raise AssertionError(f"{folder} has no {kernel}")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
def test_a_kernel_compiled_on_the_spot_gives_the_bits_of_the_wheels(tmp_path: Path) -> None:
    assert NVCC is not None
    q, k, v = qkv(300, 300, 64)
    expected = archflash.attention(q, k, v, causal=True, implementation="simt")
    plan = archflash.explain(q, k, v, causal=True, implementation="simt").plan
    assert plan is not None
    (row,) = plan.to_dict()["launches"]
    assert row["shared_bytes"] > 48 * 1024  # what a kernel may have without asking
    source = tmp_path / "one.cu"
    source.write_text(source_of(row["kernel"], "simt"))
    major, minor = torch.cuda.get_device_capability()
    image = on_the_spot.compiled(source, NVCC, "cubin", f"sm_{major}{minor}")
    out = torch.full_like(q, float("nan"))
    plan = on_the_spot.with_kernel(plan, row["kernel"], image)
    native.launch(plan, {"q": q, "k": k, "v": v, "out": out})
    assert torch.equal(out, expected)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
@pytest.mark.parametrize("clusters", [1, 5, 66])
def test_a_pair_of_ctas_with_roles_runs_through_the_executor(clusters: int) -> None:
    assert NVCC is not None
    capability = torch.cuda.get_device_capability()
    if capability[0] not in (9, 10, 11):
        pytest.skip(
            "the kernel is for GPUs with clusters and 227 KB of shared memory: 9.0, 10.x and 11.0"
        )
    code = pair_of_roles.compiled(NVCC, "cubin", capability)
    tiles = 150
    plan = on_the_spot.with_kernel(pair_of_roles.plan(tiles, clusters), pair_of_roles.NAME, code)
    tensors = pair_of_roles.tensors(tiles, "cuda")
    expected = pair_of_roles.expected(tensors["q"])
    for _ in range(20):
        tensors["out"].fill_(float("nan"))
        native.launch(plan, tensors)
        assert torch.equal(tensors["out"], expected)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
@pytest.mark.skipif(variants.NAME not in kernels(), reason=f"{variants.NAME} has no code for it")
@pytest.mark.parametrize("kernel", [variants.NAME])  # so that -k finds it
def test_a_switch_in_the_state_of_the_wheel_gives_its_bits(kernel: str) -> None:
    assert NVCC is not None
    q, k, v = qkv(300, 300, 128, dtype="bfloat16")
    expected = archflash.attention(q, k, v, causal=True, implementation=kernel)
    same = variants.Setting("split_p=on", "as in the wheel", "switches.split_p = true")
    assert torch.equal(variants.bind(same, NVCC, True)(q, k, v), expected)
