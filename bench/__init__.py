"""Benchmarks of archflash and of the attention kernels that users have today."""
