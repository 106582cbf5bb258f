"""The parts of `benchmarks/journal.py`, one per module; each gives lines of one table."""
