"""Decodes with sparse multi-head latent attention: an indexer chooses the tokens to attend to.

The cache holds a latent row for each token, in pages. A cheap indexer scores all tokens of a
sequence and keeps the best; attention then reads the rows of these alone. `--check` compares with
attention to all tokens whose other scores are masked.

    python examples/sparse.py                          on a GPU, or by PyTorch's operations
    python examples/sparse.py --implementation ampere  without a GPU: ampere's on the simulator
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import archflash

BATCH, HEADS, PAGES, PAGE_SIZE, TOPK = 2, 16, 8, 16, 24
LATENT, ROPE, INDEX = 512, 64, 32  # columns: of V, of K alone, of the indexer


def main(arguments: Sequence[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--implementation")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() and given.implementation is None else "cpu"
    torch.manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).to(device)

    cache = rand(BATCH * PAGES, PAGE_SIZE, 1, LATENT + ROPE)
    table = torch.randperm(BATCH * PAGES).reshape(BATCH, PAGES).int().to(device)
    lengths = torch.tensor([100, 70], dtype=torch.int32, device=device)
    q = rand(BATCH, 1, HEADS, LATENT + ROPE)

    # The indexer: scores of its own narrow keys, of which those behind a sequence's end count last.
    scores = (rand(BATCH, 1, INDEX) @ rand(BATCH, INDEX, PAGES * PAGE_SIZE)).float()
    behind = torch.arange(PAGES * PAGE_SIZE, device=device) >= lengths[:, None, None]
    chosen = scores.masked_fill(behind, -torch.inf).topk(TOPK, dim=-1).indices.int()

    call = {"cache_seqlens": lengths, "page_table": table, "dv": LATENT, "scale": 192**-0.5}
    out = archflash.attention_with_kvcache(
        q, cache, key_indices=chosen[:, None], implementation=given.implementation, **call
    )
    print(f"{HEADS} heads read {TOPK} rows of up to {int(lengths.max())}: {tuple(out.shape)}")
    if not given.check:
        return True
    rows = cache[table.long()].reshape(BATCH, 1, PAGES * PAGE_SIZE, LATENT + ROPE)
    seen = torch.zeros(BATCH, 1, 1, rows.shape[2], dtype=torch.bool, device=device)
    seen.scatter_(3, chosen[:, None].long(), True)
    dense = archflash.attention(
        q.transpose(1, 2), rows, rows[..., :LATENT], attn_mask=seen, scale=192**-0.5
    ).transpose(1, 2)
    same = torch.allclose(out.float(), dense.float(), atol=2e-2)
    print("the same as with a mask" if same else "not what a mask gives")
    return same


if __name__ == "__main__":
    raise SystemExit(not main())
