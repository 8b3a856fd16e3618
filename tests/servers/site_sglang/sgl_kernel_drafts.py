"""What sgl_kernel computes for speculative decoding, in Python: which drafts form a tree, which of
them are accepted, and where they are stored. Each function writes its results into arguments.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(
    addresses: Tensor, row_bytes: Tensor, to: Tensor, source: Tensor
) -> None:
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + size * at, size) for at in source.tolist()]
        for at, row in zip(to.tolist(), rows, strict=True):
            ctypes.memmove(address + size * at, row, size)


def assign_req_to_token_pool_cpu(
    requests: Tensor, slots: Tensor, first: Tensor, last: Tensor, new: Tensor, width: int
) -> None:
    at = 0
    for request, begin, end in zip(requests.tolist(), first.tolist(), last.tolist(), strict=True):
        slots[request, begin:end] = new[at : at + end - begin]
        at += end - begin


def assign_extend_cache_locs_cpu(
    requests: Tensor, slots: Tensor, first: Tensor, last: Tensor, out: Tensor, width: int
) -> None:
    spans = zip(requests.tolist(), first.tolist(), last.tolist(), strict=True)
    found = torch.cat([slots[request, begin:end] for request, begin, end in spans])
    out[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, slots: Tensor, first: Tensor, out: Tensor, width: int, topk: int, steps: int
) -> None:
    assign_extend_cache_locs_cpu(requests, slots, first, first + topk * steps, out, width)


def fill_bonus_tokens_cpu(tokens: Tensor, counts: Tensor, out: Tensor, stride: int) -> None:
    out.copy_(tokens.view(-1, stride).gather(1, (counts.long() - 1)[:, None])[:, 0])


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    chosen = slots[accepted[accepted >= 0]]
    out[: len(chosen)] = chosen


def _write_tree(
    parents: list[list[int]],
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
) -> Tensor:
    """Writes the links of trees, whose root is draft 0; returns which drafts each draft sees."""
    batch, count = len(parents), len(parents[0])
    sees = torch.eye(count, dtype=torch.bool).repeat(batch, 1, 1)
    index.copy_(torch.arange(batch * count).view(batch, count))
    for request, of_request in enumerate(parents):
        for draft in range(1, count):
            sees[request, draft] |= sees[request, of_request[draft]]
        for draft in range(count - 1, 0, -1):
            parent = of_request[draft]
            next_sibling[request, draft] = next_token[request, parent]
            next_token[request, parent] = draft
    positions.copy_((sees.sum(-1) - 1 + lengths[:, None]).view_as(positions))
    return sees


def reconstruct_indices_from_tree_mask(
    mask: Tensor, lengths: Tensor, positions: Tensor, index: Tensor, next_token: Tensor,
    next_sibling: Tensor, batch: int, count: int,
) -> None:  # fmt: skip
    before = mask.view(batch, count, count).bool().tril(-1)
    parents = (before * torch.arange(count)).amax(-1)
    shape = (batch, count)
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    _write_tree(
        parents.tolist(), lengths, positions, index.view(shape), next_token.view(shape),
        next_sibling.view(shape),
    )  # fmt: skip


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor, selected: Tensor, lengths: Tensor, mask: Tensor, positions: Tensor,
    index: Tensor, next_token: Tensor, next_sibling: Tensor, topk: int, depth: int, count: int,
    mode: int,
) -> None:  # fmt: skip
    parents = []
    for of_request, chosen in zip(parent_list.tolist(), selected.tolist(), strict=True):
        groups = [number // topk for number in chosen[: count - 1]]
        parents.append([0, *(chosen.index(of_request[g]) + 1 if g else 0 for g in groups)])
    sees = _write_tree(parents, lengths, positions, index, next_token, next_sibling)
    mask[: sees.numel()] = sees.flatten()


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:  # fmt: skip
    for request, of_request in enumerate(candidates.tolist()):
        draft, accepted = 0, [0]
        while draft >= 0 and len(accepted) < accept_index.shape[1]:
            draft = int(retrive_next_token[request, draft])
            while draft >= 0 and of_request[draft] != target_predict[request, accepted[-1]]:
                draft = int(retrive_next_sibling[request, draft])
            if draft >= 0:
                accepted.append(draft)
        at = retrive_index[request, accepted]
        predicts[at] = target_predict[request, accepted].to(predicts.dtype)
        accept_index[request, : len(at)] = at.to(accept_index.dtype)
        accept_token_num[request] = len(at) - 1
