"""Which tests of which library run, and on what of archflash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LIBRARIES = ("flash-attention", "pytorch", "xformers", "flashinfer", "flashmla")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """Tests of one library that run in a process.

    Attributes:
        name: of the suite.
        library: of which library; one of LIBRARIES.
        what: the suite in words, for the table.
        files: places of the file of tests in the library's folder, of which the first that is there
            is taken; or one beside this module.
        serve: how archflash serves it: "compat" (its modules have the library's names), "enable"
            (it stands in front of PyTorch's operators) or "face" (flashinfer_face.py).
        paths: folders of the library that go onto the path.
        only: names that the tests' names have one of; every test by default.
        but: names of tests that are left out: they test what lies beside attention.
        times: how many times the sample of a function is larger.
        import_mode: pytest's; "prepend" for files that import their neighbours.
    """

    name: str
    library: str
    what: str
    files: tuple[str, ...]
    serve: str
    paths: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    times: int = 1
    import_mode: str = "importlib"

    @property
    def can_be_alone(self) -> bool:
        """Whether the tests run without archflash, by PyTorch's own operators."""
        return self.serve == "enable"

    def file_in(self, folder: Path) -> Path | None:
        for file in self.files:
            for place in (folder / file, HERE / file):
                if place.exists():
                    return place
        return None


SUITES = (
    Suite(
        "fa2", "flash-attention", "FlashAttention-2, `test_flash_attn`, both passes",
        ("tests/test_flash_attn.py",), "compat",
        # Its cases with dropout want the weights that were dropped, which no call returns, and the
        # last one an error that takes reading lengths on the host (ARCHFLASH_CHECK=1 does).
        but=("race_condition", "0.17", "paged_block_table_bounds"),
    ),
    Suite(
        "fa3", "flash-attention", "FlashAttention-3, `hopper/test_flash_attn`, both passes",
        ("hopper/test_flash_attn.py",), "compat", paths=("hopper",),
        # The last asks for the schema of the original's operators.
        but=("race_condition", "cluster", "test_flash3_bw_compatibility"),
    ),
    Suite(
        "fa4", "flash-attention", "FlashAttention-4, `cute/test_flash_attn`, both passes",
        ("tests/cute/test_flash_attn.py",), "compat",
        but=(
            "cache_separates", "canonicalizes", "_bwd_preallocated", "cumsum_metadata",
            "sparse_bwd_sentinel", "seqlen_k_per_split", "value_dim_larger", "non_tma_partial",
            "fp8_paged_decode", "rejects", "invalid_head_dim",
        ),  # of its private functions and its compiler's cache, and of its limits
    ),
    Suite(
        "fa4-varlen", "flash-attention", "FlashAttention-4, `cute/test_flash_attn_varlen`",
        ("tests/cute/test_flash_attn_varlen.py",), "compat",
    ),
    Suite(
        "pytorch", "pytorch", "PyTorch, `test_transformers`, under `enable()`",
        ("test/test_transformers.py", "test/xpu/test_transformers_xpu.py"), "enable",
        only=("TestSDPA", "TestAttnBias", "TestTransformers"),
        but=("test_fused_sdp_priority_order",),  # it compares times
    ),
    Suite(
        "opinfo", "pytorch", "PyTorch, OpInfo samples of attention, under `enable()`",
        ("opinfo_cases.py",), "enable", times=20,
    ),
    Suite(
        "xformers", "xformers", "xformers, `test_mem_eff_attention`, PyTorch's flash operator, "
        "under `enable()`",
        ("tests/test_mem_eff_attention.py",), "enable", paths=(".",),
        only=("-pt-",), import_mode="prepend",
    ),
    *(
        Suite(
            f"flashinfer-{name}", "flashinfer", f"FlashInfer, `test_{file}`",
            (f"tests/attention/test_{file}.py",), "face", paths=(".",), only=only, but=but,
        )
        for name, file, only, but in (
            ("decode", "batch_decode_kernels", (),
             ("nvfp4", "jit", "fast_plan", "cuda_graph", "fixed_split", "rejects")),
            ("prefill", "batch_prefill_kernels", ("paged_kv_cache",),
             ("nvfp4", "fp4", "jit", "custom_mask", "cuda_graph")),
            ("window", "sliding_window", ("paged", "batch"), ()),
            ("page", "page", ("test_append_paged_kv_cache",), ("nvfp4", "fp4")),
        )
    ),
    Suite(
        "flashmla", "flashmla", "FlashMLA's dense decoding, sparse decoding and sparse prefill",
        ("flashmla_cases.py",), "compat", paths=("tests",), times=3,
    ),
)  # fmt: skip
