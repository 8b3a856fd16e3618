"""The first day with a card that a kernel has never seen: `python -m bench.day_one`."""
