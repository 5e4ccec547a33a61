"""The public API for plugins.

    from axlearn_core.extend import Configurable, Feature, Layer, node, setting

These names are documented and do not change within a minor version; see "What is stable" in the documentation. Names are imported
on first use, so modules that implement hooks need not import JAX.
"""

# ruff: noqa: F401
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axlearn_core.checkpoint import LocalStorage, ShardedCheckpointer, open_storage
    from axlearn_core.cli.common import (
        experiment_argument,
        json_option,
        no_devices,
        print_json,
        print_table,
        request_options,
    )
    from axlearn_core.cli.extensible import ExtensibleCommand
    from axlearn_core.cli.terminal import echo
    from axlearn_core.compose import FrozenModel, Function, Functional, ModelWeights, Program, TrainedModel, compose
    from axlearn_core.config import (
        REQUIRED,
        Configurable,
        Node,
        Scaled,
        check,
        diff,
        find,
        get,
        interface,
        node,
        offers,
        patch,
        replace_config,
        setting,
        size_of,
    )
    from axlearn_core.config.roles import Role, StackRole
    from axlearn_core.config.tree import children, edit_nodes, fill_slots, join, set_fields, with_children
    from axlearn_core.config.wrappers import edit_innermost
    from axlearn_core.contracts.finding import Finding
    from axlearn_core.contracts.kernels import Kernel, KernelContext, KernelImplementation
    from axlearn_core.contracts.mesh import Mesh, MeshRule, Size, TargetRule
    from axlearn_core.contracts.migration import Migration
    from axlearn_core.contracts.options import CommandOption
    from axlearn_core.contracts.parts import Batch, Loss, Model, Objective, Tokenizer, Weights
    from axlearn_core.contracts.remat import RematPolicy
    from axlearn_core.contracts.storage import Storage, StoredFile
    from axlearn_core.contracts.target import Machine, Target
    from axlearn_core.errors import (
        AxlearnError,
        CheckpointError,
        ConfigError,
        InputError,
        MissingFileError,
        PluginError,
        Problem,
        RequestError,
        StorageError,
        WorkError,
        nearest,
    )
    from axlearn_core.kernels.op import Op, Shape
    from axlearn_core.learn import Learner, flatten, global_norm, select, unflatten, value_and_grad
    from axlearn_core.nn.initializers import Constant, Initializer, Normal, VarianceScaling
    from axlearn_core.nn.layer import Context, Layer, Precision, expand_to
    from axlearn_core.nn.linear import Linear, Projection
    from axlearn_core.nn.remat import Remat, tag
    from axlearn_core.nn.sharding import constrain
    from axlearn_core.nn.summaries import add_loss, add_summary, module_scope
    from axlearn_core.plugins.feature import Feature, no_match_problem
    from axlearn_core.plugins.hookspecs import hookimpl
    from axlearn_core.plugins.registry import registry
    from axlearn_core.plugins.request import Request, Setting, parse_value, read_text, write
    from axlearn_core.plugins.resolve import resolve
    from axlearn_core.run import Run, RunWeights, bind_weights, derive_run, open_weights, split_weights
    from axlearn_core.run.events import RunListener
    from axlearn_core.run.notices import log_message
    from axlearn_core.run.weights import check_tensors, select_tensors
    from axlearn_core.train import Trainer
    from axlearn_core.train.evaluators import LossEvaluator, Periodic
    from axlearn_core.train.loop import TrainLoop
    from axlearn_core.train.objective import ModelLoss
    from axlearn_core.train.session import Session
    from axlearn_core.train.trackers import JsonlTracker, LinesTracker, printable, writing

_MODULES = {
    "checkpoint": ("LocalStorage", "ShardedCheckpointer", "open_storage"),
    "cli.common": (
        "experiment_argument", "json_option", "no_devices", "print_json", "print_table", "request_options",
    ),
    "cli.extensible": ("ExtensibleCommand",),
    "cli.terminal": ("echo",),
    "compose": ("FrozenModel", "Function", "Functional", "ModelWeights", "Program", "TrainedModel", "compose"),
    "config": (
        "REQUIRED", "Configurable", "Node", "Scaled", "check", "diff", "find", "get", "interface", "node", "offers", "patch",
        "replace_config", "setting", "size_of",
    ),
    "config.roles": ("Role", "StackRole"),
    "config.tree": ("children", "edit_nodes", "fill_slots", "join", "set_fields", "with_children"),
    "config.wrappers": ("edit_innermost",),
    "contracts.finding": ("Finding",),
    "contracts.kernels": ("Kernel", "KernelContext", "KernelImplementation"),
    "contracts.mesh": ("Mesh", "MeshRule", "Size", "TargetRule"),
    "contracts.migration": ("Migration",),
    "contracts.options": ("CommandOption",),
    "contracts.parts": ("Batch", "Loss", "Model", "Objective", "Tokenizer", "Weights"),
    "contracts.remat": ("RematPolicy",),
    "contracts.storage": ("Storage", "StoredFile"),
    "contracts.target": ("Machine", "Target"),
    "errors": (
        "AxlearnError", "CheckpointError", "ConfigError", "InputError", "MissingFileError", "PluginError", "Problem",
        "RequestError", "StorageError", "WorkError", "nearest",
    ),
    "kernels.op": ("Op", "Shape"),
    "learn": ("Learner", "flatten", "global_norm", "select", "unflatten", "value_and_grad"),
    "nn.initializers": ("Constant", "Initializer", "Normal", "VarianceScaling"),
    "nn.layer": ("Context", "Layer", "Precision", "expand_to"),
    "nn.linear": ("Linear", "Projection"),
    "nn.remat": ("Remat", "tag"),
    "nn.sharding": ("constrain",),
    "nn.summaries": ("add_loss", "add_summary", "module_scope"),
    "plugins.feature": ("Feature", "no_match_problem"),
    "plugins.hookspecs": ("hookimpl",),
    "plugins.registry": ("registry",),
    "plugins.request": ("Request", "Setting", "parse_value", "read_text", "write"),
    "plugins.resolve": ("resolve",),
    "run": ("Run", "RunWeights", "bind_weights", "derive_run", "open_weights", "split_weights"),
    "run.events": ("RunListener",),
    "run.weights": ("check_tensors", "select_tensors"),
    "train": ("Trainer",),
    "train.evaluators": ("LossEvaluator", "Periodic"),
    "train.loop": ("TrainLoop",),
    "train.objective": ("ModelLoss",),
    "run.notices": ("log_message",),
    "train.session": ("Session",),
    "train.trackers": ("JsonlTracker", "LinesTracker", "printable", "writing"),
}  # fmt: skip
_MODULE_NAMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_NAMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module = importlib.import_module(f"axlearn_core.{_MODULE_NAMES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
