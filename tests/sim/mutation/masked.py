"""Kernels for masks as data, for head dimensions above 256 and for copies that are mutated. Dropout
is left to the kernels of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from archflash import _api, reference
from archflash import _archflash as _runtime

from .masked_calls import ODD_STRIDES, MaskedCalls
from .planned import ForwardCall, main

REFERENCES = (reference.attention, reference.baseline)


@dataclass(frozen=True)
class MaskedTarget:
    """One kernel.

    Attributes:
        folder: of the kernel.
        name: the end of its name, behind "<folder>_".
        device: planned for this known GPU.
        dtype: of q, k and v.
        d: head dimension.
        rows: of q, many enough for the kernel.
        kinds: of the calls that it serves.
        on_few_sms: kinds of calls that it serves where the GPU has fewer SMs, see SMS.
    """

    folder: str
    name: str
    device: str
    dtype: str
    d: int
    rows: int
    kinds: tuple[str, ...]
    on_few_sms: tuple[str, ...] = ()

    @property
    def kernel(self) -> str:
        return f"{self.folder}_{self.name}"

    def calls(self) -> Iterator[ForwardCall]:
        implementation = "ampere" if self.folder == "copy" else self.folder
        device = _api.find_device(self.device)
        sms = [(kind, device.sm_count) for kind in self.kinds]
        sms += [(kind, SMS.get(kind, 1)) for kind in self.on_few_sms]
        made = MaskedCalls(self.folder, self.dtype, self.d, self.rows)
        for kind, count in sms:
            gpu = _runtime.Device.from_dict(device.to_dict() | {"sm_count": count})
            inputs, options = made.of(kind)
            yield ForwardCall(
                self.kernel, implementation, gpu, kind, inputs, options, REFERENCES,
                prepares=self.folder == "hopper" and "attention" not in self.name,
            )  # fmt: skip


WHOLE = (
    "bool", "keys", "added", "added, odd rows", "added, float32", "ranges", "slopes", "blocks",
    "blocks, ranges, slopes", "packed, slopes", "softcap, fewer columns",
)  # fmt: skip
DATA = (*WHOLE, "shares, ranges")
# What hopper reads in place: the others have kernels with a summary.
IN_PLACE_BOOL = tuple(kind for kind in DATA if kind != "added")
IN_PLACE = tuple(kind for kind in IN_PLACE_BOOL if kind not in ("bool", "keys"))
BLOCKS = ("blocks, ranges, slopes", "many heads", "many blocks")
TABLES = ("blocks", "table, causal", "table, window", "table of many tiles")
ATTN_MASKS = ("bool", "bool of all heads", "added", "lowest", "added of each head")
NO_ATTN_MASK = ("ranges", "one range", "four ranges", "slopes on both sides", "ranges, softcap")
DENSE = (*ATTN_MASKS, *NO_ATTN_MASK)
MASKS = (*ATTN_MASKS[:2], "bool, aligned rows")
TILES = (*BLOCKS, "many tiles")
RANGES = (*NO_ATTN_MASK[:3], "ranges of many blocks")
SMS = {"many tiles": 70, "table of many tiles": 2}  # one where no number stands
PLAIN = ("causal", "window, softcap", "huge scores", "shares")
COPIES = tuple(ODD_STRIDES)

TARGETS = (
    MaskedTarget("ampere", "attention_fwd_bf16_d64_masked", "A100", "bf16", 64, 140, DATA),
    MaskedTarget("ampere", "attention_fwd_f16_d128_masked", "RTX 4090", "f16", 128, 70, DATA),
    MaskedTarget("ampere", "attention_fwd_bf16_d512_masked", "A100", "bf16", 512, 70, DATA),
    MaskedTarget("ampere", "attention_fwd_bf16_d384_large", "A100", "bf16", 384, 70, PLAIN),
    MaskedTarget("ampere", "attention_fwd_f16_d512", "RTX 4090", "f16", 512, 70, PLAIN),
    MaskedTarget(
        "hopper", "attention_fwd_bf16_d64_masked", "H200", "bf16", 64, 140, IN_PLACE, BLOCKS
    ),
    MaskedTarget(
        "hopper", "attention_fwd_f16_d128_masked", "H200", "f16", 128, 140, IN_PLACE_BOOL, BLOCKS
    ),
    MaskedTarget(
        "hopper", "attention_fwd_bf16_d64_dense", "H200", "bf16", 64, 260, (), NO_ATTN_MASK
    ),
    MaskedTarget(
        "hopper",
        "attention_fwd_bf16_d64_dense_short",
        "H200",
        "bf16",
        64,
        120,
        (),
        (*ATTN_MASKS[:4], "bool, window"),
    ),
    MaskedTarget("hopper", "attention_fwd_f16_d128_dense", "H200", "f16", 128, 260, (), DENSE),
    MaskedTarget("hopper", "attention_fwd_bf16_d64_table", "H200", "bf16", 64, 260, (), TABLES),
    MaskedTarget("hopper", "attention_fwd_f16_d128_table", "H200", "f16", 128, 260, (), TABLES),
    MaskedTarget(
        "blackwell_consumer", "attention_fwd_bf16_d64_table", "RTX 5090", "bf16", 64, 260, TABLES
    ),
    MaskedTarget("hopper", "summarize_mask_bf16", "H200", "bf16", 64, 260, (), MASKS),
    MaskedTarget("hopper", "summarize_ranges_bf16", "H200", "bf16", 64, 260, (), RANGES),
    MaskedTarget("hopper", "order_tiles_bf16", "H200", "bf16", 64, 260, (), TILES),
    MaskedTarget("simt", "attention_fwd_f32_d64_masked", "A100", "f32", 64, 70, WHOLE),
    # Whoever plans a call, the kernels that copy its tensors are the same.
    MaskedTarget("copy", "gather", "A100", "bf16", 64, 70, COPIES),
    MaskedTarget("copy", "scatter", "A100", "bf16", 64, 70, COPIES),
)


if __name__ == "__main__":
    main(TARGETS)
