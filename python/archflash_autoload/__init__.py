"""What PyTorch calls at the end of `import torch`, by the entry point `torch.backends`.

It stands outside of archflash, whose import takes a moment, because everyone who has archflash
installed runs it.
"""

import os
import warnings


def load() -> None:
    """Imports archflash if the environment variable ARCHFLASH_SDPA asks for it; archflash then
    serves PyTorch's own attention. Where that fails, a warning says so: an error here would be one
    of `import torch`.
    """
    if os.environ.get("ARCHFLASH_SDPA", "0") not in ("", "0"):
        try:
            import archflash  # noqa: F401
        except Exception as error:
            warnings.warn(f"archflash does not serve attention: {error}", stacklevel=2)
