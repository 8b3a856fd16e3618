"""Measures calls with masks as data: every implementation of ours that takes them, PyTorch's SDPA
backends with a dense mask of the same meaning, and its compiled FlexAttention.

    python -m bench.masks [--only REGEX] [--candidates NAME,...] [--rounds N] [--output FOLDER]

The rows go to <gpu>.csv with `mask=KIND` among their features; bench.measured tells dispatch from
them who serves such calls the fastest. Exit status: 0 when all is measured, 1 when a result of ours
was wrong, 2 when nothing can be measured.

All buffer sets of a case share one mask, as the layers of a model do. Operations count for the
share of scores that lie in blocks which the mask does not hide (SHARES).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.candidates import Candidate, our_candidates, torch_candidates, torch_varlen
from bench.cases import MASKS_FILE, TORCH_DTYPES, Case, choose_cases, load_cases
from bench.correctness import Checker, Slice
from bench.results import MASK, PACKED, append_rows
from bench.run import cases_to_run, choose_candidates, open_results, run_case, short_parser, summary
from bench.timing import CudaLab

if TYPE_CHECKING:
    import torch

    Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

OURS = ("ampere", "hopper")
# torch-flash takes no mask, and torch-math stores the scores of all heads.
PEERS = ("torch-cudnn", "torch-efficient")
FLEX = "torch-flex"
DOCUMENTS = {"documents": 1024, "documents-256": 256}  # keys of a document, by kind of mask
HIDDEN = 0.3  # of the elements of a bool mask
SEEN, FEW_SEEN = 0.25, 0.1  # of the blocks of a table
MASK_BLOCK = 64  # rows and keys of a block of block_mask
# The part of all scores that lies in blocks which some query sees, by kind of mask.
SHARES: dict[str, Callable[[Case], float]] = {
    "none": lambda case: 1.0,
    "bool": lambda case: 1.0,
    "bool-heads": lambda case: 1.0,
    "added": lambda case: 1.0,
    "added-heads": lambda case: 1.0,
    "padding": lambda case: 1.0,
    "bias": lambda case: 1.0,
    "slopes": lambda case: 1.0,
    "blocks-64": lambda case: SEEN,
    "blocks-128": lambda case: SEEN,
    "blocks-64-few": lambda case: FEW_SEEN,
    "blocks-128-few": lambda case: FEW_SEEN,
    "documents": lambda case: min(1.0, DOCUMENTS[case.mask] / case.nk),
    "documents-256": lambda case: min(1.0, DOCUMENTS[case.mask] / case.nk),
}


@dataclass
class Mask:
    """The mask of a case, in the words of everyone who is measured.

    Args:
        options: of archflash.attention.
        dense: makes the attn_mask of PyTorch's SDPA; None for a call without a mask.
        flex: makes the options of FlexAttention.
        ends: where packed sequences end that are the same as the mask, from 0 on, int32; None
            where there are none.
    """

    options: dict[str, Any]
    dense: Callable[[], torch.Tensor | None]
    flex: Callable[[], dict[str, Any]]
    ends: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.dense = functools.cache(self.dense)


@functools.lru_cache(maxsize=2)  # a case, and the tiny one of the same kind
def mask_of(case: Case, device: str = "cuda") -> Mask:
    """Makes the mask of a case, the same in every run.

    Args:
        case: the shape and the kind of mask.
        device: torch device of its tensors.

    Returns:
        The mask; large tensors of peers are made when they are asked for.

    Raises:
        ValueError: there is no such kind of mask.
    """
    import torch

    generator = torch.Generator(device).manual_seed(2)
    kind, of_heads = case.mask.removesuffix("-heads"), case.mask.endswith(("-heads", "bias"))
    heads = case.hq if of_heads else 1
    shape = (case.b, heads, case.nq, case.nk)
    offset = case.nk - case.nq

    def of_head(h: Any) -> Any:
        return h if of_heads else 0

    if case.mask == "none":
        return Mask({}, lambda: None, dict)
    if kind == "bool":
        keep = torch.rand(shape, device=device, generator=generator) >= HIDDEN
        return Mask(
            {"attn_mask": keep},
            lambda: keep,
            lambda: flex_blocks(case, lambda b, h, i, j: keep[b, of_head(h), i, j], case.b, heads),
        )
    if case.mask == "padding":  # a batch of sequences of half to all of the keys
        lengths = torch.linspace(case.nk // 2, case.nk, case.b, device=device).int()
        seen = torch.arange(case.nk, device=device) < lengths[:, None, None, None]
        return Mask({"attn_mask": seen}, lambda: seen, dict)
    if case.mask == "bias":  # of each head, the same for all sequences
        dtype = getattr(torch, TORCH_DTYPES[case.dtype])
        bias = torch.randn((1, *shape[1:]), device=device, dtype=dtype, generator=generator)
        return Mask({"attn_mask": bias}, lambda: bias, dict)
    if kind == "added":
        dtype = getattr(torch, TORCH_DTYPES[case.dtype])
        added = torch.randn(shape, device=device, dtype=dtype, generator=generator)

        def add(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + added[b, of_head(h), i, j]

        return Mask({"attn_mask": added}, lambda: added, lambda: {"score_mod": add})
    if kind == "slopes":
        slopes = 2.0 ** (-8.0 * torch.arange(1, case.hq + 1, device=device) / case.hq)

        def slope(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score - slopes[h] * (i + offset - j).abs()

        def bias() -> torch.Tensor:
            rows, keys = (torch.arange(n, device=device) for n in (case.nq, case.nk))
            distance = (rows[:, None] + offset - keys).abs()
            dtype = getattr(torch, TORCH_DTYPES[case.dtype])
            return (-slopes[:, None, None] * distance).to(dtype)[None].expand(case.b, -1, -1, -1)

        return Mask({"alibi_slopes": slopes}, bias, lambda: {"score_mod": slope})
    if kind.startswith("blocks-"):
        size = int(kind.split("-")[1])
        share = SHARES[kind](case)
        rows, keys = -(-case.nq // size), -(-case.nk // size)
        table = torch.rand((1, case.hq, rows, keys), device=device, generator=generator) < share
        from archflash import masks

        given = masks.from_blocks(table, (size, size), case.nq, case.nk)
        return Mask(
            {"block_mask": given},
            lambda: widened(table, size, 0, case.nq)[..., : case.nk],
            lambda: flex_blocks(
                case, lambda b, h, i, j: table[0, h, i // size, j // size], 1, case.hq, size
            ),
        )
    if kind in DOCUMENTS:
        from archflash import masks

        size = DOCUMENTS[kind]
        ids = torch.arange(case.nk, device=device) // size
        of_rows = ids[offset:]

        def same(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = of_rows[i] == ids[j]
            return seen & (i + offset >= j) if case.causal else seen

        def dense() -> torch.Tensor:
            seen = of_rows[:, None] == ids
            return (seen.tril(offset) if case.causal else seen)[None, None]

        ends = torch.arange(0, case.nk + size, size, device=device).clamp(max=case.nk).int()
        return Mask(
            {"key_ranges": masks.documents(ids)[:, :, offset:]},
            dense,
            lambda: flex_blocks(case, same, None, None),
            ends if case.b == 1 and case.nq == case.nk else None,
        )
    raise ValueError(f"case {case.name!r}: no mask {case.mask!r}; there are {', '.join(SHARES)}")


def widened(table: torch.Tensor, size: int, first_row: int, end_row: int) -> torch.Tensor:
    """Rows of the bool mask that a table of blocks of `size` rows and keys is."""
    import torch

    rows = torch.arange(first_row, end_row, device=table.device) // size
    return table[:, :, rows].repeat_interleave(size, -1)


def flex_blocks(
    case: Case, keep: Callable[..., Any], batch: int | None, heads: int | None, size: int = 128
) -> dict[str, Any]:
    """The options of FlexAttention for a mask, with its table of blocks of `size`."""
    from torch.nn.attention.flex_attention import create_block_mask

    heads = None if heads == 1 else heads
    made = create_block_mask(keep, batch, heads, case.nq, case.nk, BLOCK_SIZE=size, device="cuda")
    # FlexAttention's tiles must divide its blocks; those that it chooses do not divide 64.
    tiles = {"kernel_options": {"BLOCK_M": size, "BLOCK_N": size}} if size < 128 else {}
    return {"block_mask": made, **tiles}


# --- candidates ---


def masked_candidates() -> list[Candidate]:
    """Everyone who serves masks as data, and archflash and PyTorch as they are chosen."""
    import torch

    import archflash

    def ours(name: str | None, case: Case) -> Call:
        forced: dict[str, Any] = {} if name is None else {"implementation": name}
        options = mask_of(case).options
        return functools.partial(archflash.attention, causal=case.causal, **options, **forced)

    def dense(case: Case) -> Call:
        mask = mask_of(case).dense()
        extra: dict[str, Any] = {"enable_gqa": True} if case.hq != case.hkv else {}
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(
            sdpa, attn_mask=mask, is_causal=case.causal and mask is None, **extra
        )

    replaced: dict[str, Any] = {
        "refuses": lambda case: None,
        "refuses_on": lambda case, device: None,
    }
    found = [
        dataclasses.replace(candidate, bind=functools.partial(ours, candidate.name), **replaced)
        for candidate in our_candidates()
        if candidate.name in OURS
    ]
    version = archflash.__version__
    for name, its_version, is_ours, attend in (
        ("hopper-packed", version, True, packed_hopper),
        ("torch-varlen", torch.__version__, False, packed_torch),
    ):
        bind = functools.partial(packed, attend=attend)
        found.append(
            Candidate(name, its_version, is_ours, bind, refuses=not_packed, features=PACKED)
        )
    found += [
        dataclasses.replace(candidate, bind=dense, **replaced)
        for candidate in torch_candidates()
        if candidate.name in PEERS
    ]
    found.append(Candidate(FLEX, torch.__version__, False, flex))
    found += [
        Candidate(
            "archflash", version, True, functools.partial(ours, None), features="chosen=archflash",
            exact=False,
        ),
        Candidate("torch", torch.__version__, False, dense, features="chosen=torch"),
    ]  # fmt: skip
    return found


def for_mask(candidate: Candidate, case: Case) -> Candidate:
    """A candidate whose rows name the mask of a case."""
    words = [word for word in (candidate.features, MASK + case.mask) if word]
    return dataclasses.replace(candidate, features=";".join(words))


def not_packed(case: Case) -> str | None:
    """Why a case has no packed sequences; None if it has."""
    if case.mask in DOCUMENTS and case.b == 1 and case.nq == case.nk:
        return None
    return "its mask is not that of packed sequences"


def packed(case: Case, attend: Callable[[Case, torch.Tensor], Call]) -> Call:
    """A case with its documents as packed sequences, which lie as they do in the case: each head's
    rows side by side. `attend` makes the function of packed tensors from where sequences end.
    """
    ends = mask_of(case).ends
    assert ends is not None  # otherwise not_packed() has refused the case
    inner = attend(case, ends)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return inner(*(x[0].transpose(0, 1) for x in (q, k, v))).transpose(0, 1)[None]

    return call


def packed_hopper(case: Case, ends: torch.Tensor) -> Call:
    """hopper, forced."""
    import archflash

    longest = min(DOCUMENTS[case.mask], case.nk)
    return functools.partial(
        archflash.attention, causal=case.causal, cu_seqlens_q=ends, cu_seqlens_k=ends,
        max_seqlen_q=longest, max_seqlen_k=longest, implementation="hopper",
    )  # fmt: skip


def packed_torch(case: Case, ends: torch.Tensor) -> Call:
    """PyTorch's operator for packed sequences."""
    longest = min(DOCUMENTS[case.mask], case.nk)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch_varlen(q, k, v, ends, ends, longest, longest, causal=case.causal)

    return call


