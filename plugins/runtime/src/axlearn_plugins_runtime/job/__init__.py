"""What only jobs need of a run: lost processes, the compiled step for those that continue it."""
