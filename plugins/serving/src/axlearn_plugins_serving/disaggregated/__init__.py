"""Disaggregated prefill and decoding on one machine: workers and a router."""
