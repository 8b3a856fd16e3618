"""all-MiniLM-L6-v2, a sentence-embedding model: `archflash demo` and `archflash show`."""
