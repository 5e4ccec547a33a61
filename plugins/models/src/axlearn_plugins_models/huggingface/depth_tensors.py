"""The tensors of multi-token prediction in Hugging Face files. `transformers` does not read them.

Files of DeepSeek-V3 and GLM-4.5 store depth k as layer `num_hidden_layers + k`, with copies of the embedding and the output layer.
Files of Qwen3-Next have one depth, whose tensors begin with `mtp.`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from axlearn_plugins_models.huggingface.table import Rule
from axlearn_plugins_transformer.multi_token import MultiTokenCausalLM

LAYER, DEPTH = "decoder.layer.", "mtp."
"""Beginnings of the paths of a layer and of the depths."""
THEIRS = "model.layers.{layer}."
"""Beginning of the names of a layer's tensors."""


@attrs.frozen
class DepthFormat:
    """Names of the tensors of the depths.

    Attributes:
        layer: Beginning of the names of a depth's layer. `{n}` is the number of the layer, `num_hidden_layers + k`, and `{k}` that
            of the depth.
        names: Parameter of a depth -> name of its tensor, with the same placeholders.
        copies: Name of a tensor, with the same placeholders -> the tensor of the model that it duplicates.
        key: Key of `config.json` for the number of depths, or None.
        most: Largest number of depths, or None.
    """

    layer: str
    names: Mapping[str, str] = attrs.field(hash=False)
    copies: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    key: str | None = None
    most: int | None = None

    def rules(self, rules: Iterable[Rule], depth: int, num_layers: int) -> tuple[Rule, ...]:
        """Return the rules for the depths, given the rules for the layers of the model."""
        layer_rules = [rule for rule in rules if all(path.startswith(LAYER) for path in rule.paths)]
        result: list[Rule] = []
        for k in range(depth):
            numbers = {"n": num_layers + k, "k": k}
            for rule in layer_rules:
                ours = tuple(f"{DEPTH}{k}.layer.{path.removeprefix(LAYER)}" for path in rule.paths)
                theirs = self.layer.format(**numbers) + rule.theirs.removeprefix(THEIRS)
                result.append(attrs.evolve(rule, ours=ours, theirs=theirs))
            for name, tensor in self.names.items():
                pattern = "o i -> i o" if name == "projection.weight" else ""
                result.append(Rule(f"{DEPTH}{k}.{name}", tensor.format(**numbers), pattern))
        return tuple(result)

    def find_copies(self, depth: int, num_layers: int) -> dict[str, str]:
        """Return the names of tensors that files may contain in addition -> the tensors that they duplicate."""
        return {
            name.format(n=num_layers + k, k=k): original for k in range(depth) for name, original in self.copies.items()
        }

    def prefixes(self, depth: int, num_layers: int) -> tuple[str, ...]:
        """Return the beginnings of the names of the depths' tensors."""
        names = (self.layer, *self.names.values())
        return tuple(
            sorted(
                {name.format(n=num_layers + k, k=k) for k in range(depth) for name in names}, key=lambda n: (len(n), n)
            )
        )

    def count(self, data: Mapping[str, Any], depth: int) -> int:
        """Return how many of `depth` depths a `config.json` describes."""
        stated = data.get(self.key) if self.key is not None else None
        return depth if type(stated) is not int or stated < 1 else stated


NEXT_LAYERS = DepthFormat(
    layer="model.layers.{n}.",
    names={
        "hidden_norm.weight": "model.layers.{n}.hnorm.weight",
        "embedding_norm.weight": "model.layers.{n}.enorm.weight",
        "projection.weight": "model.layers.{n}.eh_proj.weight",
        "norm.weight": "model.layers.{n}.shared_head.norm.weight",
    },
    copies={
        "model.layers.{n}.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.{n}.shared_head.head.weight": "lm_head.weight",
    },
    key="num_nextn_predict_layers",
)
"""Files of DeepSeek-V3 and GLM-4.5."""
ONE_DEPTH = DepthFormat(
    layer="mtp.layers.{k}.",
    names={
        "hidden_norm.weight": "mtp.pre_fc_norm_hidden.weight",
        "embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
        "projection.weight": "mtp.fc.weight",
        "norm.weight": "mtp.norm.weight",
    },
    most=1,
)
"""Files of Qwen3-Next."""


def depth_of(model: Any) -> int:
    """Return the number of depths of a model's config, or 0."""
    return model.depth if isinstance(model, MultiTokenCausalLM.Config) else 0
