"""Configs: trees of frozen values. This package does not import JAX."""

from axlearn_core.config.callable_node import configure, with_subclass
from axlearn_core.config.codec import Decoder, Names, QualifiedNames, dump, encode
from axlearn_core.config.flat import ABSENT, Change, diff, flatten
from axlearn_core.config.node import REQUIRED, Configurable, Node, get_fields, get_options, interface, node, setting
from axlearn_core.config.offers import offers
from axlearn_core.config.sizes import Scaled, factor_of, size_of
from axlearn_core.config.tree import check, find, find_missing, get, map, matches, patch, replace_config, walk
from axlearn_core.config.yaml_file import Document, parse

__all__ = [
    "ABSENT", "REQUIRED", "Change", "Configurable", "Decoder", "Document", "Names", "Node", "QualifiedNames", "Scaled",
    "check", "configure", "diff", "dump", "encode", "factor_of", "find", "find_missing", "flatten", "get", "get_fields",
    "get_options", "interface", "map", "matches", "node", "offers", "parse", "patch", "replace_config", "setting", "size_of",
    "walk", "with_subclass",
]  # fmt: skip
