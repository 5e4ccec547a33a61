"""Post-training: low-rank adapters, preferences, distillation, and runs converted into other runs."""
