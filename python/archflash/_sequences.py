"""To which sequence each row of a packed tensor belongs."""

from __future__ import annotations

import torch
from torch import Tensor


def of_rows(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many sequences end at or before each row, which is the number of the row's own sequence:
    empty sequences own no row, and rows behind the last one get the number of sequences.

    Args:
        rows: numbers of rows, integers.
        cu_seqlens: ``(sequences + 1,)``, where each sequence starts and the last one ends.
    """
    # The table is a result and no slice: for a slice torch.compile of torch before 2.13 fails on a
    # GPU or looks up in what the slice is of (pytorch/pytorch#182343). The last row of a sequence
    # is its end less one.
    return torch.searchsorted(cu_seqlens[1:] - 1, rows)
