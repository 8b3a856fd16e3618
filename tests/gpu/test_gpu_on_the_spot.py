"""Kernels that nvcc compiles on the spot, as the ladder and the switches take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench import on_the_spot
from bench.switches import variants

import archflash

from .gpu_cases import kernels, qkv

pytestmark = pytest.mark.gpu
NVCC = on_the_spot.find_nvcc()


def source_of(kernel: str, folder: str) -> str:
    """A source with one kernel of a folder."""
    for file in sorted((on_the_spot.SOURCES / folder / "kernels").glob("*.cu")):
        text = file.read_text()
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
    assert row["shared_bytes"] > on_the_spot.DEFAULT_SHARED
    source = tmp_path / "one.cu"
    source.write_text(source_of(row["kernel"], "simt"))
    major, minor = torch.cuda.get_device_capability()
    image = on_the_spot.compiled(source, NVCC, "cubin", f"sm_{major}{minor}")
    out = torch.full_like(q, float("nan"))
    tensors = {"q": q, "k": k, "v": v, "out": out}
    on_the_spot.run_plan(plan, [on_the_spot.Kernel(image, row["kernel"])], tensors)
    assert torch.equal(out, expected)


CLUSTERS = """
extern "C" __global__ void clusters(unsigned* out) {
  unsigned ctas;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
  out[blockIdx.x] = ctas;
}
"""


@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
def test_a_kernel_compiled_on_the_spot_is_launched_in_clusters(tmp_path: Path) -> None:
    assert NVCC is not None
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        pytest.skip("clusters are for 9.0 and newer")
    source = tmp_path / "clusters.cu"
    source.write_text(CLUSTERS)
    image = on_the_spot.compiled(source, NVCC, "cubin", f"sm_{major}{minor}")
    kernel = on_the_spot.Kernel(image, "clusters")
    row = {"grid": [6, 1, 1], "block": [32, 1, 1], "shared_bytes": 0}
    for ctas in (1, 2):
        out = torch.zeros(6, dtype=torch.int32, device="cuda")
        address = out.data_ptr().to_bytes(8, "little")
        kernel.launch({**row, "cluster": [ctas, 1, 1]}, address)
        assert out.tolist() == [ctas] * 6


@pytest.mark.skipif(NVCC is None, reason="nvcc is not found")
@pytest.mark.skipif(variants.NAME not in kernels(), reason=f"{variants.NAME} has no code for it")
@pytest.mark.parametrize("kernel", [variants.NAME])  # so that -k finds it
def test_a_switch_in_the_state_of_the_wheel_gives_its_bits(kernel: str) -> None:
    assert NVCC is not None
    q, k, v = qkv(300, 300, 128, dtype="bfloat16")
    expected = archflash.attention(q, k, v, causal=True, implementation=kernel)
    same = variants.Setting("split_p=on", "as in the wheel", "switches.split_p = true")
    assert torch.equal(variants.bind(same, NVCC, True)(q, k, v), expected)
