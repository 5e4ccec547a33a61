"""The simulation behind goodput_simulation.py."""
