"""What bench/kvcache.py measures is what it says, on the CPU by PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import archflash

# The benchmarks are no part of the installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import kvcache, results
from bench.cases import Case
from bench.timing import make_sets

CASE = Case("small", "bf16", b=2, hq=4, hkv=2, nq=1, nk=128, d=32, dv=32, causal=False)


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache, "IMPLEMENTATION", "torch")


def test_every_kind_of_cache_holds_the_keys_of_the_case_and_is_made_once() -> None:
    torch.manual_seed(0)  # a random order of four pages is now and then the order that they had
    ((q, k, v),) = sets = make_sets(CASE, "cpu", 1)
    expected = archflash.attention(q, k, v, implementation="torch").float()
    candidates = kvcache.cache_candidates(CASE, sets)
    assert [c.features for c in candidates] == [f"cache={kind}" for kind in kvcache.KINDS]
    for candidate in candidates:
        calls = candidate.bind(CASE)
        assert isinstance(calls, kvcache.CacheCalls)
        before = dict(calls.caches)
        out = calls(q, k, v).float()
        assert calls.caches == before, "the cache was made again"
        tolerance = 0.1 if calls.fp8 else 0.01
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
        (arguments,) = calls.caches.values()
        assert arguments["k_cache"].dtype == (torch.float8_e4m3fn if calls.fp8 else torch.bfloat16)
        if calls.page_size is not None:
            assert arguments["k_cache"].shape[1] == calls.page_size
            table = arguments["page_table"].flatten()
            assert table.sort().values.tolist() == list(range(2 * 128 // calls.page_size))
            assert table.tolist() != sorted(table.tolist())


def test_rows_of_caches_have_ratios_to_calls_without_one() -> None:
    facts = {name: "" for name in results.COLUMNS if name not in results.SHAPE_COLUMNS}
    shape = results.shape_columns(CASE)
    plain = {**facts, **shape, "p50_us": "20"}
    paged = {**facts, **shape, "p50_us": "10", "features": "cache=pages:16"}
    assert results.speedup(paged, plain) == 2.0
    assert results.call_features(paged), "rows of plain calls alone decide dispatch"
