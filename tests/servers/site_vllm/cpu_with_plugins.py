"""vLLM's platform of the CPU, which takes no attention backend but its own, made to take the one
that is asked for, as the platform of CUDA does. vLLM finds it by its entry point in all processes.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability


def platform() -> str:
    """The name of the class, as vLLM asks plug-ins of platforms for it."""
    return f"{__name__}.CpuWithPlugins"


class CpuWithPlugins(CpuPlatform):
    """The CPU, which asks backends as if it were a GPU of compute capability 9.0."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is None or selected_backend.name.startswith("CPU"):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=DeviceCapability(9, 0), **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"{selected_backend.name} is not valid: {reasons}")
        return selected_backend.get_path()

    @classmethod
    @functools.cache
    def register_triton_kernel_overrides(cls) -> None:
        """Once in a process: it looks into all modules, and fails at some that come later."""
        super().register_triton_kernel_overrides()

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

        backend = get_current_vllm_config().attention_config.backend
        if backend is not None and backend.name == "ARCHFLASH_MLA":
            return MLAPrefillBackendEnum.CUSTOM.get_class()
        return super().get_mla_prefill_backend_cls(mla_selector_config)
