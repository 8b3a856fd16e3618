"""The kernels of blackwell_dc with one mechanism changed, to measure what it is worth.

variants.py compiles them where they are needed. bench.day_one times them on a card; tests/sim runs
them on the simulator.
"""
