"""The attention backend for sparse latent attention in vLLM's own classes: what the layer's kernel
is given, and which configurations it takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from archflash import reference
from archflash._packed_rows import unpack
from archflash.integrations.vllm import register
from archflash.integrations.vllm_mla_sparse import ArchflashMLASparseBackend

from .server import rand
from .test_backend import reasons

ROWS, HEADS, LATENT, ROPE, PAGE, PAGES, SCALE = 3, 4, 512, 64, 4, 6, 0.05


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_each_row_reads_the_places_of_its_list(kind: str, apart: bool) -> None:
    layer: Any = object.__new__(ArchflashMLASparseBackend.get_impl_cls())
    layer.kv_lora_rank, layer.scale, layer.kv_cache_dtype = LATENT, SCALE, kind
    # Pages of another layer lie between those of this one.
    width = LATENT + ROPE if kind == "auto" else 656
    memory = rand(2 * PAGES, PAGE, width, seed=1)
    if kind == "auto":
        cache = memory[::2]
        k, v = cache[None, :, :, None], cache[None, :, :, None, :LATENT]
    else:
        memory = (memory.float() * 20).to(torch.int8).view(torch.uint8) & 0x3F  # finite e4m3
        scales = memory[..., 512:528].view(torch.float32)
        scales.fill_(0.25)
        cache = memory[::2]
        of_k, v = unpack(cache[:, :, None], "fp8_656")
        k, v = torch.cat([v, of_k], -1)[None], v[None]
    # What vLLM makes of the indexer's choice: rows of the cache as one page, the valid ones first.
    places = torch.tensor([[1, 8, 19, -1], [16, 0, -1, -1], [40, 43, 9, 2]], dtype=torch.int32)
    counts = torch.tensor([3, 2, 4], dtype=torch.int32)
    q = rand(ROWS, HEADS, LATENT + ROPE, seed=2)
    given = (q[..., :LATENT], q[..., LATENT:]) if apart else q
    out, lse = layer._forward_mqa_kernel(
        given, cache, places, counts, layer=None, block_size=PAGE, is_decode=True
    )
    assert lse is None
    for row in range(ROWS):
        at = places[row, : counts[row]].long()
        page, place = at // (2 * PAGE), at % (2 * PAGE)
        tensors = [
            q[row][None, :, None],
            *(x[0, page, place].transpose(0, 1)[None] for x in (k, v)),
        ]
        exact = reference.attention(*tensors, scale=SCALE)[0]
        report = reference.check(
            out[row][None, :, None], exact, reference.baseline(*tensors, scale=SCALE)
        )
        assert report.ok, report


def test_each_row_of_the_configuration() -> None:
    sparse = {"use_mla": True, "use_sparse": True, "head_size": LATENT + ROPE}
    for served in ({}, {"kv_cache_dtype": "fp8_ds_mla"}, {"block_size": 64}):
        assert reasons(ArchflashMLASparseBackend, **(sparse | served)) == [], served
    assert reasons(ArchflashMLASparseBackend, 8, **sparse) == []
    for refused, words in (
        ({"use_sparse": False}, "non-sparse not supported"),
        ({"head_size": 320}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "bfloat16 beside float8"),
    ):
        found = reasons(ArchflashMLASparseBackend, **(sparse | refused))
        assert any(words in reason for reason in found), (refused, found)


def test_the_name_of_the_backend() -> None:
    register()
    backend = AttentionBackendEnum["ARCHFLASH_MLA_SPARSE"].get_class()
    assert backend is ArchflashMLASparseBackend
