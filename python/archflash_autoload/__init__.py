"""What PyTorch calls at the end of `import torch`, by the entry point `torch.backends`.

It stands outside of archflash, whose import takes a moment, because everyone who has archflash
installed runs it.
"""

import os


def load() -> None:
    """Imports archflash if the environment variable ARCHFLASH_SDPA asks for it; archflash then
    serves PyTorch's own attention.

    Raises:
        ValueError: the variable is something else than 0, 1 or nothing.
    """
    if os.environ.get("ARCHFLASH_SDPA", "0") not in ("", "0"):
        import archflash  # noqa: F401
