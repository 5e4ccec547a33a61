"""The earlier name of `axlearn_core.checkpoint.sharded`."""

from axlearn_core.plugins.moved import redirect

redirect(__name__, "axlearn_core.checkpoint.sharded")
