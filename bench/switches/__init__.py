"""Kernels of blackwell_dc with one setting changed, compiled where they are needed: what each of
its ideas is worth. On a card bench.day_one times them; tests/sim runs them on the simulator.
"""
