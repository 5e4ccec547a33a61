"""Objectives for language models: preferences (DPO) and distillation."""