@functools.lru_cache(maxsize=1)
def flex(case: Case) -> Call:
    """FlexAttention, compiled for a case; the first call compiles it."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if case.name == "tiny":
        raise RuntimeError("the host's time is not worth another compilation")
    torch._dynamo.reset()
    options = mask_of(case).flex()
    options |= {"enable_gqa": True} if case.hq != case.hkv else {}
    if case.causal and not options:
        raise RuntimeError("a causal mask alone is no mask as data")
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, **options)


# --- the check ---


class MaskChecker(Checker):
    """Compares outputs of a case with float64, with the mask of the case."""

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Slice | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        part_q, part_k, part_v, call = super()._call(q, k, v, part)
        options = dict(mask_of(self._case).options)
        if part is None:
            return part_q, part_k, part_v, call | options
        batch, head = part.batch, part.head
        rows = slice(part.first_row, part.end_row)

        def of_part(x: torch.Tensor) -> torch.Tensor:
            """The part of a tensor (batch or 1, heads or 1, ...)."""
            batch_here, head_here = min(batch, x.shape[0] - 1), min(head, x.shape[1] - 1)
            return x[batch_here : batch_here + 1, head_here : head_here + 1]

        if "attn_mask" in options:
            options["attn_mask"] = of_part(options["attn_mask"])[:, :, rows]
        if "key_ranges" in options:
            options["key_ranges"] = of_part(options["key_ranges"])[:, :, rows]
        if "alibi_slopes" in options:
            options["alibi_slopes"] = options["alibi_slopes"][head : head + 1]
            call["q_offset"] = self._case.nk - self._case.nq + part.first_row
        if "block_mask" in options:
            table = of_part(options.pop("block_mask")) != 0
            seen = widened(table, MASK_BLOCK, part.first_row, part.end_row)
            options["attn_mask"] = seen[..., : self._case.nk]
        return part_q, part_k, part_v, call | options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    parser = short_parser("bench.masks", __doc__)
    parser.add_argument("--candidates", metavar="NAME,...", help="only these (default: all)")
    options = parser.parse_args(argv)
    cases = cases_to_run(lambda: choose_cases(load_cases(MASKS_FILE), options.only))
    if cases is None:
        return 2

    import torch

    try:
        candidates = choose_candidates(masked_candidates(), options.candidates)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    lab = CudaLab()
    facts, path = open_results(lab, options.output)
    results = {}
    with torch.no_grad():
        for case in cases:
            measured = [for_mask(candidate, case) for candidate in candidates]
            result = run_case(
                lab, case, measured, facts, rounds=options.rounds, check=MaskChecker(case)
            )
            for row in result.rows:
                operations = case.flops() * SHARES[case.mask](case)
                row["tflops"] = f"{operations / float(row['p50_us']) / 1e6:.2f}"
            lab.release()
            append_rows(path, result.rows)
            results[case.name] = result
            print(
                f"{case.name}: "
                + ", ".join(f"{r['implementation']} {r['p50_us']}" for r in result.rows),
                flush=True,
            )
    print(summary(cases, results))
    return 1 if any(n in OURS for r in results.values() for n in r.wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
