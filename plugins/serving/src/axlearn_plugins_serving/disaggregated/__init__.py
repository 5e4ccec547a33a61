"""Prefill and decode in processes of their own, on one machine: workers, and the router before them."""
