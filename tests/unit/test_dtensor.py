"""DTensors: every operator split among two processes gives what one process gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from archflash import _sharding

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"
)

TWO_PROCESSES = """
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import archflash
from archflash import _sharding

rank = int(os.fork() == 0)  # one process imports torch for both
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
WHOLE, BATCH, HEADS = Replicate(), Shard(0), Shard(1)


def put(x, placement):
    return None if x is None else distribute_tensor(x, mesh, [placement])


def same(name, given, wanted, placement=None):
    assert isinstance(given, DTensor), name
    if placement is not None:
        assert given.placements == (placement,), (name, given.placements)
    torch.testing.assert_close(given.full_tensor(), wanted, msg=lambda m: f"{name}: {m}")


def rand(*shape):
    return torch.randn(shape)


# --- attention and its gradients ---

q, k, v = rand(4, 6, 9, 8), rand(4, 2, 11, 8), rand(4, 2, 11, 8)
sinks, slopes, mask, grad = rand(6), rand(6).abs(), rand(4, 1, 9, 11), rand(4, 6, 9, 8)


def attend(q, k, v, sinks, mask, slopes, grad, **options):
    q, k, v, sinks, mask = (x.clone().detach().requires_grad_() for x in (q, k, v, sinks, mask))
    out, lse = archflash.attention(
        q, k, v, sinks=sinks, attn_mask=mask, alibi_slopes=slopes, return_lse=True, **options
    )
    (out * grad).sum().backward()
    return out, lse, q.grad, k.grad, v.grad, sinks.grad, mask.grad


NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks", "dmask")
for options in ({"causal": True}, {"window": (4, 2), "softcap": 5.0}):
    wanted = attend(q, k, v, sinks, mask, slopes, grad, **options)
    for way in (WHOLE, BATCH, HEADS):
        places = {
            WHOLE: (WHOLE,) * 7,
            BATCH: (BATCH, BATCH, BATCH, WHOLE, BATCH, WHOLE, BATCH),
            HEADS: (HEADS, HEADS, HEADS, BATCH, WHOLE, BATCH, HEADS),
        }[way]
        given = (q, k, v, sinks, mask, slopes, grad)
        found = attend(*(put(x, p) for x, p in zip(given, places)), **options)
        for name, x, y in zip(NAMES, found, wanted):
            same(f"{name} {way} {options}", x, y, way if name == "out" else None)

# Rows, partial sums and heads that do not divide are redistributed; one head of k serves all.
plain = archflash.attention(q, k, v, causal=True)
same("rows", archflash.attention(*(put(x, Shard(2)) for x in (q, k, v)), causal=True), plain)
halves = [DTensor.from_local(x / 2, mesh, [Partial()], run_check=False) for x in (q, k, v)]
same("partial", archflash.attention(*halves, causal=True), plain)
three = [x[:, :3] for x in (q, rand(4, 3, 11, 8), rand(4, 3, 11, 8))]
same("3 heads", archflash.attention(*(put(x, HEADS) for x in three)), archflash.attention(*three))
one = (q, k[:, :1].contiguous(), v[:, :1].contiguous())
mixed = [put(one[0], HEADS), put(one[1], WHOLE), put(one[2], WHOLE)]
same("one head of k", archflash.attention(*mixed), archflash.attention(*one), HEADS)
swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
same(
    "bnhd",
    archflash.attention(*(put(x, Shard(2)) for x in swapped), layout="bnhd", causal=True),
    plain.transpose(1, 2),
    Shard(2),
)
lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
packed = [x[0].transpose(0, 1)[:9].contiguous() for x in (q, k, v)]
cu = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "causal": True}
cu_d = cu | {name: put(lengths, WHOLE) for name in ("cu_seqlens_q", "cu_seqlens_k")}
same(
    "packed",
    archflash.attention(*(put(x, HEADS) for x in packed), **cu_d),
    archflash.attention(*packed, **cu),
    HEADS,
)
ranges = archflash.masks.sliding_window_with_global(9, 11, left=3, global_keys=2)
same(
    "ranges",
    archflash.attention(*(put(x, BATCH) for x in (q, k, v)), key_ranges=put(ranges, WHOLE)),
    archflash.attention(q, k, v, key_ranges=ranges),
    BATCH,
)

