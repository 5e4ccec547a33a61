"""Folders that tests read."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
HF_FIXTURES = TESTS / "plugins/models/huggingface/fixtures"
"""A tiny model of each family, with the outputs that transformers computed."""
RUN_OF_LLAMA = TESTS / "fixtures/run_of_llama/run"
"""A run that an earlier version trained."""
