"""How fast the simulator runs one CTA of the ampere and of the blackwell_dc kernel, and all cores
many: `python -m bench.simulator`. Simulated time says nothing about a GPU, so these numbers enter
no results file.
"""

from __future__ import annotations

import os

import torch

from archflash import sim

ROUNDS = 5
KEYS, HEAD_DIM = 1024, 128
# By implementation: queries of a CTA; million warp-instructions per second on one core, without the
# race check and with it. Most of what blackwell_dc takes are the products of tcgen05.
SUBJECTS = {"ampere": (64, {False: 5.0, True: 1.5}), "blackwell_dc": (256, {False: 1.5, True: 1.0})}


def best(implementation: str, heads: int, threads: int, race_check: bool) -> tuple[int, float]:
    """Warp-instructions and the least seconds of some runs of a bf16 kernel, a CTA for a head."""
    queries, _ = SUBJECTS[implementation]
    q = torch.randn(1, heads, queries, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    k = torch.randn(1, heads, KEYS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    reports = [
        sim.run(
            q,
            k,
            k,
            implementation=implementation,
            mode="lazy",
            race_check=race_check,
            threads=threads,
        ).report
        for _ in range(ROUNDS)
    ]
    assert all(report.ctas == heads for report in reports)
    return reports[0].total_instructions, min(report.seconds for report in reports)


def main() -> None:
    cores = os.cpu_count() or 1
    for implementation, (queries, floors) in SUBJECTS.items():
        print(
            f"{implementation}, bf16, D={HEAD_DIM}, {queries} queries x {KEYS} keys, "
            f"best of {ROUNDS}"
        )
        print("CTAs  threads  race check  warp-instructions  ms      M/s    at least")
        for race_check in (False, True):
            for heads, threads in ((1, 1), (2 * cores, 1), (2 * cores, cores)):
                count, seconds = best(implementation, heads, threads, race_check)
                floor = f"{floors[race_check]}" if heads == 1 else ""
                print(
                    f"{heads:4}  {threads:7}  {'on' if race_check else 'off':10}  {count:17}  "
                    f"{1e3 * seconds:6.2f}  {count / seconds / 1e6:5.2f}  {floor}".rstrip()
                )


if __name__ == "__main__":
    main()
