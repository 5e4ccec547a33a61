"""The parts of `benchmarks/accelerator.py`."""
