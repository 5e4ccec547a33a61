"""Every test runs on eight virtual CPU devices, with JAX's strict rules for ranks and dtypes.

Programs are compiled fast rather than well: most of them run once.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


def pytest_addoption(parser):
    parser.addoption("--update-goldens", action="store_true", help="write tests/goldens anew instead of comparing")