lists = torch.tensor([0, 3, -1, 10], dtype=torch.int32).repeat(1, 1, 9, 1)
same(
    "lists",
    archflash.attention(*(put(x, BATCH) for x in (q, k, v)), key_indices=put(lists, WHOLE)),
    archflash.attention(q, k, v, key_indices=lists),
    BATCH,
)
for way in (BATCH, HEADS):
    of_parts, of_wholes = [
        [x.clone().requires_grad_() for x in tensors]
        for tensors in ([put(x, way) for x in (q, k, v)], (q, k, v))
    ]
    (archflash.attention(*of_wholes, key_indices=lists) * grad).sum().backward()
    found = archflash.attention(*of_parts, key_indices=put(lists, WHOLE))
    (found * put(grad, way)).sum().backward()
    for x, y in zip(of_parts, of_wholes):
        same("gradients of lists", x.grad, y.grad, way)

# --- gradients by themselves, and float8 ---

out, lse = archflash.attention(q, k, v, sinks=sinks, return_lse=True)
wanted = archflash.attention_backward(grad, q, k, v, out, lse, sinks=sinks)
into = [put(torch.ones_like(x), HEADS) for x in (q, k, v)]
given = [put(x, HEADS) for x in (grad, q, k, v, out, lse)]
found = archflash.attention_backward(
    *given, sinks=put(sinks, BATCH), dq=into[0], dk=into[1], dv=into[2], accumulate=True
)
for x, y, z in zip(into, wanted, found):
    assert x is z
    same("accumulated", x, y + 1, HEADS)
same("dsinks", found[3], wanted[3])
eight = [archflash.quantize_fp8(x.repeat(1, 1, 1, 2), per="block") for x in (q, k, v)]
wanted = archflash.attention(
    *(x for x, _ in eight), **{f"{n}_descale": x for n, (_, x) in zip("qkv", eight)}
)
for way in (BATCH, HEADS):
    local = [x.chunk(2, way.dim)[rank].contiguous() for x, _ in eight]
    descales = {f"{n}_descale": put(x, way) for n, (_, x) in zip("qkv", eight)}
    found = archflash.attention(*(DTensor.from_local(x, mesh, [way]) for x in local), **descales)
    same("float8", found, wanted, way)

if hasattr(torch, "float8_e8m0fnu"):
    wide = [x.repeat(1, 1, 1, 4) for x in (q, k, v)]
    eight = [archflash.quantize_mxfp8(x, dim=dim) for x, dim in zip(wide, (-1, -1, -2))]
    wanted = archflash.attention(
        *(x for x, _ in eight), **{f"{n}_descale": x for n, (_, x) in zip("qkv", eight)}
    )
    for way in (BATCH, HEADS):
        parts = [[y.chunk(2, way.dim)[rank].contiguous() for y in pair] for pair in eight]
        given = [[DTensor.from_local(y, mesh, [way]) for y in pair] for pair in parts]
        descales = {f"{n}_descale": x for n, (_, x) in zip("qkv", given)}
        found = archflash.attention(*(x for x, _ in given), **descales)
        same("MXFP8", found, wanted, way)

# --- dropout: the same state everywhere, or a sentence ---

sharded = [put(x, HEADS) for x in (q, k, v)]
state = torch.tensor([3, 4])
same(
    "dropout",
    archflash.attention(*sharded, dropout_p=0.5, rng_state=put(state, WHOLE)),
    archflash.attention(q, k, v, dropout_p=0.5, rng_state=state),
)
try:
    archflash.attention(*sharded, dropout_p=0.5)
    raise SystemExit("dropout without a state was not refused")
except archflash.UnsupportedError as error:
    assert "replicated DTensor" in str(error)

# --- PyTorch's function and the drop-in ---

sdpa = F.scaled_dot_product_attention(q, q, q, is_causal=True)
found = archflash.scaled_dot_product_attention(*[put(q, HEADS)] * 3, is_causal=True)
same("drop-in", found, sdpa, HEADS)
with archflash.enabled():
    for way in (BATCH, HEADS):
        a, b = (x.clone().requires_grad_() for x in (q, put(q, way)))
        wanted = F.scaled_dot_product_attention(a, a, a, is_causal=True)
        found = F.scaled_dot_product_attention(b, b, b, is_causal=True)
        same("enabled", found, wanted, way)
        (wanted * grad).sum().backward()
        (found * put(grad, way)).sum().backward()
        same("gradient while enabled", b.grad, a.grad)

