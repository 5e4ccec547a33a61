"""Moved to `axlearn_plugins_models.deepseek`. This name goes with version 0.3."""

from axlearn_core.plugins.moved import redirect

redirect(__name__, "axlearn_plugins_models.deepseek")
