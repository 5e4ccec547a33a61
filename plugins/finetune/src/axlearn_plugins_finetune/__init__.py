"""Post-training for axlearn: low-rank adapters, preferences, distillation, and conversion of runs."""