# --- caches ---

kn, vn, rows = rand(4, 2, 2, 8), rand(4, 2, 2, 8), torch.tensor([0, 3, 7, 9], dtype=torch.int32)
for way in (WHOLE, BATCH, HEADS):
    for new in ((), (kn, vn)):
        caches = [x.clone() for x in (k, v)]
        caches_d = [put(x, way) for x in caches]
        appended = {"k_new": kn, "v_new": vn} if new else {}
        appended_d = {name: put(x, WHOLE) for name, x in appended.items()}
        given = {"causal": True, "layout": "bhnd", "return_lse": True}
        wanted = archflash.attention_with_kvcache(
            q[:, :, :2].contiguous(), *caches, cache_seqlens=rows, **appended, **given
        )
        at = BATCH if way == BATCH else WHOLE
        found = archflash.attention_with_kvcache(
            put(q[:, :, :2].contiguous(), way), *caches_d, cache_seqlens=put(rows, at),
            **appended_d, **given,
        )
        for x, y in zip(found, wanted):
            same(f"cache {way} {bool(new)}", x, y, way)
        for x, y in zip(caches_d, caches):
            same(f"what the cache holds {way} {bool(new)}", x, y, way)
try:
    archflash.attention_with_kvcache(
        put(q[:, :, :2], WHOLE), *(put(x, Shard(2)) for x in (k, v)),
        cache_seqlens=put(rows, WHOLE), k_new=put(kn, WHOLE), v_new=put(vn, WHOLE), layout="bhnd",
    )
    raise SystemExit("caches split by rows were appended to")
except ValueError as error:
    assert "appends to them" in str(error)

# --- merging and FP8 ---

if _sharding._takes_lists():
    prefix = rand(1, 2, 5, 8)
    same(
        "shared prefix",
        archflash.attention_with_shared_prefix(
            put(q[:, :, :1], HEADS), *(put(x, HEADS) for x in (prefix, prefix, k, v)),
            cache_seqlens=put(rows, WHOLE), layout="bhnd",
        ),
        archflash.attention_with_shared_prefix(
            q[:, :, :1], prefix, prefix, k, v, cache_seqlens=rows, layout="bhnd"
        ),
    )
    outs, lses = [rand(4, 6, 9, 8) for _ in range(2)], [rand(4, 6, 9) for _ in range(2)]
    wanted = archflash.merge_attention(outs, lses)
    for way in (WHOLE, BATCH, HEADS, Shard(2), Shard(3)):
        of_lse = WHOLE if way == Shard(3) else way
        placed = [put(x, way) for x in outs], [put(x, of_lse) for x in lses]
        found = archflash.merge_attention(*placed)
        for x, y in zip(found, wanted):
            same(f"merge {way}", x, y)
    leaves = [put(x, HEADS).requires_grad_() for x in outs]
    merged, _ = archflash.merge_attention(leaves, [put(x, HEADS) for x in lses])
    merged.sum().backward()
    share = torch.softmax(torch.stack(lses), 0)[0, ..., None].expand(4, 6, 9, 8)
    same("gradient of merging", leaves[0].grad, share.contiguous())
    swapped = [x.transpose(1, 2).contiguous() for x in outs]
    found = archflash.merge_attention(
        [put(x, Shard(2)) for x in swapped], [put(x, HEADS) for x in lses], layout="bnhd"
    )
    same("merge bnhd", found[0], wanted[0].transpose(1, 2), Shard(2))

for per in ("tensor", "head", "block"):
    values, descale = archflash.quantize_fp8(q, per=per)
    for way in (WHOLE, BATCH, HEADS, Shard(2)):
        found = archflash.quantize_fp8(put(q, way), per=per)
        assert torch.equal(found[0].float().full_tensor(), values.float()), (per, way)
        assert torch.equal(found[1].full_tensor(), descale), (per, way)

# --- tensor parallelism ---


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, n * 8) for n in (4, 2, 2))
        self.out = torch.nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        return self.out(archflash.attention(q, k, v, causal=True, layout="bnhd").flatten(2))


