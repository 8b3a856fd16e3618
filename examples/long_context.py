"""Trains a small language model on a sequence that lies on several GPUs: context parallelism.

Each rank holds some rows of the sequence in all layers, and archflash.distributed.attention is the
only place where they meet. The weights are the same on all ranks, and their gradients are added up,
as those of any parameter under data parallelism. The model predicts the next byte of the sources of
Python's standard library.

    torchrun --nproc-per-node 4 examples/long_context.py             on GPUs, 131,072 rows
    torchrun --nproc-per-node 2 examples/long_context.py --check     on a CPU by gloo, 256 rows

`--check` also trains the same model in one process, and compares the losses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import archflash
import archflash.distributed as afd

HEADS, HEADS_KV = 4, 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # "bnhd"


class Block(nn.Module):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.head_dim = head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (HEADS + 2 * HEADS_KV) * head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.head_dim))
        x = x + self.out(attention(*qkv.split((HEADS, HEADS_KV, HEADS_KV), 2)).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, rows: int, head_dim: int, layers: int) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(head_dim) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.bytes(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, attention)
        scores: Tensor = self.head(x)
        return scores


def train(
    text: Tensor, asked: argparse.Namespace, device: torch.device, parallel: bool
) -> list[float]:
    """The loss of each step, of all ranks together."""
    rows, shards = asked.rows, "zigzag"
    torch.manual_seed(0)
    model = Model(rows, asked.head_dim, asked.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = afd.positions(rows, shards, device=device) if parallel else torch.arange(rows)
    positions = positions.to(device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"causal": True, "layout": "bnhd", "implementation": asked.implementation}
        if not parallel:
            return archflash.attention(q, k, v, **options)
        return afd.attention(q, k, v, shards=shards, method=asked.method, **options)

    losses = []
    for step in range(asked.steps):
        read = text[step * rows : step * rows + rows + 1].to(device)
        tokens, wanted = read[:-1][None], read[1:][None]
        if parallel:
            tokens, wanted = (afd.shard(x, shards, dim=1) for x in (tokens, wanted))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            scores = model(tokens, positions, attention)
        # The mean over all rows: ranks may hold different numbers of them.
        loss = F.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
        loss = loss / rows
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        total = loss.detach().clone()
        if parallel:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(total)
        optimizer.step()
        losses.append(total.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=131072 if on_gpu else 256)
    parser.add_argument("--steps", type=int, default=20 if on_gpu else 3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64 if on_gpu else 8)
    parser.add_argument("--method", default="auto", help="of archflash.distributed.attention")
    parser.add_argument("--implementation", help="of archflash; its own choice by default")
    parser.add_argument("--check", action="store_true", help="train in one process, too")
    asked = parser.parse_args()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    data = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = (data * (1 + asked.steps * asked.rows // len(data)))[: asked.steps * asked.rows + 1]
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    losses = train(text, asked, device, parallel=True)
    if rank == 0:
        print(f"{asked.rows} rows on {dist.get_world_size()} ranks: loss {losses[0]:.3f} to "
              f"{losses[-1]:.3f}")  # fmt: skip
    if asked.check and rank == 0:
        alone = train(text, asked, device, parallel=False)
        largest = max(abs(x - y) for x, y in zip(losses, alone, strict=True))
        print(f"one process: loss {alone[0]:.3f} to {alone[-1]:.3f}, a difference of {largest:.0e}")
        if largest > (3e-2 if on_gpu else 1e-4):
            raise SystemExit("the losses differ")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
