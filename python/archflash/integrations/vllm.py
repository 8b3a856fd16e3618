"""archflash in vLLM: the attention backends CUSTOM (also ARCHFLASH), ARCHFLASH_MLA and
ARCHFLASH_MLA_SPARSE, and the prefill CUSTOM of models with latent attention.

Installing archflash is enough: vLLM finds `register` by the entry point `vllm.general_plugins`, and
``--attention-backend CUSTOM`` chooses it. Where another plug-in takes CUSTOM too, the environment
variable VLLM_PLUGINS says which plug-ins vLLM loads, and the name ARCHFLASH is there in any case.
"""

from __future__ import annotations

import warnings
from typing import Any

BACKEND = "archflash.integrations.vllm_backend.ArchflashBackend"
MLA_BACKEND = "archflash.integrations.vllm_mla.ArchflashMLABackend"
MLA_SPARSE_BACKEND = "archflash.integrations.vllm_mla_sparse.ArchflashMLASparseBackend"
MLA_PREFILL_BACKEND = "archflash.integrations.vllm_mla.ArchflashMLAPrefillBackend"


def register() -> None:
    """Tells vLLM where its attention backends are, which are imported when they are chosen.

    vLLM calls this in all of its processes, whether archflash is chosen or not, so a version of
    vLLM without such a registry gets a warning and no error.
    """
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
        _add(AttentionBackendEnum, "ARCHFLASH", BACKEND)
        _add(AttentionBackendEnum, "ARCHFLASH_MLA", MLA_BACKEND)
        _add(AttentionBackendEnum, "ARCHFLASH_MLA_SPARSE", MLA_SPARSE_BACKEND)
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, MLA_PREFILL_BACKEND)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"archflash is no backend of this vLLM, which has no registry for it: {error}",
            stacklevel=2,
        )


def _add(names: Any, name: str, path: str) -> None:
    """Adds a name to vLLM's enumeration of backends, once in a process."""
    if name not in names.__members__:
        member = names.register(name, path)
        # A process of vLLM gets its configuration pickled and reads it before it loads plug-ins, so
        # that it would not know the name.
        member.__reduce_ex__ = lambda protocol: (_restored, (names, name))


def _restored(names: Any, name: str) -> Any:
    register()
    return names[name]