x = rand(2, 7, 16)
for as_dtensors in (True, False):
    torch.manual_seed(1)
    whole, parallel = Block(), Block()
    parallel.load_state_dict(whole.state_dict())
    columns = ColwiseParallel(use_local_output=not as_dtensors)
    parallelize_module(
        parallel, mesh, {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()}
    )
    whole(x).square().sum().backward()
    parallel(x).square().sum().backward()
    torch.testing.assert_close(parallel(x), whole(x))
    for name, weight in parallel.named_parameters():
        same(name, weight.grad, whole.get_parameter(name).grad)

# --- what functional collectives return, which waits when it is used ---

import torch.distributed._functional_collectives as collectives

gathered = [
    collectives.all_gather_tensor(x.chunk(2)[rank].contiguous(), 0, dist.group.WORLD)
    for x in (k, v)
]
assert isinstance(gathered[0], collectives.AsyncCollectiveTensor)
out, lse = archflash.attention(q, k, v, causal=True, return_lse=True)
torch.testing.assert_close(archflash.attention(q, *gathered, causal=True), out)
wanted = archflash.attention_backward(grad, q, k, v, out, lse, causal=True)
found = archflash.attention_backward(grad, q, *gathered, out, lse, causal=True)
for x, y in zip(found, wanted):
    torch.testing.assert_close(x, y)

# --- plain tensors beside DTensors ---

def refused(what, call):
    try:
        call()
    except TypeError as error:
        assert f"{what} is a plain tensor and" in str(error), error
    else:
        raise AssertionError(what)


one = put(q, WHOLE)
refused("k", lambda: archflash.attention(one, k, put(v, WHOLE)))
refused("q", lambda: archflash.attention(q, k, v, sinks=put(torch.zeros(q.shape[1]), WHOLE)))
refused("attn_mask", lambda: archflash.attention(one, one, one, attn_mask=torch.ones(9, 9)))
refused("lse", lambda: archflash.attention_backward(one, one, one, one, one, lse))
if _sharding._takes_lists():
    refused("outs[1]", lambda: archflash.merge_attention([one, q], [put(lse, WHOLE)] * 2))
with torch.no_grad():
    refused("cache_seqlens", lambda: archflash.attention_with_kvcache(
        one, one, one, cache_seqlens=torch.ones(q.shape[0], dtype=torch.int32), layout="bhnd"))
with implicit_replication():
    same("replicated", archflash.attention(one, k, v), archflash.attention(q, k, v), WHOLE)

# --- kernels, on the simulator ---

small = [x[:1, :2, :, :8].half() for x in (q, k, v)]
leaves, leaves_d = [x.clone() for x in small], [put(x, HEADS) for x in small]
for tensors in (leaves, leaves_d):
    for x in tensors:
        x.requires_grad_()
    out = archflash.attention(*tensors, causal=True, implementation="ampere")
    out.float().square().sum().backward()
for x, y in zip(leaves_d, leaves):
    same("gradient of a kernel", x.grad, y.grad, HEADS)

# --- a compiled call ---

torch._dynamo.config.capture_scalar_outputs = True
call = torch.compile(
    lambda *x: archflash.attention(*x, causal=True), backend="aot_eager", fullgraph=True
)
same("compiled", call(*sharded), plain, HEADS)


def decode(q, k, v, new, rows):
    return archflash.attention_with_kvcache(
        q, k, v, k_new=new, v_new=new, cache_seqlens=rows, layout="bhnd", causal=True
    )


given = (q[:, :, :2].contiguous(), k, v, kn)
wanted = decode(*(x.clone() for x in given), rows)
call = torch.compile(decode, backend="aot_eager", fullgraph=True)
same("compiled cache", call(*(put(x, HEADS) for x in given), put(rows, WHOLE)), wanted, HEADS)
dist.destroy_process_group()
print("done", rank)
if rank == 0:
    os.wait()
"""


def test_heads_are_split_where_every_device_gets_as_many() -> None:
    assert _sharding._splits_evenly(8, [4])
    assert _sharding._splits_evenly(2, [2, 2])  # by one dimension, not by both
    for heads, mesh in ((3, [2]), (1, [2]), (6, [4]), (6, [2, 2])):
        assert not _sharding._splits_evenly(heads, mesh)


@pytest.mark.slow
def test_two_processes_give_what_one_does(tmp_path: Path) -> None:
    from tests.distributed_worker import run_with_forks

    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    said = run_with_forks([str(script), str(tmp_path / "store")], tmp_path, seconds=600)
    assert {"done 0", "done 1"} <= set(said.splitlines()), said[-3000:]
