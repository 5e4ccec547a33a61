"""Reads the parts of an experiment from its root config. A part that the config lacks is None.

The root is a trainer's config almost always, and then has them all. Features, plans and readers of runs get any node: they ask
here, so that the names of the fields stand in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axlearn_core.contracts.mesh import Mesh

if TYPE_CHECKING:
    from axlearn_core.config import Node


def _field(node: object, name: str) -> Any:
    return getattr(node, name, None)


def model_of(config: object) -> Any:
    """The config of the model."""
    return _field(config, "model")


def objective_of(config: object) -> Any:
    """The config of the objective; None also if the model trains by its own loss."""
    return _field(config, "objective")


def input_of(config: object) -> Any:
    """The config of the input."""
    return _field(config, "input")


def learner_of(config: object) -> Any:
    """The config of the learner."""
    return _field(config, "learner")


def loop_of(config: object) -> Any:
    """The config of the training loop."""
    return _field(config, "loop")


def checkpointer_of(config: object) -> Any:
    """The config of the checkpointer."""
    return _field(config, "checkpointer")


def text_of(config: object) -> Any:
    """The facts about the model's text, as a config; None also if an import never set them."""
    return _field(config, "text")


def trackers_of(config: object) -> tuple[Node[Any], ...]:
    """The configs of the trackers."""
    return _field(config, "trackers") or ()


def mesh_of(config: object) -> Mesh | None:
    """The mesh."""
    mesh = _field(config, "mesh")
    return mesh if isinstance(mesh, Mesh) else None


def tokenizer_of_input(config: object) -> Any:
    """The config of the tokenizer of the input; None if its input reads no text."""
    return _field(input_of(config), "tokenizer")


def build_tokenizer(config: object) -> Any:
    """The tokenizer of the input, built; None if its input reads no text."""
    node = tokenizer_of_input(config)
    return None if node is None else node.build()


def sequence_length(config: object) -> int | None:
    """Tokens in a row of the input."""
    length = _field(input_of(config), "sequence_length")
    return length if isinstance(length, int) else None


def batch_size(config: object) -> int | None:
    """Rows in a global batch of the input."""
    rows = _field(input_of(config), "batch_size")
    return rows if isinstance(rows, int) else None


def num_shards(config: object) -> int | None:
    """Shards of the data that the input reads; None also if each row is one."""
    return _field(input_of(config), "num_shards")


def context_length(config: object) -> int | None:
    """Tokens that the model was made for, as the experiment's text says."""
    length = _field(text_of(config), "context_length")
    return length if isinstance(length, int) else None


def end_tokens(config: object) -> tuple[int, ...]:
    """Ids that end an output, as the experiment's text says; empty if it says none."""
    return tuple(_field(text_of(config), "end_tokens") or ())


def checkpoint_uri(config: object) -> str | None:
    """Where checkpoints go if they do not lie in the run directory."""
    return _field(checkpointer_of(config), "uri")


def save_interval(config: object) -> int | None:
    """Steps from one checkpoint to the next."""
    return _field(checkpointer_of(config), "every_steps")


def optimizer_of(config: object) -> Any:
    """The config of the learner's optimizer."""
    return _field(learner_of(config), "optimizer")


def rules_of(config: object) -> tuple[Node[Any], ...] | None:
    """The learner's rules for parameters; None if the learner has no such setting."""
    rules = _field(learner_of(config), "rules")
    return rules if isinstance(rules, tuple) else None


def accumulate_steps(config: object) -> int:
    """Microbatches that the learner cuts a batch into."""
    return _field(learner_of(config), "accumulate_steps") or 1


def offloads_optimizer(config: object) -> bool:
    """Whether the learner keeps the optimizer's state in the host's memory."""
    return bool(_field(learner_of(config), "offload"))


def is_pipelined(config: object) -> bool:
    """Whether the learner takes the gradients that a pipelined stack computes."""
    return bool(_field(learner_of(config), "pipelined"))
