"""Random problems over the whole public API, each compared with float64.

A problem is a few plain values, which say how its tensors and options are made. Hypothesis draws
and shrinks them in test_properties.py; `python -m tests.properties` draws them from a
seed on a GPU. The repr of one, passed to `attempt`, runs it again.
"""

from tests.properties.drawing import ENTRIES, Problem, draw
from tests.properties.judging import attempt

__all__ = ["ENTRIES", "Problem", "attempt", "draw"]
