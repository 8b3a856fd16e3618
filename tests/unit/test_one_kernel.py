"""bench.one_kernel compiles the kernel that it is asked for, and runs it, not the package's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from bench import one_kernel
from bench.on_the_spot import SOURCES, find_nvcc

from archflash import _archflash as native

CALL = ["--implementation", "simt", "--shape", "1,1,64,32", "--dtype", "float32"]


def test_every_image_has_a_source() -> None:
    for image in native.image_names():
        source, name = one_kernel.source_of(image)
        assert source.is_file()
        assert image.endswith(f"/{name}")
    with pytest.raises(FileNotFoundError, match="ampere/no_such"):
        one_kernel.source_of("ampere/no_such")


def test_one_instantiation_is_left() -> None:
    text = (SOURCES / "simt" / "kernels" / "fwd_f32.cu").read_text()
    kept = one_kernel.only("simt_attention_fwd_f32_d32", text, "fwd_f32")
    assert len(re.findall("^ARCHFLASH_", text, re.MULTILINE)) > 1
    assert re.findall("^ARCHFLASH_.*", kept, re.MULTILINE) == [
        "ARCHFLASH_KERNEL(simt_attention_fwd_f32_d32, attention_fwd, F32D32)"
    ]
    shared = "ARCHFLASH_A(KERNEL(x_fwd, d64),\n            D64)\nARCHFLASH_B(KERNEL(x), x)\n"
    assert one_kernel.only("x_fwd_bf16_d64", shared, "fwd_bf16").count("KERNEL") == 1
    assert one_kernel.only("x_bf16", shared, "fwd_bf16").strip() == "ARCHFLASH_B(KERNEL(x), x)"


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc here")
@pytest.mark.slow
def test_the_kernel_of_the_checkout_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_kernel, "OUTPUT", tmp_path / "out")
    assert one_kernel.main(CALL) == 0
    assert (tmp_path / "out" / "simt_attention_fwd_f32_d32.ptx").is_file()
    said = capsys.readouterr().out
    assert "'registers': " in said
    assert "ok: max error" in said
    # A fault in the source shows: it is not the package's kernel that runs.
    shutil.copytree(SOURCES, tmp_path / "src")
    wrapper = tmp_path / "src" / "common" / "ptx" / "ex2.cuh"
    text = wrapper.read_text()
    assert '"ex2.approx' in text
    wrapper.write_text(text.replace('"ex2.approx', '"lg2.approx'))
    monkeypatch.setattr(one_kernel, "SOURCES", tmp_path / "src")
    assert one_kernel.main(CALL) == 1
