"""What only jobs need of a run: lock, mirror, signals, lost processes, the compiled step, the record of phases."""
