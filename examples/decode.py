"""Generates text with a tiny model from a paged KV cache.

Two prompts of different lengths share one pool of pages, which are handed out as sequences grow.
Each prompt goes through the model once (prefill); then each step adds one token to both sequences
(decoding). Both are calls of archflash.attention_with_kvcache, which appends the new keys and
values, rotated, to the cache in place. The weights are random, so the text is no language: what
counts is that the same tokens come out as from a model that keeps no cache, which `--check`
computes.

    python examples/decode.py                          on a GPU, or by PyTorch's operations
    python examples/decode.py --implementation ampere  without a GPU: ampere's on the simulator
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

import archflash

PROMPTS = ("Once upon a time", "Pages")
PAGE_SIZE = 16
VOCABULARY = 128  # ASCII


class Model:
    """One layer of attention with rotary embedding and grouped heads, and a layer that mixes."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.heads, self.heads_kv, self.d = 4, 2, 32
        width = self.heads * self.d
        generator = torch.Generator().manual_seed(7)

        def weights(rows: int, columns: int) -> Tensor:
            x = torch.randn(rows, columns, generator=generator) / rows**0.5
            return x.to(device, dtype)

        self.embedding = weights(VOCABULARY, width) * VOCABULARY**0.5
        self.to_q = weights(width, width)
        self.to_k, self.to_v = (weights(width, self.heads_kv * self.d) for _ in "kv")
        self.mix = weights(width, width)
        self.to_token = weights(width, VOCABULARY)
        angles = torch.arange(512)[:, None] / 10000 ** (torch.arange(self.d // 2) / (self.d // 2))
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream ``(..., width)`` of tokens, and q, k, v ``(..., heads, d)``."""
        x = self.embedding[tokens]
        q = (x @ self.to_q).unflatten(-1, (self.heads, self.d))
        k, v = ((x @ to).unflatten(-1, (self.heads_kv, self.d)) for to in (self.to_k, self.to_v))
        return x, q, k, v

    def next_tokens(self, x: Tensor, attended: Tensor) -> Tensor:
        """The most likely token behind each row."""
        hidden = x + torch.tanh((x + attended.flatten(-2)) @ self.mix)
        return (hidden @ self.to_token).argmax(-1)


class PagedCache:
    """A pool of pages, and the pages of each sequence. Free pages hold NaN: it must not matter."""

    def __init__(self, model: Model, sequences: int, most_rows: int) -> None:
        most_pages = -(-most_rows // PAGE_SIZE)
        shape = (sequences * most_pages, PAGE_SIZE, model.heads_kv, model.d)
        self.k, self.v = (model.to_k.new_full(shape, torch.nan) for _ in "kv")
        self.free = list(range(shape[0]))[::-1]
        device = model.to_k.device
        self.table = torch.zeros(sequences, most_pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.lengths_here = [0] * sequences  # the same numbers, which the host knows anyway

    def grow(self, sequence: int, rows: int) -> None:
        """Hands out the pages that a sequence needs for so many more rows."""
        before = self.lengths_here[sequence]
        for page in range(-(-before // PAGE_SIZE), -(-(before + rows) // PAGE_SIZE)):
            self.table[sequence, page] = self.free.pop()
        self.lengths_here[sequence] += rows


def step(
    model: Model, cache: PagedCache, which: slice, tokens: Tensor, implementation: str | None
) -> Tensor:
    """Puts tokens ``(sequences, n)`` behind sequences. Returns the next token of each."""
    x, q, k, v = model.project(tokens)
    for sequence in range(*which.indices(len(cache.lengths_here))):
        cache.grow(sequence, tokens.shape[1])
    out = archflash.attention_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths[which], page_table=cache.table[which],
        k_new=k, v_new=v, rotary_cos=model.cos, rotary_sin=model.sin, causal=True,
        implementation=implementation,
    )  # fmt: skip
    cache.lengths[which] += tokens.shape[1]
    return model.next_tokens(x, out)[:, -1]


def generate(model: Model, steps: int, implementation: str | None) -> list[str]:
    """The text of each prompt and `steps` more tokens."""
    device = model.to_k.device
    texts = [[ord(letter) for letter in prompt] for prompt in PROMPTS]
    cache = PagedCache(model, len(texts), max(map(len, texts)) + steps)
    first = [
        step(model, cache, slice(i, i + 1), torch.tensor([tokens], device=device), implementation)
        for i, tokens in enumerate(texts)
    ]
    new = [torch.cat(first)]
    for _ in range(steps - 1):
        new.append(step(model, cache, slice(None), new[-1][:, None], implementation))
    for tokens, more in zip(texts, torch.stack(new, 1).tolist(), strict=True):
        tokens += more
    return ["".join(map(chr, tokens)) for tokens in texts]


def generate_without_cache(model: Model, steps: int) -> list[str]:
    """The same by computing every token anew in each step, in PyTorch alone."""
    texts = []
    for prompt in PROMPTS:
        tokens = [ord(letter) for letter in prompt]
        for _ in range(steps):
            x, q, k, v = model.project(torch.tensor(tokens, device=model.to_k.device))
            q, k = (rotated(y, model.cos, model.sin) for y in (q, k))
            q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            tokens.append(int(model.next_tokens(x, out[0].transpose(0, 1))[-1]))
        texts.append("".join(map(chr, tokens)))
    return texts


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows ``(n, heads, d)`` rotated by their positions, the halves of a row together."""
    one, other = x.float().chunk(2, -1)
    cos, sin = cos[: len(x), None], sin[: len(x), None]
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1).to(x.dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generates text from a paged KV cache.")
    parser.add_argument("--steps", type=int, default=24, help="tokens to generate; default 24")
    parser.add_argument("--implementation", help="forces one of archflash's implementations")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=here, help=f"where the model is; default {here}")
    parser.add_argument("--check", action="store_true", help="compare with a model without cache")
    asked = parser.parse_args(arguments)
    model = Model(asked.device, torch.float16)
    with torch.no_grad():
        texts = generate(model, asked.steps, asked.implementation)
        for text in texts:
            print(repr(text))
        if not asked.check:
            return 0
        same = texts == generate_without_cache(model, asked.steps)
    print("the same tokens as without a cache" if same else "OTHER tokens than without a cache")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
