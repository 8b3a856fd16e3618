"""divisor.h and equal_tiles.cuh, compiled for the host: their quotients are those of divisions."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.host_code import compiled, needs_compiler, printed

LARGEST = 2**31 - 1
# Each line that it reads is a divisor and a number, or a call as fields of AttentionParams with the
# rows of a tile and a number. It prints the quotients.
PROGRAM = """
#include <cstdio>
#include "common/device/equal_tiles.cuh"
using namespace archflash;
using namespace archflash::device;

int main() {
  long long by, x, batch, heads, heads_per_kv, nq, group, block_q;
  for (char kind; std::scanf(" %c", &kind) == 1;) {
    if (kind == 'd') {
      if (std::scanf("%lld %lld", &by, &x) != 2) return 1;
      std::printf("%d\\n", make_divisor(by).quotient((int)x));
    } else {
      if (std::scanf("%lld %lld %lld %lld %lld %lld %lld", &batch, &heads, &heads_per_kv, &nq,
                     &group, &block_q, &x) != 7)
        return 1;
      AttentionParams params{};
      params.batch = (int)batch, params.heads_q = (int)heads, params.nq = (int)nq;
      params.heads_per_kv = (int)heads_per_kv, params.order.heads_per_group = (int)group;
      const TileDivisors divisors = make_tile_divisors(params, (int)block_q);
      for (const Divisor& divisor : {divisors.tiles_of_group, divisors.heads_of_group,
                                     divisors.heads_of_last, divisors.heads_of_sequence,
                                     divisors.heads_of_kv})
        std::printf("%d ", divisor.quotient((int)x));
      std::printf("\\n");
    }
  }
}
"""

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(PROGRAM, tmp_path_factory.mktemp("divisor"))


def answers(program: Path, lines: list[str]) -> list[list[int]]:
    rows = [list(map(int, words)) for words in printed(program, "\n".join(lines))]
    assert len(rows) == len(lines)
    return rows


def test_quotients_are_exact(program: Path) -> None:
    """Also for the numbers beside multiples, where a multiplier that is off shows first."""
    generator = random.Random(0)
    divisors = {*range(1, 200), LARGEST, *(generator.randrange(1, LARGEST) for _ in range(200))}
    divisors |= {2**bits + offset for bits in range(2, 31) for offset in (-1, 0, 1)}
    pairs = []
    for by in divisors:
        largest = LARGEST // by * by
        near = {0, 1, by - 1, by, 2 * by - 1, largest - 1, largest, LARGEST}
        near |= {generator.randrange(LARGEST // by + 1) * by - 1 for _ in range(8)}
        pairs += [(by, x) for x in near if 0 <= x <= LARGEST]
    quotients = answers(program, [f"d {by} {x}" for by, x in pairs])
    assert [quotient for (quotient,) in quotients] == [x // by for by, x in pairs]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # batch, heads, heads that share a head of K, rows, heads of a group, rows of a tile
        ((2, 6, 3, 1000, 4, 128), (4 * 8, 4, 4, 6, 3)),
        ((1, 7, 1, 128, 3, 128), (3, 3, 1, 7, 1)),
        ((2, 7, 7, 129, 4, 64), (4 * 3, 4, 2, 7, 7)),
        ((1, 4, 2, 1, 9, 256), (4, 4, 4, 4, 2)),  # one group has all heads
    ],
    ids=str,
)
def test_a_call_has_these_divisors(
    program: Path, call: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    numbers = range(60)
    lines = [" ".join(map(str, ("c", *call, number))) for number in numbers]
    assert answers(program, lines) == [[x // by for by in expected] for x in numbers]
