"""What a call over ranks refuses before anything is sent, on a group of one rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import archflash
import archflash.distributed as afd
from archflash.distributed import _shards

Q = torch.randn(1, 4, 8, 16, generator=torch.manual_seed(0))
K = Q[:, :2]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wrapped(Tensor):
    """A subclass, whose operations could mean anything."""


def on(device: str) -> Tensor:
    return torch.empty(1, 4, 8, 16, device=device)


INT32 = torch.int32
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layout": "hnd"}, ValueError, "layout is 'hnd': it must be 'bhnd' or 'bnhd'"),
    ({"q": Q.as_subclass(Wrapped)}, TypeError, "q is Wrapped: it must be a plain tensor"),
    ({"k": K[0]}, ValueError, "k has shape (2, 8, 16): it must have 4 dimensions"),
    ({"cu_seqlens": [0, 8]}, ValueError, "q has shape (1, 4, 8, 16): it must have 3 dimensions "
                                         "with cu_seqlens"),
    ({"v": K.int()}, TypeError, "v has dtype torch.int32: it must be float32"),
    ({"k": K.half()}, TypeError, "k is torch.float16 on cpu, and q torch.float32 on cpu"),
    ({"k": on("meta")}, TypeError, "k is torch.float32 on meta"),
    ({"k": K[:, :, :7], "v": K[:, :, :7]}, ValueError, "q has 1 sequences of 8 rows"),
    ({"v": K[:, :, :7]}, ValueError, "v has shape (1, 2, 7, 16) and k (1, 2, 8, 16)"),
    ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "q has 4 heads, which is no multiple of k's 3"),
    ({"k": Q[:, :0], "v": Q[:, :0]}, ValueError, "q has 4 heads, which is no multiple of k's 0"),
    ({"window": 4}, TypeError, "window is 4: it must be a pair"),
    ({"window": (1, 2, 3)}, TypeError, "window is (1, 2, 3): it must be a pair"),
    ({"window": (2.5, 0)}, TypeError, "window left is 2.5"),
    ({"key_ranges": [[0, 8]]}, TypeError, "key_ranges must be an int32 tensor"),
    ({"key_ranges": torch.zeros(1, 1, 8, 1, 2)}, TypeError, "key_ranges must be an int32 tensor"),
    ({"key_ranges": torch.zeros(1, 1, 8, 2, dtype=INT32)}, ValueError,
     "key_ranges has shape (1, 1, 8, 2): it must be (batch or 1"),
    ({"key_ranges": torch.zeros(1, 3, 8, 1, 2, dtype=INT32)}, ValueError,
     "key_ranges has shape (1, 3, 8, 1, 2): it must be (1 or 1, 4 or 1, 8 or 1, ranges, 2)"),
]  # fmt: skip
ONLY_CALLED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"method": "tree"}, ValueError, "method is 'tree': it must be 'auto', "),
    ({"method": "hybrid"}, archflash.UnsupportedError, "needs a mesh of two dimensions"),
    ({"implementation": "wmma"}, archflash.ForcedImplementationError, "is called 'wmma'"),
    ({"shards": "diagonal"}, ValueError, "shards is 'diagonal': it must be"),
    ({"shards": 3}, TypeError, "shards is 3: it must be a name, Shards or positions"),
    ({"shards": torch.arange(7)}, ValueError, "shards are positions of shape (7,)"),
    ({"shards": torch.arange(8)[None]}, ValueError, "shards are positions of shape (1, 8)"),
    ({"shards": afd.Shards.zigzag(16, 2)}, ValueError, "16 rows over 2 ranks, but there are 8"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "said"), REFUSED + ONLY_CALLED, ids=lambda x: "")
def test_a_call_that_does_not_fit_is_refused_with_the_ranks_name(
    given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        afd.attention(**{"q": Q, "k": K, "v": K, **given})
    assert torch.isfinite(afd.attention(Q, K, K)).all()  # the group goes on


@pytest.mark.parametrize(("given", "kind", "said"), REFUSED, ids=lambda x: "")
def test_explain_refuses_what_a_call_refuses(
    given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        afd.explain(**{"q": Q, "k": K, "v": K, "ranks": 2, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [({"ranks": 0}, "ranks is 0"), ({"ranks": (2, 0)}, "ranks is (2, 0)"),
     ({"ranks": (2, 2, 2)}, "ranks is (2, 2, 2)"),
     ({"ranks": 2, "shards": torch.arange(8)}, "shards is tensor(")],
)  # fmt: skip
def test_explain_names_what_is_no_group(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        afd.explain(Q, K, K, **given)


class OtherRank:
    """A group or a mesh of which only the number of dimensions is asked."""

    ndim = 3


def test_ranks_are_those_of_a_group_or_of_a_mesh_of_one_or_two_dimensions() -> None:
    mesh = dist.device_mesh.DeviceMesh("cpu", [0])
    of_mesh = afd.attention(Q, K, K, mesh=mesh, causal=True)
    assert torch.equal(of_mesh, afd.attention(Q, K, K, causal=True))
    with pytest.raises(ValueError, match="group and mesh are given: give one of them"):
        afd.attention(Q, K, K, mesh=mesh, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="mesh has 3 dimensions: it must have one or two"):
        afd.attention(Q, K, K, mesh=OtherRank())
    two = dist.device_mesh.DeviceMesh("cpu", [[0]])
    assert torch.allclose(afd.attention(Q, K, K, mesh=two, causal=True), of_mesh)
    with pytest.raises(archflash.UnsupportedError, match="'ring' has no mesh of two dimensions"):
        afd.attention(Q, K, K, mesh=two, method="ring")


def test_who_is_not_of_the_group_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: -1)
    with pytest.raises(ValueError, match="only its ranks may call"):
        afd.attention(Q, K, K)
    with pytest.raises(ValueError, match="call this on its ranks only"):
        afd.shard(Q, "zigzag", dim=2)


def test_a_group_that_sends_tensors_of_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archflash.distributed._attention.carries", lambda group, device: False)
    with pytest.raises(ValueError, match="q is on cpu, and the group sends tensors of GPUs only"):
        afd.attention(Q, K, K)


def test_autocast_counts_as_in_a_call_of_one_gpu() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = afd.attention(Q, K, K, implementation="torch")
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), afd.attention(Q, K, K), atol=0.02)


# --- shards ---


def test_shards_hold_every_row() -> None:
    with pytest.raises(ValueError, match="the shards hold 8 rows of 9: each must belong to a rank"):
        afd.Shards(9, (((0, 8),),))
    for wrong in (torch.zeros(2, 2, dtype=INT32), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"cu_seqlens is torch.*: it must be int32"):
            afd.Shards.documents(wrong, 2)


def test_rows_are_put_together_as_the_shards_say() -> None:
    assert torch.equal(afd.unshard(Q, "zigzag", dim=2), Q)
    with pytest.raises(ValueError, match="it must be 'contiguous', 'zigzag', Shards"):
        afd.unshard(Q, "diagonal", dim=2)
    with pytest.raises(ValueError, match="x requires a gradient, and unshard has none"):
        afd.unshard(Q.clone().requires_grad_(), "zigzag", dim=2)
    with torch.no_grad():
        assert torch.equal(afd.unshard(Q.clone().requires_grad_(), "zigzag", dim=2), Q)


def test_an_empty_table_differs_from_none_of_another_shape() -> None:
    digests = {
        _shards.digest_of_tensor(torch.empty(shape, dtype=INT32))
        for shape in ((0, 2), (0, 3), (2, 0))
    }
    assert len(digests) == 3


# --- models of transformers ---


def test_what_models_over_ranks_refuse() -> None:
    parallel = pytest.importorskip(
        "archflash.integrations.transformers_parallel", reason="no transformers here"
    )
    mask, forward, unserved = parallel.make_mask, parallel.forward, archflash.UnsupportedError
    assert mask(1, 8, 8) is None
    assert mask(1, 8, 8, attention_mask=torch.ones(1, 8)) is None
    for given, said in (
        ((1, 1, 8), "1 queries and 8 keys: attention over ranks has no cache"),
        ((1, 8, 8, 0, 0, parallel.causal_mask_function, torch.zeros(1, 8)), "hides padding"),
        ((1, 8, 8, 0, 0, lambda b, h, q, k: q % 2 == k % 2), "neither causal nor a window"),
    ):
        with pytest.raises(unserved, match=said):
            mask(*given)
    layer = torch.nn.Module()
    with pytest.raises(unserved, match=r"is used outside of .*sharing\(\), which says"):
        forward(layer, Q, K, K, None)
    with parallel.sharing(shards="contiguous"):
        for more, said in (
            ({"dropout": 0.5}, "dropout"), ({"attention_mask": Q}, "a mask"),
            ({"position_bias": Q}, "position_bias"),
        ):  # fmt: skip
            with pytest.raises(unserved, match=f"attention over ranks has no {said}: leave it out"):
                forward(layer, Q, K, K, **{"attention_mask": None, **more})
        out, _ = forward(layer, Q, K, K, None, sliding_window=3)
        expected = archflash.attention(Q, K, K, causal=True, window=(2, None))
        assert torch.allclose(out, expected.transpose(1, 2), atol=1e-6)
        both, _ = forward(layer, Q, K, K, None, sliding_window=3, is_causal=False)
        expected = archflash.attention(Q, K, K, window=(2, 3))
        assert torch.allclose(both, expected.transpose(1, 2), atol=1e-6)
    ends = torch.tensor([0, 5, 8], dtype=INT32)
    with parallel.sharing(shards="contiguous", cu_seqlens=ends):
        out, _ = forward(layer, Q, K, K, None)
        parts = [archflash.attention(*(x[:, :, s] for x in (Q, K, K)), causal=True)
                 for s in (slice(0, 5), slice(5, 8))]  # fmt: skip
        assert torch.allclose(out, torch.cat(parts, 2).transpose(1, 2), atol=1e-6)
        with pytest.raises(unserved, match="a batch of 2 with cu_seqlens: it must be 1"):
            forward(layer, *(x.expand(2, -1, -1, -1) for x in (Q, K, K)), None)
