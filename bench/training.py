"""Trains a small language model through archflash and through PyTorch's attention, with the same
initial weights and the same batches, and writes the curves of the loss.

    python -m bench.training --out bench/results/training-h200.csv      # 10,000 steps on a GPU
    python -m bench.training --steps 20 --implementation simt --device cpu --tiny

The model predicts the next byte of the sources of Python's standard library. A step (forward,
backward, AdamW) is one CUDA graph on a GPU. The curve of PyTorch with other initial weights shows
how far two curves lie apart that differ in nothing that matters.
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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import archflash

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
COLUMNS = ("date", "gpu", "torch", "attention", "steps", "loss", "last_steps_mean")
BYTES = 2_000_000  # of text


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of its batches."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    context: int = 256
    batch: int = 32
    dtype: torch.dtype = torch.bfloat16  # of q, k and v


TINY = Size(layers=1, heads=1, head_dim=16, context=12, batch=1, dtype=torch.float32)


def text(size: int = BYTES) -> Tensor:
    """Bytes of the sources of Python's standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(source.read_bytes() for source in sources)[:size]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Block(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.size, self.attention = size, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        heads = (batch, rows, 3, self.size.heads, self.size.head_dim)
        qkv = self.qkv(self.norms[0](x)).to(self.size.dtype).view(heads).permute(2, 0, 3, 1, 4)
        attended = self.attention(*qkv.unbind(0)).transpose(1, 2).reshape(batch, rows, width)
        x = x + self.out(attended.to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(size.context, width)
        self.blocks = nn.Sequential(*(Block(size, attention) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.positions(place))))


def train(
    attention: Attention, size: Size, steps: int, device: torch.device, seed: int = 0
) -> Tensor:
    """The loss of each step."""
    torch.manual_seed(seed)
    model = Model(size, attention).to(device)
    graphs = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.01, capturable=graphs, fused=graphs or None
    )
    data = text().to(device)
    generator = torch.Generator().manual_seed(1)  # the same batches whatever the model
    starts = torch.randint(
        len(data) - size.context - 1, (steps, size.batch), generator=generator
    ).to(device)
    losses = torch.zeros(steps, device=device)
    number = torch.zeros(1, dtype=torch.long, device=device)
    columns = torch.arange(size.context + 1, device=device)

    def step() -> None:
        rows = data[starts[number][0][:, None] + columns]
        scores = model(rows[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.index_copy_(0, number, loss.detach()[None])
        number.add_(1)

    if not graphs:
        for _ in range(steps):
            step()
        return losses
    # A graph is captured from a model that has stepped before: these steps count.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(steps - 3):
        graph.replay()
    torch.cuda.synchronize()
    return losses


def by_archflash(implementation: str) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = archflash.attention(q, k, v, causal=True, implementation=implementation)
        return out

    return attention


def by_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--implementation", default="ampere", help="of archflash")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that the simulator can run")
    parser.add_argument("--every", type=int, default=100, help="steps of a row of the CSV")
    parser.add_argument("--out", type=Path, help="the CSV to append to")
    asked = parser.parse_args(arguments)
    device = torch.device(asked.device)
    size = TINY if asked.tiny else Size()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    curves: dict[str, Tensor] = {}
    for name, attention, seed in (
        (f"archflash {asked.implementation}", by_archflash(asked.implementation), 0),
        ("torch", by_pytorch, 0),
        ("torch, other weights", by_pytorch, 1),
    ):
        start = time.perf_counter()
        curves[name] = train(attention, size, asked.steps, device, seed).cpu()
        last = curves[name][-min(asked.every, asked.steps) :].mean()
        seconds = time.perf_counter() - start
        print(f"{name}: loss of the last steps {last:.4f}, {seconds:.1f} s")
    if asked.out is None:
        return
    is_new = not asked.out.exists()
    with asked.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        for name, losses in curves.items():
            writer.writerows(rows_of(name, losses, asked.every, gpu))


if __name__ == "__main__":
    main()
