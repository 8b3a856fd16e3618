"""Attention of one sequence over many GPUs (context parallelism), on torch.distributed.

    import archflash.distributed as afd

    shards = afd.Shards.zigzag(n, ranks)
    q, k, v = (afd.shard(x, shards, dim=2) for x in (q, k, v))
    out = afd.attention(q, k, v, shards=shards, causal=True)

docs/distributed.md has the whole.
"""

from archflash.distributed._agree import GroupError
from archflash.distributed._attention import attention, explain
from archflash.distributed._cost import METHODS, Estimate, Explanation, Speeds
from archflash.distributed._shards import Shards, positions, shard, unshard

__all__ = [
    "METHODS",
    "Estimate",
    "Explanation",
    "GroupError",
    "Shards",
    "Speeds",
    "attention",
    "explain",
    "positions",
    "shard",
    "unshard",
]
