"""Trains a small language model whose attention is archflash.attention, called by its name.

The model predicts the next byte of the sources of Python's standard library. Documents lie behind
one another in packed rows (cu_seqlens), so that no row sees another document; heads of k and v are
shared by pairs of query heads; attention weights can be dropped. `--compare` trains the same model
with the same batches through PyTorch's attention too, once more with other initial weights, which
shows how far two curves lie apart that differ in nothing that matters.

    python examples/train.py                            on a GPU, 1,000 steps
    python examples/train.py --steps 20                 on a CPU, by PyTorch's operations
    python examples/train.py --tiny --implementation ampere   ampere's kernels on the simulator
    python examples/train.py --compare --steps 10000 --out bench/results/training-h200.csv
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import archflash

COLUMNS = ("date", "gpu", "torch", "attention", "steps", "loss", "last_steps_mean")
TEXT_BYTES = 2_000_000


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of its batches, and the dtype of q, k and v."""

    layers: int = 2
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    rows: int = 8192  # of all documents of a batch
    longest: int = 512  # rows of a document
    dtype: torch.dtype = torch.bfloat16


ON_CPU = Size(rows=512, longest=128)
TINY = Size(layers=1, heads=2, heads_kv=1, head_dim=16, rows=24, longest=12)


class Batch(NamedTuple):
    """Packed documents: the bytes, the bytes that follow, places in their documents, and ends."""

    tokens: Tensor
    wanted: Tensor
    places: Tensor
    ends: Tensor


# q, k and v of packed documents, (rows, heads, head dim), and where the documents end -> the output
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def by_archflash(size: Size, dropout: float, implementation: str | None) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        out: Tensor = archflash.attention(
            q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=size.longest,
            max_seqlen_k=size.longest, dropout_p=dropout, implementation=implementation,
        )  # fmt: skip
        return out

    return attention


def by_pytorch(size: Size, dropout: float) -> Attention:
    """PyTorch's attention, with a mask that keeps documents apart."""

    def attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        rows = torch.arange(len(q), device=q.device)
        document = torch.bucketize(rows, ends[1:].long(), right=True)
        seen = (document[:, None] == document) & (rows[:, None] >= rows)
        shared = size.heads // size.heads_kv
        keys, values = (x.repeat_interleave(shared, 1).transpose(0, 1)[None] for x in (k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=seen, dropout_p=dropout
        )
        return out[0].transpose(0, 1)

    return attention


class Block(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.size, self.attention = size, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (size.heads + 2 * size.heads_kv) * size.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        size = self.size
        qkv = self.qkv(self.norms[0](x)).to(size.dtype).unflatten(-1, (-1, size.head_dim))
        q, k, v = qkv.split((size.heads, size.heads_kv, size.heads_kv), 1)
        attended = self.attention(q, k, v, ends).flatten(1)
        x = x + self.out(attended.to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(size.longest, width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        x = self.bytes(batch.tokens) + self.places(batch.places)
        for block in self.blocks:
            x = block(x, batch.ends)
        scores: Tensor = self.head(self.norm(x))
        return scores


def text(size: int = TEXT_BYTES) -> Tensor:
    """Bytes of the sources of Python's standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(source.read_bytes() for source in sources)[:size]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(size: Size, steps: int, device: torch.device) -> Iterable[Batch]:
    """Documents of random lengths that fill the rows of a batch: the same in every run."""
    data = text()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        lengths: list[int] = []
        while (left := size.rows - sum(lengths)) > 0:
            length = int(torch.randint(1, size.longest + 1, (1,), generator=generator))
            lengths.append(min(length, left))
        starts = torch.randint(len(data) - size.longest - 1, (len(lengths),), generator=generator)
        places = torch.cat([torch.arange(length) for length in lengths])
        sizes = torch.tensor(lengths)
        read = starts.repeat_interleave(sizes) + places
        ends = F.pad(sizes.cumsum(0), (1, 0)).int()
        yield Batch(*(x.to(device) for x in (data[read], data[read + 1], places, ends)))


def train(
    attention: Attention, size: Size, steps: int, device: torch.device, seed: int = 0
) -> Tensor:
    """The loss of each step (steps,), on the CPU."""
    torch.manual_seed(seed)
    model = Model(size, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for batch in batches(size, steps, device):
        loss = F.cross_entropy(model(batch), batch.wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def rows_of(name: str, losses: Tensor, every: int, gpu: str) -> Iterable[dict[str, object]]:
    """Rows of the CSV: the loss of every so many steps, and the mean since the last one."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for end in range(every, len(losses) + 1, every):
        yield {
            "date": date,
            "gpu": gpu,
            "torch": torch.__version__,
            "attention": name,
            "steps": end,
            "loss": f"{losses[end - 1]:.4f}",
            "last_steps_mean": f"{losses[end - every : end].mean():.4f}",
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, help="default: 1,000 on a GPU, 20 elsewhere")
    parser.add_argument("--implementation", help="of archflash; its own choice by default")
    parser.add_argument("--device", help="default: the GPU, if there is one")
    parser.add_argument("--dropout", type=float, default=0.1, help="of attention weights")
    parser.add_argument("--tiny", action="store_true", help="a model that the simulator can run")
    parser.add_argument("--compare", action="store_true", help="train with PyTorch's attention too")
    parser.add_argument("--every", type=int, default=100, help="steps of a row of the CSV")
    parser.add_argument("--out", type=Path, metavar="CSV", help="append the curves to it")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    steps = asked.steps or (1000 if on_gpu else 20)
    size = TINY if asked.tiny else Size() if on_gpu else ON_CPU
    dropout = 0.0 if asked.compare else asked.dropout  # which random numbers would differ
    ours = by_archflash(size, dropout, asked.implementation)
    runs = [(f"archflash {asked.implementation or 'own choice'}", ours, 0)]
    if asked.compare:
        runs += [(name, by_pytorch(size, dropout), seed)
                 for name, seed in (("torch", 0), ("torch, other weights", 1))]  # fmt: skip
    rows = []
    for name, attention, seed in runs:
        if on_gpu:
            train(attention, size, 1, device, seed)  # the clock is not about loading kernels
        start = time.perf_counter()
        losses = train(attention, size, steps, device, seed)
        seconds = time.perf_counter() - start
        last = losses[-min(asked.every, steps) :].mean()
        print(f"{name}: loss {losses[0]:.4f}, of the last steps {last:.4f}, {seconds:.1f} s")
        gpu = torch.cuda.get_device_name(device) if on_gpu else "CPU"
        rows += rows_of(name, losses, asked.every, gpu)
    if asked.out is not None:
        is_new = not asked.out.exists()
        with asked.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
