"""Latent rows of float8 with their scales, as FlashMLA and the servers store them: what they hold.

Formats, by the bytes of a row:
    "fp8_656"  512 numbers e4m3 | a float32 scale for each 128 of them | 64 bfloat16, of K alone
    "fp8_584"  448 numbers e4m3 | 64 bfloat16, of K and V. The scales follow behind the rows of a
               page, 8 bytes for each row: an e8m0 scale for each 64 numbers, and one byte unused.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_BYTES = {"fp8_656": 656, "fp8_584": 584}
_E8M0_BIAS = 127


def unpack(cache: Tensor, packed_rows: str) -> tuple[Tensor, Tensor]:
    """K and V of a packed cache, in bfloat16.

    Args:
        cache: ``(pages, page_size, 1, bytes of a row)``, numbers of one byte.
        packed_rows: the format.

    Returns:
        What q and qv are multiplied with: ``(pages, page_size, 1, 64)``, 0 where V has all columns,
        and ``(pages, page_size, 1, 512)``, which is V.
    """
    pages, size = cache.shape[:2]
    data = cache.view(torch.uint8).reshape(pages, size * cache.shape[3])
    if packed_rows == "fp8_656":
        rows = data.reshape(pages, size, 656)
        numbers = rows[..., :512].view(torch.float8_e4m3fn).float()
        scales = rows[..., 512:528].contiguous().view(torch.float32)
        v = (numbers * scales.repeat_interleave(128, -1)).bfloat16()
        k = rows[..., 528:].contiguous().view(torch.bfloat16)
        return k[:, :, None], v[:, :, None]
    rows = data[:, : 576 * size].reshape(pages, size, 576)
    exponents = data[:, 576 * size :].reshape(pages, size, 8)[..., :7].float() - _E8M0_BIAS
    numbers = rows[..., :448].view(torch.float8_e4m3fn).float()
    scaled = (numbers * exponents.exp2().repeat_interleave(64, -1)).bfloat16()
    rest = rows[..., 448:].contiguous().view(torch.bfloat16)
    v = torch.cat([scaled, rest], -1)
    return torch.zeros_like(v[:, :, None, :64]), v[:, :, None]
