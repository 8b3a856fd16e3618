"""What all layers of a batch have in common, as `archflash.integrations.sglang` reads it: lengths,
pages, and the tree of drafts that are verified.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor

from archflash import _kvcache
from archflash._errors import UnsupportedError


class Batch(NamedTuple):
    """A batch, as all layers see it.

    Attributes:
        lengths: int32 (requests,), keys of each request. With `branches` without those of them.
        pages: int32 (requests, pages of a request).
        window_pages: as pages, in the pool of layers with a window; None where there is one pool.
        window_slots: int64 (new rows,), where they are stored in that pool.
        rows: how many new rows each request has; None if that differs.
        ends: int32 (requests + 1,), where each request's rows begin; None if `rows` is a number.
        longest: the most new rows of a request; None if `rows` is a number.
        branches: of a tree of drafts: int32 (new rows, places), in which slots the drafts are that
            a row sees, and int32 (new rows,), how many they are.
        sees: bool (new rows, rows), which new rows of its request a row sees, for verification.
        in_common: by whether a layer is in the window's pool, `batch` of `serve`.
        prepared: that of `serve`.
    """

    lengths: Tensor
    pages: Tensor
    window_pages: Tensor | None
    window_slots: Tensor | None
    rows: int | None
    ends: Tensor | None
    longest: int | None
    branches: tuple[Tensor, Tensor] | None
    sees: Tensor | None
    in_common: dict[bool, _kvcache.Batch]
    prepared: dict[int, Any]


class ReadsBatches(AttentionBackend):  # type: ignore[misc]
    """A backend of SGLang that has read its batch.

    Args:
        runner: SGLang's ModelRunner.
        step: the number of a draft model's decoding step; None for all other work.
    """

    def __init__(self, runner: Any, step: int | None) -> None:
        super().__init__()
        # The slot of each row of each request: int32 (requests, longest request).
        self._slots: Tensor = runner.req_to_token_pool.req_to_token
        self._page_size: int = runner.page_size
        self._window_pool: SWAKVPool | None = None
        pool = runner.token_to_kv_pool
        if isinstance(pool, SWAKVPool) and pool.swa_layer_nums:
            self._window_pool = pool
        self._is_cpu = runner.device == "cpu"
        self._step = step
        self._topk: int = get_spec().speculative_eagle_topk or 1
        self._num_steps: int = get_spec().speculative_num_steps or 1
        self._drafts: int = get_spec().speculative_num_draft_tokens or 0
        self._verifies = self._drafts > 0 and not runner.is_draft_worker
        self._verify_mask: VerifyMask | None = None
        self._requests: tuple[Tensor, Tensor] | None = None  # of the last batch of drafts
        self._batch: Batch | None = None
        self._graph: Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Notes a batch that runs without a graph, once for all layers."""
        self._batch = self._note(forward_batch, in_graph=False)

    def _note(self, forward_batch: Any, in_graph: bool, in_capture: bool = False) -> Batch:
        mode, drafts = forward_batch.forward_mode, forward_batch.spec_info
        requests, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        on_host = forward_batch.seq_lens_cpu
        longest_key = self._slots.shape[1] if on_host is None else max(on_host.tolist(), default=0)
        slots = forward_batch.out_cache_loc
        rows: int | None = 1
        ends, longest, added, branches, sees = None, None, 0, None, None
        if mode.is_target_verify():
            rows = drafts.draft_token_num
            if drafts.tree_topk == 1:
                added = rows
            else:
                branches, sees = self._tree(drafts, requests, lengths, in_capture)
        elif mode.is_decode_or_idle():
            if self._step is not None and drafts is not None:
                # (requests, branches, steps): where the drafts of all steps are stored.
                of_steps = slots.view(-1, self._topk, self._num_steps)
                slots = of_steps[..., self._step].reshape(-1)
                added = self._step + 1
                if self._topk > 1:
                    places = of_steps[..., :added].reshape(-1, added).to(torch.int32)
                    branches = (places, torch.full_like(places[:, 0], added))
                    rows, added = self._topk, 0
        elif in_graph:
            if not mode.is_draft_extend_v2():
                raise UnsupportedError(
                    "a CUDA graph of prefill as a whole: pass --cuda-graph-backend-prefill "
                    "breakable or disabled"
                )
            rows = drafts.num_tokens_per_req
        else:
            rows, new = None, forward_batch.extend_seq_lens
            on_host = forward_batch.extend_seq_lens_cpu
            ends = F.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
            longest = self._slots.shape[1] if on_host is None else max(on_host, default=1)
        # The slots of a page are consecutive, so the first one of each says which page it is.
        size = self._page_size
        reach = longest_key + (added if sees is None else sees.shape[1])
        found = self._slots[requests, :reach:size]
        window_pages = window_slots = None
        if self._window_pool is not None:
            to_window = self._window_pool.translate_loc_from_full_to_swa
            window_pages = _divided(to_window(found), size).to(torch.int32)
            window_slots = None if slots is None else to_window(slots)
        lengths = (lengths + added if added else lengths).to(torch.int32)
        pages = _divided(found, size)
        return Batch(
            lengths, pages, window_pages, window_slots, rows, ends, longest, branches, sees, {}, {}
        )

    def _tree(
        self, drafts: Any, requests: Tensor, lengths: Tensor, in_capture: bool
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The drafts that each row of a tree sees, itself among them: its branch up to the root.
        Returns `branches` and `sees` of a batch.
        """
        self._requests = (requests, lengths)
        count, batch = drafts.draft_token_num, len(requests)
        options: dict[str, Any] = {"device": lengths.device}
        own = torch.arange(count, **options)
        places = self._slots[requests[:, None], lengths[:, None] + own]  # (batch, count)
        places = places.repeat_interleave(count, 0)
        if in_capture:  # there are no drafts yet
            sees = torch.ones(batch * count, count, dtype=torch.bool, **options)
            return (places, torch.ones(batch * count, **options).int()), sees
        mask = drafts.custom_mask
        if isinstance(drafts, NgramVerifyInput) and not self._is_cpu:
            # Each request has count rows of lengths + count columns, of which the last are drafts.
            width = lengths + count
            first = (width * count).cumsum(0) - width * count
            at = first[:, None] + own * width[:, None] + lengths[:, None]
            at = at[..., None] + own
            # A graph's batch may have more requests than the mask.
            mask = mask[at.clamp(max=mask.numel() - 1)]
        sees = mask[: batch * count * count].view(batch * count, count).bool()
        # The places that a row sees come first, in their order.
        order = torch.argsort((~sees).to(torch.int8), dim=1, stable=True)
        return (places.gather(1, order), sees.sum(1, dtype=torch.int32)), sees

    @property
    def verify_mask(self) -> VerifyMask | None:
        """What the drafts of a tree see of one another, written in place by SGLang."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: Any) -> None:
        """Reads the tree again, of a batch that was noted before the drafts were made."""
        if spec_info.tree_topk == 1:
            return
        assert self._requests is not None
        assert self._batch is not None
        branches, sees = self._tree(spec_info, *self._requests, in_capture=False)
        if cuda_graph_bs is not None:
            branches, sees = self._write_tree(branches, sees)
        self._batch = self._batch._replace(branches=branches, sees=sees)

    def _write_tree(self, branches: Any, sees: Tensor | None) -> tuple[Any, Any]:
        """Writes a tree where its graph reads it."""
        graph = self._graph
        assert graph is not None
        assert graph.branches is not None
        return tuple(map(_write, graph.branches, branches)), _write(graph.sees, sees)

    # --- CUDA graphs ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what the graphs read, for at most max_bs requests."""
        width = -(-self._slots.shape[1] // self._page_size)
        options: dict[str, Any] = {"dtype": torch.int32, "device": self._slots.device}
        pages = torch.zeros(max_bs, width, **options)
        window = self._window_pool is not None
        self._graph = Batch(
            torch.ones(max_bs, **options), pages, torch.zeros_like(pages) if window else None,
            torch.zeros(max_num_tokens, dtype=torch.int64, device=pages.device) if window else None,
            None, None, None, None, None, {}, {},
        )  # fmt: skip
        places = self._drafts if self._step is None else self._step + 1
        if places:
            branches = torch.zeros(max_num_tokens, places, **options)
            self._graph = self._graph._replace(
                branches=(branches, torch.ones_like(branches[:, 0])), sees=branches.bool()
            )
        if self._verifies:
            cells = max_bs * self._drafts**2
            buffer = torch.zeros(cells, dtype=torch.bool, device=pages.device)
            self._verify_mask = VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Writes a batch where its graph reads it."""
        graph = self._graph
        assert graph is not None
        batch = self._note(forward_batch, in_graph=True, in_capture=in_capture)
        if batch.branches is not None:
            branches, sees = self._write_tree(batch.branches, batch.sees)
            batch = batch._replace(branches=branches, sees=sees)
        self._batch = batch._replace(
            lengths=_write(graph.lengths, batch.lengths),
            pages=_write(graph.pages, batch.pages),
            window_pages=_write(graph.window_pages, batch.window_pages),
            window_slots=_write(graph.window_slots, batch.window_slots),
        )


def _divided(slots: Tensor, size: int) -> Tensor:
    """The pages of slots."""
    return slots if size == 1 else slots // size


def _write(buffer: Tensor | None, x: Tensor | None) -> Any:
    """Copies x to the start of a buffer, and returns the rows that it is in, with all columns of
    the buffer: a graph reads them whatever the next x has.
    """
    if buffer is None or x is None:
        return None
    part = buffer[: x.shape[0]]
    (part if x.ndim == 1 else part[:, : x.shape[1]]).copy_(x)
    return part
