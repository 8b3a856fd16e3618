"""Kernels that each add one idea to the one before, up to ours: `python -m bench.ladder`."""
