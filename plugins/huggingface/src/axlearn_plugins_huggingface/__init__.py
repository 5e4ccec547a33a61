"""Models in Hugging Face format, in and out of axlearn: `Family` and `Rule` are what a family is made of."""

from axlearn_plugins_huggingface.family import Family, Key, Settings
from axlearn_plugins_huggingface.table import Rule

__all__ = ["Family", "Key", "Rule", "Settings"]
