"""Times models from end to end, with PyTorch's own attention and with archflash in its place.

    python -m bench.end_to_end [--only REGEX] [--rounds N] [--output FOLDER]

Weights and inputs are random and bf16. The models call
`torch.nn.functional.scaled_dot_product_attention`, which archflash serves through
`archflash.enable()`. Each case runs in four ways, eager or compiled and without archflash or with
it, which take turns in every round; the median counts. Small models, whose training the host
limits, run eagerly, and also call `archflash.attention` and `compat.flash_attn` by name. Outputs
that differ by more than rounding explains are an error. Writes <gpu>-end-to-end.json, in which
cases left out by --only keep what an earlier run measured. Exit status 2 when nothing can be
measured.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import environment
from bench.results import RESULTS_FOLDER, percentile

Way = tuple[str, str]
WAYS: tuple[Way, ...] = tuple(
    (how, provider) for how in ("eager", "compiled") for provider in ("torch", "archflash")
)
BY_NAME_WAYS: tuple[Way, ...] = tuple(
    ("eager", provider) for provider in ("torch", "archflash", "by name", "compat")
)
WARM_UPS = 3
SECTION_MS = 30.0  # of one measured section, at least one call
# The root mean square of the difference of two outputs, as a share of that of the output. Kernels
# that round to bf16 in another order differ by about 0.01 behind four layers.
LARGEST_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; by default with the layers of Llama 3 8B, fewer of them."""

    layers: int = 4
    width: int = 4096
    heads: int = 32
    heads_kv: int = 8
    hidden: int = 14336

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


LLAMA = Sizes()
HALF_B = Sizes(layers=24, width=896, heads=14, heads_kv=2, hidden=4864)


# Keys and values (batch, heads_kv, keys, head_dim): two tensors, because a compiled model copies
# views of one tensor before it writes to them.
Cache = tuple[Tensor, Tensor]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Sdpa:
    """How models call attention by PyTorch's function. A model has rows before heads, q, k and v
    (batch, rows, heads, head_dim), or all in one (batch, rows, 3, heads, head_dim) for attention of
    all rows on all. Each provider is called as its users would; the output is (batch, rows, heads,
    head_dim).
    """

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    @classmethod
    def attend_packed(cls, qkv: Tensor) -> Tensor:
        return cls.attend(*qkv.unbind(2), causal=False)


class ByName(Sdpa):
    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        import archflash

        out: Tensor = archflash.attention(q, k, v, causal=causal, layout="bnhd")
        return out


class FlashAttn(Sdpa):
    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        from archflash.compat.flash_attn import flash_attn_func

        out: Tensor = flash_attn_func(q, k, v, causal=causal)
        return out

    @classmethod
    def attend_packed(cls, qkv: Tensor) -> Tensor:
        from archflash.compat.flash_attn import flash_attn_qkvpacked_func

        out: Tensor = flash_attn_qkvpacked_func(qkv)
        return out


PROVIDERS = {"torch": Sdpa, "archflash": Sdpa, "by name": ByName, "compat": FlashAttn}
serving: type[Sdpa] = Sdpa


def use(provider: str) -> None:
    """Makes a provider the one that serves attention: PyTorch, archflash in place of PyTorch's
    operators, archflash.attention ("by name"), or the functions of compat.flash_attn ("compat").
    """
    global serving
    import archflash

    if provider == "archflash":
        archflash.enable()
    else:
        archflash.disable()
    serving = PROVIDERS[provider]


