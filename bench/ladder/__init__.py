"""Kernels that each add one idea to the previous one, up to ours: `python -m bench.ladder`."""
