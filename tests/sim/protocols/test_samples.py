"""The sample kernels multiply matrices as float64 does, under every schedule."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from archflash import sim

from ..explained import unexplained
from .samples import compile
from .samples.kernels import Sample, samples

SAMPLES = samples()


def run(sample: Sample, tiles: int, **options: object) -> tuple[sim.Report, Tensor]:
    arguments = sample.arguments(tiles)
    report = sim.launch(
        sim.load(sample.text),
        "test",
        arguments,
        grid=(sample.grid,),
        block=(sample.block,),
        shared_bytes=sample.shared_bytes,
        **options,
    )
    output = arguments[sample.OUTPUT]
    result = output.tensor if isinstance(output, sim.TensorMap) else output
    assert isinstance(result, Tensor)
    return report, result


@pytest.mark.parametrize("mode", ["lazy", "eager", "random", "priority"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_a_sample_multiplies_as_float64_does(sample: Sample, mode: str) -> None:
    results = []
    for seed in range(3):
        for tiles in (1, 6):  # 6 tiles go round the ring of two stages three times
            report, result = run(sample, tiles, mode=mode, seed=seed)
            assert not unexplained(f"protocol_{sample.name}", report)
            assert sample.worst_error(result, tiles) <= 1
            results.append(result)
    assert torch.equal(results[-1], results[1])


def test_builds_for_two_architectures_give_the_same_bits() -> None:
    assert torch.equal(run(SAMPLES[0], 5)[1], run(SAMPLES[1], 5)[1])


def test_a_in_registers_gives_the_same_bits_as_in_shared_memory() -> None:
    shared, registers = (run(sample, 5) for sample in SAMPLES[2:])
    assert torch.equal(shared[1], registers[1])
    ldmatrix = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    assert ldmatrix in registers[0].opcodes
    assert ldmatrix not in shared[0].opcodes


@pytest.mark.parametrize("architecture", compile.ARCHITECTURES)
def test_the_committed_ptx_is_what_nvcc_makes_of_the_source(architecture: str) -> None:
    nvcc = compile.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not found: it compiles pipeline.cu")
    committed = compile.text_file(architecture).read_text()
    made = compile.compiled(nvcc, architecture)
    release = r"Cuda compilation tools, release (.*)"
    if re.findall(release, made) != re.findall(release, committed):
        pytest.skip("another release of nvcc made the committed PTX")
    assert made == committed, "python -m tests.sim.protocols.samples.compile makes it anew"