class EncoderLayer(nn.Module):
    """Of a ViT or BERT: layer norm, attention of all rows on all, an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1))
        x = x + self.out(serving.attend_packed(qkv).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DecoderLayer(nn.Module):
    """RMS norm, rotary embedding, grouped heads, a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.split = (sizes.heads, sizes.heads_kv, sizes.heads_kv)
        self.head_dim = sizes.head_dim
        self.norm, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, sum(self.split) * self.head_dim, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x (batch, rows, width), whose keys and values become the last rows of the cache."""
        heads = self.qkv(self.norm(x)).unflatten(2, (-1, self.head_dim))
        q, k, v = heads.split(self.split, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if cache is not None:
            for written, new in zip(cache, (k, v), strict=True):
                written[:, :, -x.shape[1] :] = new.transpose(1, 2)
            k, v = (of_heads.transpose(1, 2) for of_heads in cache)
        y = serving.attend(q, k, v, causal=cache is None)
        x = x + self.out(y.flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Decoder layers alone: no embedding and no head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))

    def forward(self, x: Tensor, first: int = 0, caches: Sequence[Cache] | None = None) -> Tensor:
        """`first`: the position of x's first row; a cache for each layer."""
        place = torch.arange(first, first + x.shape[1], device=x.device)
        turns = torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
        angle = (place[:, None] * 500_000.0**-turns)[:, None]  # the same for all heads
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if caches is None else caches[number])
        return x


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: attention of all rows on all and an MLP, both modulated
    by a vector.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        """x (batch, rows, width), vector (batch, width)."""
        modulation = self.modulation(F.silu(vector))[:, None].chunk(6, -1)
        shift, scale, gate, shift2, scale2, gate2 = modulation
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(2, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        x = x + gate * self.out(y.transpose(1, 2).flatten(2))
        y = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        unit: what `count` counts.
        count: tokens or blocks in one call.
        module: the model; it is compiled, too.
        arguments: what it is called with.
        gradients: whether those of the weights are computed, too.
        ways: in which it is timed.
    """

    unit: str
    count: int
    module: nn.Module
    arguments: tuple[Any, ...]
    gradients: bool = False
    ways: tuple[Way, ...] = WAYS


def rand(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def placed(module: nn.Module, device: str) -> nn.Module:
    return module.to(device=device, dtype=torch.bfloat16)


def decoder(device: str, sizes: Sizes, batch: int, rows: int, keys: int = 0) -> Case:
    """Prefill of `rows`, or a decoding step with a cache of so many keys."""
    shape = (batch, sizes.heads_kv, keys, sizes.head_dim)
    caches = [(rand(device, *shape), rand(device, *shape)) for _ in range(sizes.layers)]
    arguments = (rand(device, batch, rows, sizes.width), keys - rows, caches) if keys else (
        rand(device, batch, rows, sizes.width),
    )  # fmt: skip
    return Case("tokens/s", batch * rows, placed(Decoder(sizes), device), arguments)


def training(device: str, sizes: Sizes, batch: int, rows: int) -> Case:
    case = decoder(device, sizes, batch, rows)
    return Case(case.unit, case.count, case.module, case.arguments, gradients=True)


def small_training(case: Case) -> Case:
    return replace(case, gradients=True, ways=BY_NAME_WAYS)


def encoder(device: str, layers: int, width: int, heads: int, batch: int, rows: int) -> Case:
    module = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
    return Case("rows/s", batch * rows, placed(module, device), (rand(device, batch, rows, width),))


def diffusion(device: str, heads: int, rows: int, head_dim: int) -> Case:
    width = heads * head_dim
    block = placed(DiffusionBlock(heads, head_dim), device)
    return Case("blocks/s", 1, block, (rand(device, 1, rows, width), rand(device, 1, width)))


CASES: dict[str, Callable[[str], Case]] = {
    "prefill of 8,192, four layers of Llama 8B": lambda on: decoder(on, LLAMA, 1, 8192),
    "decoding, batch 8, cache of 8,192, four layers": lambda on: decoder(on, LLAMA, 8, 1, 8192),
    "training, 4 x 4,096, four layers, forward and backward": (
        lambda on: training(on, LLAMA, 4, 4096)
    ),
    "DiT block, 24 heads of 128, 4,608 rows": lambda on: diffusion(on, 24, 4608, 128),
    "training ViT-B/16, batch 8": lambda on: small_training(encoder(on, 12, 768, 12, 8, 197)),
    "training BERT-base, 4 x 512": lambda on: small_training(encoder(on, 12, 768, 12, 4, 512)),
    "training a 0.5B decoder, 1 x 1,024": lambda on: small_training(decoder(on, HALF_B, 1, 1024)),
}


def step(case: Case, module: Callable[..., Tensor]) -> Tensor:
    """One call of a case. Returns the output, or a gradient where those are computed."""
    if not case.gradients:
        with torch.no_grad():
            return module(*case.arguments)
    module(*case.arguments).float().square().mean().backward()
    weight = next(case.module.parameters())
    found = weight.grad
    assert found is not None
    for parameter in case.module.parameters():
        parameter.grad = None
    return found


def difference(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, as a share of that of what is expected."""
    wide = expected.double()
    return float((found.double() - wide).square().mean().sqrt() / wide.square().mean().sqrt())


def section_ms(call: Callable[[], object], count: int) -> float:
    """Milliseconds of a call on the device, over so many calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Times a case in its ways.

    Args:
        case: what is timed.
        rounds: measured sections of each way.

    Returns:
        What the result file says of the case.

    Raises:
        ArithmeticError: outputs of the ways differ by more than rounding explains.
    """
    modules: dict[str, Callable[..., Tensor]] = {"eager": case.module}
    if ("compiled", "torch") in case.ways:
        modules["compiled"] = torch.compile(case.module)
    counts: dict[Way, int] = {}
    worst, expected = 0.0, None
    for way in case.ways:
        use(way[1])
        for _ in range(WARM_UPS):
            found = step(case, modules[way[0]])
        expected = found.clone() if expected is None else expected
        worst = max(worst, difference(found, expected))
        once = section_ms(partial(step, case, modules[way[0]]), 1)
        counts[way] = max(1, round(SECTION_MS / once))
    if not worst <= LARGEST_DIFFERENCE:
        raise ArithmeticError(f"outputs differ by {worst:.3f} of their root mean square")
    samples: dict[Way, list[float]] = {way: [] for way in case.ways}
    for number in range(rounds):
        # In turns forwards and backwards: what ran before decides how warm the GPU is.
        for way in case.ways if number % 2 == 0 else reversed(case.ways):
            use(way[1])
            step(case, modules[way[0]])  # switching forgets what was decided
            samples[way].append(section_ms(partial(step, case, modules[way[0]]), counts[way]))
    use("torch")
    figures = {
        f"{how}, {provider}": {
            "per_second": round(case.count * 1e3 / percentile(ms, 0.5), 2),
            "p20_ms": round(percentile(ms, 0.2), 4),
            "p50_ms": round(percentile(ms, 0.5), 4),
            "p80_ms": round(percentile(ms, 0.8), 4),
        }
        for (how, provider), ms in samples.items()
    }
    return {"unit": case.unit, "difference": round(worst, 4), "ways": figures}


def lines_of(cases: dict[str, Any]) -> list[str]:
    """What was measured."""
    lines = []
    for name, case in cases.items():
        ways = (f"{way} {found['per_second']:,.1f}" for way, found in case["ways"].items())
        lines.append(f"{name} ({case['unit']}): {'; '.join(ways)}")
    return lines


def replace_cases(path: Path, cases: dict[str, Any]) -> None:
    """Writes cases to a result file; those that it has besides them stay."""
    before = json.loads(path.read_text()) if path.exists() else {}
    known = [name for name in CASES if name in before or name in cases]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: (before | cases)[name] for name in known}, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement; see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.end_to_end", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match")
    parser.add_argument("--rounds", type=int, default=9, help="measured sections of each way")
    parser.add_argument("--output", type=Path, default=RESULTS_FOLDER, metavar="FOLDER")
    options = parser.parse_args(argv)
    if environment.measures_nothing():
        return 2

    import archflash

    chosen = {name: make for name, make in CASES.items() if re.search(options.only, name)}
    if not chosen:
        print(
            f"no case matches --only {options.only!r}; cases: {'; '.join(CASES)}", file=sys.stderr
        )
        return 2
    facts = environment.run_facts(environment.open_nvml())
    facts |= {"version": archflash.__version__, "rounds": options.rounds}
    torch.manual_seed(0)
    cases = {}
    for name, make in chosen.items():
        archflash.stats(reset=True)
        found = measure(make("cuda"), options.rounds)
        counted = archflash.stats()
        cases[name] = {**facts, **found, "served": counted.served, "declined": counted.declined}
        torch.cuda.empty_cache()
    print(" ".join(f"{name}={value}" for name, value in facts.items()))
    print("\n".join(lines_of(cases)))
    for name, case in cases.items():
        print(f"{name}: served {case['served']}, declined {case['declined']}")
    path = options.output / f"{environment.gpu_slug(facts['gpu'])}-end-to-end.json"
    replace_cases(path, cases)
    print(f"\nwritten to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
