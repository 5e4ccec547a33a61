"""The parts of `benchmarks/loc_complexity.py`."""
