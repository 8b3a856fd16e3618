"""What `archflash show` shows: the attention weights of some heads, and how far each implementation
is from float64 on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import archflash
from archflash import _dispatch, reference
from archflash._errors import ArchflashError
from examples.minilm import model

SYNTHETIC_ROWS = 64  # queries and keys of the synthetic heads, and their head dimension
SYNTHETIC = ("local", "strided", "global anchors", "blocks")
FAVOURED = 6.0  # the score of a key that a synthetic head looks at; the others have 0


@dataclass(frozen=True)
class Heads:
    """Some heads over one sequence.

    Attributes:
        title: what they are, such as "layer 1".
        names: of the heads.
        q, k, v: (1, heads, n, d) float32 on the CPU.
        weights: (heads, n, n) float64: the softmax of the scaled scores.
    """

    title: str
    names: tuple[str, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Errors:
    """How far one implementation is from float64 on some heads.

    Attributes:
        implementation: its name.
        where: dtype and device, such as "bfloat16, simulated as on A100".
        by_position: (n,) largest absolute difference in any head.
        by_head: (heads,) largest absolute difference at any position.
        report: the verdict of the error rule.
    """

    implementation: str
    where: str
    by_position: Tensor
    by_head: Tensor
    report: reference.ErrorReport


@dataclass(frozen=True)
class Compared:
    """Every implementation on the same heads.

    Attributes:
        heads: what they computed.
        errors: of those that serve the call.
        refused: why the others do not, by name.
    """

    heads: Heads
    errors: tuple[Errors, ...]
    refused: dict[str, str]


@dataclass(frozen=True)
class Shown:
    """All that is shown.

    Attributes:
        sentence: that the model read; "" without the model.
        tokens: the model's tokens; () without the model.
        layers: the model's heads, a layer each.
        synthetic: the synthetic heads.
        compared: the implementations on one layer of the model, and on the synthetic heads.
    """

    sentence: str
    tokens: tuple[str, ...]
    layers: tuple[Heads, ...]
    synthetic: Heads
    compared: tuple[Compared, ...]


def make_heads(title: str, names: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Heads with their weights in float64. q, k, v: (1, heads, n, d)."""
    scores = q[0].double() @ k[0].double().transpose(1, 2) / q.shape[-1] ** 0.5
    return Heads(title, tuple(names), q, k, v, scores.softmax(-1))


def synthetic_heads() -> Heads:
    """Four heads of 64 rows that look at what their names say.

    Keys are multiples of unit vectors, so that each query can be the row of scores that it should
    get. Values are random.
    """
    n = SYNTHETIC_ROWS
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    anchors = (j % 32 == 0) | (i % 32 == 0)  # every row sees the anchors, which see every row
    patterns = ((i - j).abs() <= 3, (i - j) % 8 == 0, anchors, i // 16 == j // 16)
    q = torch.stack([pattern * FAVOURED for pattern in patterns])[None]
    k = (torch.eye(n) * n**0.5).expand(1, len(patterns), n, n).contiguous()
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    return make_heads("synthetic heads", SYNTHETIC, q, k, v)


def model_heads(folder: Any, sentence: str) -> tuple[tuple[str, ...], tuple[Heads, ...]]:
    """The heads of the demo's model while it reads a sentence.

    Args:
        folder: that has the model, from `model.find_weights`.
        sentence: any text of at most 512 tokens.

    Returns:
        The tokens, and the heads of each layer.

    Raises:
        model.ModelError: the model cannot be loaded, or the sentence is too long for it.
    """
    tokenizer, encoder = model.load_model(folder)
    encoded = tokenizer.encode(sentence)
    ids = torch.tensor(encoded.ids)
    model.check_tokens(ids, torch.tensor([len(ids)]), encoder.config)
    layers: list[Heads] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        names = [f"head {number}" for number in range(1, q.shape[1] + 1)]
        heads = make_heads(f"layer {layer + 1}", names, q, k, v)
        layers.append(heads)
        return (heads.weights @ v[0].double()).float().transpose(0, 1)

    with torch.inference_mode():
        encoder(ids, torch.tensor([0, len(ids)], dtype=torch.int32), attend)
    return tuple(encoded.tokens), tuple(layers)


def compare(heads: Heads, names: Sequence[str], device: torch.device) -> Compared:
    """Runs implementations on some heads and compares each with float64 on the same inputs.

    Args:
        heads: what to compute.
        names: implementations. simt computes in float32, the others in bfloat16.
        device: where tensors are; on the CPU kernels run on the simulator.
    """
    errors, refused = [], {}
    for name in names:
        dtype = torch.float32 if name == "simt" else torch.bfloat16
        q, k, v = (x.to(device, dtype) for x in (heads.q, heads.k, heads.v))
        try:
            with warnings.catch_warnings():  # `where` says that the simulator runs
                warnings.filterwarnings("ignore", message="archflash: tensors are on the CPU")
                out = archflash.attention(q, k, v, implementation=name)
        except ArchflashError as error:
            refused[name] = " ".join(str(error).split())
            continue
        expected, _ = reference.attention(q, k, v)
        difference = (out.double() - expected.double()).abs()[0].cpu()
        where = str(dtype).removeprefix("torch.")
        if device.type != "cpu":
            where += f", {torch.cuda.get_device_name(device)}"
        elif name == "torch":
            where += ", CPU"
        else:
            where += f", simulated as on {_dispatch.simulated_device(name).name}"
        errors.append(
            Errors(
                name,
                where,
                difference.amax(dim=(0, 2)),
                difference.amax(dim=(1, 2)),
                reference.check(out, expected, reference.baseline(q, k, v)),
            )
        )
    return Compared(heads, tuple(errors), refused)


def describe(compared: Compared) -> list[str]:
    """The errors as text: a line for each implementation."""
    lines = [
        f"{compared.heads.title}: largest difference from float64",
        f"  {'implementation':20}{'error':>10}{'allowed':>10}  {'position':>8}  {'head':<16}where",
    ]
    for found in compared.errors:
        report = found.report
        position, head = int(found.by_position.argmax()), int(found.by_head.argmax())
        verdict = "" if report.ok else "  BREAKS THE ERROR RULE"
        lines.append(
            f"  {found.implementation:20}{report.max_error:10.2e}{report.bound:10.2e}  "
            f"{position:8}  {compared.heads.names[head]:<16}{found.where}{verdict}"
        )
    lines += [f"  {name:20}did not run: {why}" for name, why in compared.refused.items()]
    return lines
