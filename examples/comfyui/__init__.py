"""ComfyUI nodes of archflash. Copy this folder to ComfyUI/custom_nodes/archflash, with archflash
installed in ComfyUI's Python; the node "Attention by archflash" goes between a model's loader and
its sampler.
"""

from __future__ import annotations

from typing import Any, ClassVar

from archflash.integrations import comfyui

comfyui.register()


class ArchflashAttention:
    CATEGORY = "model_patches"
    DESCRIPTION = (
        "Attention of this model by archflash's kernels: exact; with fp16_accumulate sums in fp16, "
        "with an error of 0.1%; or with int8 Q K^T in 8 bits, with an error of 1% to 2%."
    )
    RETURN_TYPES: ClassVar = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "precision": (["exact", "fp16_accumulate", "int8"], {"default": "exact"}),
            }
        }

    def patch(self, model: Any, precision: str) -> tuple[Any]:
        return (comfyui.patch(model, None if precision == "exact" else precision),)


NODE_CLASS_MAPPINGS = {"ArchflashAttention": ArchflashAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"ArchflashAttention": "Attention by archflash"}
