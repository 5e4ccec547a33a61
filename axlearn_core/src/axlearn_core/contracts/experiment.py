"""Get the components of an experiment from its root config. Each function returns None if the config lacks the component.

The root is usually the config of a trainer, which has all of them. Features, plans, and code that reads runs accept any node and
use these functions, so that the field names are only defined here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from axlearn_core.config.node import label_fields
from axlearn_core.contracts.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

    from axlearn_core.config import Node


def _field(node: object, name: str) -> Any:
    return getattr(node, name, None)


def get_experiment_name(config: object) -> str:
    """Return the name of a root config, or an empty string if it has none."""
    return str(_field(config, "name")) if attrs.has(type(config)) and "name" in label_fields(type(config)) else ""


def set_experiment_name(config: Node[Any], name: str) -> Node[Any]:
    """Set the name of a root config. If the config has no name field, return it unchanged."""
    return attrs.evolve(config, name=name) if "name" in label_fields(type(config)) else config


def get_model_config(config: object) -> Any:
    """Return the config of the model."""
    return _field(config, "model")


def belongs_to_weights(path: str) -> bool:
    """Return True if a config path belongs to the model or its tokenizer, which define the meaning of the weights."""
    return path.startswith(("model.", "input.tokenizer."))


def get_objective_config(config: object) -> Any:
    """Return the config of the objective. Also returns None if the model is trained with its own loss."""
    return _field(config, "objective")


def get_input_config(config: object) -> Any:
    """Return the config of the input."""
    return _field(config, "input")


def get_learner_config(config: object) -> Any:
    """Return the config of the learner."""
    return _field(config, "learner")


def get_loop_config(config: object) -> Any:
    """Return the config of the training loop."""
    return _field(config, "loop")


def get_checkpointer_config(config: object) -> Any:
    """Return the config of the checkpointer."""
    return _field(config, "checkpointer")


def get_text_facts(config: object) -> Any:
    """Return the config with facts about the model's text. Also returns None if an import did not set them."""
    return _field(config, "text")


def get_evaluator_configs(config: object) -> Mapping[str, Node[Any]]:
    """Return the configs of the evaluators by name."""
    return _field(config, "evaluators") or {}


def get_tracker_configs(config: object) -> tuple[Node[Any], ...]:
    """Return the configs of the trackers."""
    return _field(config, "trackers") or ()


def get_mesh(config: object) -> Mesh | None:
    """Return the mesh config."""
    mesh = _field(config, "mesh")
    return mesh if isinstance(mesh, Mesh) else None


def get_tokenizer_config(config: object) -> Any:
    """Return the config of the input's tokenizer, or None if the input does not read text."""
    return _field(get_input_config(config), "tokenizer")


def get_chat_template_config(config: object) -> Any:
    """Return the config of the chat template that the input renders conversations with, or None."""
    return _field(get_input_config(config), "template")


def build_tokenizer(config: object) -> Any:
    """Build the input's tokenizer. Return None if the input does not read text."""
    node = get_tokenizer_config(config)
    return None if node is None else node.build()


def sequence_length(config: object) -> int | None:
    """Return the number of tokens in a row of the input."""
    length = _field(get_input_config(config), "sequence_length")
    return length if isinstance(length, int) else None


def batch_size(config: object) -> int | None:
    """Return the number of rows in a global batch of the input."""
    rows = _field(get_input_config(config), "batch_size")
    return rows if isinstance(rows, int) else None


def num_shards(config: object) -> int | None:
    """Return the number of data shards of the input. Also returns None if each row is a shard."""
    return _field(get_input_config(config), "num_shards")


def context_length(config: object) -> int | None:
    """Return the number of tokens that the model was trained for, from the experiment's text facts."""
    length = _field(get_text_facts(config), "context_length")
    return length if isinstance(length, int) else None


def end_tokens(config: object) -> tuple[int, ...]:
    """Return the IDs of the tokens that end an output, from the experiment's text facts."""
    return tuple(_field(get_text_facts(config), "end_tokens") or ())


def checkpoint_uri(config: object) -> str | None:
    """Return the location of the checkpoints, or None if it is the run directory."""
    return _field(get_checkpointer_config(config), "uri")


def save_interval(config: object) -> int | None:
    """Return the number of steps between checkpoints."""
    return _field(get_checkpointer_config(config), "every_steps")


def get_optimizer_config(config: object) -> Any:
    """Return the config of the learner's optimizer."""
    return _field(get_learner_config(config), "optimizer")


def get_parameter_rules(config: object) -> tuple[Node[Any], ...] | None:
    """Return the learner's parameter rules, or None if the learner does not support them."""
    rules = _field(get_learner_config(config), "rules")
    return rules if isinstance(rules, tuple) else None


def accumulate_steps(config: object) -> int:
    """Return the number of microbatches per step."""
    return _field(get_learner_config(config), "accumulate_steps") or 1


def offloads_optimizer(config: object) -> bool:
    """Return True if the learner keeps the optimizer state in host memory."""
    return bool(_field(get_learner_config(config), "offload"))


def is_pipelined(config: object) -> bool:
    """Return True if the learner uses the gradients of a pipelined stack."""
    return bool(_field(get_learner_config(config), "pipelined"))
