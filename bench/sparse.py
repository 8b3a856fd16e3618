"""Measures attention to listed rows (key_indices), over latent caches, packed rows and K and V as
they are given: our kernels beside PyTorch, which gathers the rows first.

    python -m bench.sparse [--only REGEX] [--rounds N] [--output FOLDER] [--gradients]

The rows go to sparse-<gpu>.csv: b lists of nk rows, whose bytes are those that gbps counts, for nq
queries of hq heads each. Tables of blocks are cases of bench.masks. With --gradients both passes
are timed, from the lists and with their mask, and printed only. Exit status: 0 when all is
measured, 1 when a result was wrong, 2 when nothing can be measured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.cases import Case
from bench.kvcache import Calls
from bench.results import append_rows, make_row, percentile
from bench.run import cases_to_run, open_results, short_parser
from bench.timing import CudaLab, median_clock, round_robin, warm_up

if TYPE_CHECKING:
    import torch

    Call = Callable[[], torch.Tensor]

ROWS = 65536  # of the cache, or of K and V
PAGE = 64
LIST = 2048
# Bytes of a row; 0: one of K and one of V.
FORMS = {"latent": 1152, "fp8_656": 656, "fp8_584": 584, "dense": 0}
OURS = ("hopper", "ampere")
AT_ONCE = 64  # queries whose rows PyTorch gathers at a time


@dataclass
class Lists:
    """Queries with lists of rows, and what is measured with them.

    Args:
        case: b lists of nk rows, each for nq queries, 1 or 64, of hq heads.
        form: of the rows, one of FORMS.
        device: torch device of the tensors.
        rows: of the cache.
    """

    case: Case
    form: str
    device: str = "cuda"
    rows: int = ROWS

    def __post_init__(self) -> None:
        import torch

        case, generator = self.case, torch.Generator(self.device).manual_seed(0)

        def rand(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, device=self.device, generator=generator)
            return made.to(torch.bfloat16)

        lists = torch.rand(case.b, self.rows, device=self.device, generator=generator)
        self.lists = lists.topk(case.nk).indices.int()
        self.q = rand(case.b, case.nq * case.hq, case.d)
        pages = self.rows // PAGE
        if self.form == "dense":
            self.k, self.v = rand(self.rows, case.d), rand(self.rows, case.dv)
            return
        if self.form == "latent":
            self.k = rand(self.rows, case.d)
            self.cache = self.k.reshape(pages, PAGE, 1, case.d)
        else:
            self.cache = self._packed(pages)
            from archflash._packed_rows import unpack

            rest, v = unpack(self.cache, self.form)
            whole = torch.cat([v, rest], -1) if self.form == "fp8_656" else v
            self.k = whole.reshape(self.rows, case.d)
        self.v = self.k[:, : case.dv]

    def _packed(self, pages: int) -> torch.Tensor:
        """Packed rows of random numbers, whose scales make them small."""
        import torch

        width = FORMS[self.form]
        data = torch.randint(0, 120, (pages, PAGE * width), device=self.device, dtype=torch.uint8)
        if self.form == "fp8_656":
            rows = data.reshape(pages, PAGE, width)
            scales = torch.full((pages, PAGE, 4), 2.0**-6, device=self.device)
            rows[..., 512:528] = scales.view(torch.uint8)
            rest = torch.randn(pages, PAGE, 64, device=self.device).bfloat16()
            rows[..., 528:] = rest.view(torch.uint8)
        else:
            rest = torch.randn(pages, PAGE, 64, device=self.device).bfloat16()
            rows = data[:, : PAGE * 576].view(pages, PAGE, 576)
            rows[..., 448:] = rest.view(torch.uint8)
            data[:, PAGE * 576 :] = 127 - 6  # exponents
        return data.reshape(pages, PAGE, 1, width)

    def calls(self) -> Iterator[tuple[str, str, Call]]:
        """Name, version and function of everyone that is measured."""
        import torch

        import archflash

        for name in (*OURS, None):
            yield name or "archflash", archflash.__version__, self._ours(name)
        yield "torch-gather", torch.__version__, self._gathered

    def _ours(self, name: str | None) -> Call:
        import archflash

        scale = self.case.d**-0.5
        if self.form == "dense":
            tensors = [x[None, None] for x in (self.k, self.v)]
            q = self.q.view(-1, self.case.hq, self.case.d).transpose(0, 1)[None]
            return lambda: archflash.attention(
                q, *tensors, key_indices=self.lists[None, None], scale=scale, implementation=name
            )[0].transpose(0, 1).reshape(self.q.shape)  # fmt: skip
        packed: dict[str, Any] = {} if self.form == "latent" else {"packed_rows": self.form}
        lists = self.lists[:, None, None]
        return lambda: archflash.attention_with_kvcache(
            self.q[:, None], self.cache, None, dv=self.case.dv, key_indices=lists, scale=scale,
            physical_indices=True, implementation=name, **packed,
        )[:, 0]  # fmt: skip

    def _gathered(self) -> torch.Tensor:
        """PyTorch's operations: rows are gathered, multiplied and weighed, in 16 bits."""
        import torch

        parts = []
        for q, lists in zip(*(torch.split(x, AT_ONCE) for x in (self.q, self.lists)), strict=True):
            k = self.k[lists.long()]
            v = k[..., : self.case.dv] if self.form != "dense" else self.v[lists.long()]
            weights = torch.softmax(q @ k.transpose(1, 2) * self.case.d**-0.5, -1)
            parts.append(weights @ v)
        return torch.cat(parts)

    def max_error(self, out: torch.Tensor) -> tuple[float, float]:
        """The largest difference from float64 of three queries, and the largest number there."""
        import torch

        some = torch.tensor([0, self.case.b // 2, self.case.b - 1], device=self.device)
        lists = self.lists[some].long()
        k, v = self.k[lists].double(), self.v[lists].double()
        scores = self.q[some].double() @ k.transpose(1, 2) * self.case.d**-0.5
        exact = torch.softmax(scores, -1) @ v
        return float((out[some].double() - exact).abs().max()), float(exact.abs().max())


def latent(name: str, queries: int, heads: int, form: str) -> tuple[Case, str]:
    d = 512 if form == "fp8_584" else 576
    return Case(name, "bf16", queries, heads, 1, 1, LIST, d, 512, False), form


def dense(name: str, lists: int, heads: int, rows: int, d: int) -> tuple[Case, str]:
    return Case(name, "bf16", lists, heads, 1, rows, LIST, d, d, False), "dense"


CASES = (
    latent("decode, 128 heads", 128, 128, "latent"),
    latent("decode, 16 heads", 128, 16, "latent"),
    latent("prefill, 128 heads", 4096, 128, "latent"),
    latent("decode, 128 heads, fp8_656", 128, 128, "fp8_656"),
    latent("prefill, 128 heads, fp8_656", 4096, 128, "fp8_656"),
    latent("decode, 128 heads, fp8_584", 128, 128, "fp8_584"),
    dense("16 heads share a head of k, d128", 1024, 16, 1, 128),
    dense("64 heads share a head of k, d128", 512, 64, 1, 128),
    dense("64 rows share a list, d128", 256, 1, 64, 128),
    dense("64 rows of 8 heads share a list, d128", 64, 8, 64, 128),
    dense("64 rows of 8 heads share a list, d64", 64, 8, 64, 64),
    dense("64 rows of 8 heads share a list, d256", 32, 8, 64, 256),
)


# Heads of q and of k, query rows and keys, lists (of one row or of 64), entries, d, dv.
GRADIENTS = (
    (32, 8, 8192, 128, 2048, 128, 128), (16, 16, 4096, 64, 2048, 128, 128),
    (128, 1, 4096, 4096, 2048, 192, 128), (128, 1, 4096, 4096, 2048, 128, 128),
    (64, 1, 4096, 4096, 2048, 128, 128), (64, 1, 4096, 4096, 2048, 64, 64),
    (16, 1, 4096, 4096, 2048, 128, 128), (16, 16, 4096, 4096, 128, 128, 128),
)  # fmt: skip


def differentiate(rounds: int) -> bool:
    """Prints the times of GRADIENTS. Whether the two ways agree."""
    import torch

    import archflash
    from archflash import _key_lists

    right = True
    for heads, heads_kv, rows, count, n, d, dv in GRADIENTS:
        sizes = ((heads, d), (heads_kv, d), (heads_kv, dv), (heads, dv))
        *leaves, dout = (
            torch.randn(1, h, rows, dim, device="cuda", dtype=torch.bfloat16) for h, dim in sizes
        )
        of_heads = 1 if count == rows else heads_kv
        lists = torch.rand(of_heads, count, rows, device="cuda").topk(n).indices.int()[None]
        leaves = [x.requires_grad_() for x in leaves]

        def both(masked: bool, given: tuple[Any, ...] = (leaves, lists, dout)) -> Any:
            leaves, lists, dout = given
            call = {"key_indices": lists}
            if masked:
                call = {"attn_mask": _key_lists.as_mask(lists, None, leaves[0], leaves[1], "bhnd")}
            out = archflash.attention(*leaves, **call)
            return torch.autograd.grad(out, leaves, dout)

        by_lists, by_mask = both(False), both(True)
        off = max(
            float((x - y).abs().max() / y.abs().max())
            for x, y in zip(by_lists, by_mask, strict=True)
        )
        right = right and off < 2**-6
        timed = {"lists": Calls(lambda: both(False)), "mask": Calls(lambda: both(True))}
        warm_up(timed, 0.1)
        us = {name: percentile(of, 0.5) for name, of in round_robin(timed, rounds).items()}
        print(
            f"{heads}/{heads_kv} heads, {rows} rows and keys, {count} lists of {n}, d {d}/{dv}, "
            f"us: lists {us['lists']:.0f}, mask {us['mask']:.0f}; they differ by {off:.1e}",
            flush=True,
        )
        del timed, by_lists, by_mask, leaves, lists, dout
        torch.cuda.empty_cache()
    return right


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the top of this file."""
    parser = short_parser("bench.sparse", __doc__)
    parser.add_argument("--gradients", action="store_true", help="time both passes")
    options = parser.parse_args(argv)
    forms = {case.name: form for case, form in CASES}
    wanted = re.compile(options.only or "")
    cases = cases_to_run(lambda: [case for case, _ in CASES if wanted.search(case.name)])
    if cases is None:
        return 2

    import torch

    import archflash

    if options.gradients:
        return int(not differentiate(options.rounds))
    lab = CudaLab()
    facts, path = open_results(lab, options.output, "sparse-")
    wrong = False
    with torch.no_grad():
        for case in cases:
            lists = Lists(case, forms[case.name])
            timed: dict[str, Calls] = {}
            versions, errors = {}, {}
            for name, version, call in lists.calls():
                try:
                    errors[name], largest = lists.max_error(call())
                except archflash.ForcedImplementationError as error:
                    print(f"{case.name}: {name} not run: {str(error).splitlines()[0]}", flush=True)
                    continue
                # Two units in the last place of bfloat16, and as much for P's own rounding.
                if not errors[name] <= 2**-6 * max(largest, 2**-6):
                    print(f"{case.name}: {name} WRONG: off by {errors[name]:.2e}", flush=True)
                    wrong = True
                timed[name], versions[name] = Calls(call), version
            warm_up(timed, 0.1)
            samples = round_robin(timed, options.rounds)
            clock, form = median_clock([lab.clock_mhz()]), forms[case.name]
            rows = []
            for name, us in samples.items():
                row = make_row(
                    facts, case, implementation=name, version=versions[name],
                    features=f"key_lists={form}", clocks_mhz=clock, samples_us=us,
                    max_err=errors[name], host_us=float("nan"),
                )  # fmt: skip
                gathered = case.b * case.nk * (FORMS[form] or 4 * case.d)
                row["gbps"] = f"{gathered / percentile(us, 0.5) / 1e3:.1f}"
                rows.append(row)
            append_rows(path, rows)
            told = (
                f"{r['implementation']} {r['p50_us']} ({r['tflops']}, {r['gbps']})" for r in rows
            )
            print(f"{case.name}, us (TFLOP/s, GB/s): " + ", ".join(told), flush=True)
            del timed, lists
            lab.release()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
