"""A family of models: how its `config.json` becomes a config tree and back, and its table of tensors.

A family is a component called `huggingface-<model_type>`. It names an experiment to begin with, and says what of
`config.json` sets which path; both directions come from one table, and what a table cannot say is a method.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs

from axlearn_core.compose import Functional
from axlearn_core.config import REQUIRED, Configurable, Node, diff, get, map, size_of
from axlearn_core.config.flat import Change
from axlearn_core.config.kinds import change_kinds
from axlearn_core.config.tree import children
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest, unknown
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_plugins_models.huggingface.table import Rule

PREFIX = "huggingface-"
Json = dict[str, Any]

IRRELEVANT = frozenset(
    """
    _attn_implementation_autoset _name_or_path add_cross_attention architectures attention_dropout attn_pdrop
    auto_map bos_token_id cache_implementation dtype embd_pdrop ep_size eos_token_id head_dim
    initializer_range initializer_factor is_decoder max_position_embeddings max_window_layers model_type
    moe_layer_freq num_nextn_predict_layers output_attentions output_hidden_states output_router_logits
    pad_token_id pretraining_tp resid_pdrop return_dict router_aux_loss_coef router_jitter_noise rope_scaling
    rope_parameters rope_theta seq_aux aux_loss_alpha summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params torch_dtype transformers_version
    unk_token_id use_cache qk_head_dim n_ctx
    """.split()  # noqa: SIM905 - a list of one word per line would be longer than what it belongs to
)
"""Keys of `config.json` that change nothing that a model computes from its weights, or that families read together."""


class Settings(Mapping[str, Any]):
    """`config.json`, with an error for a key that it lacks. A key may give alternatives: `num_experts|num_local_experts`."""

    def __init__(self, data: Mapping[str, Any]):
        self.data, self.used = data, set[str]()

    def __getitem__(self, key: str) -> Any:
        for name in key.split("|"):
            self.used.add(name)
            if name in self.data:
                return self.data[name]
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def need(self, key: str) -> Any:
        """The value; raises `ConfigError` with the nearest names where there is none."""
        if (value := self.get(key, REQUIRED)) is REQUIRED:
            raise ConfigError(
                Problem(
                    path="config.json",
                    message=f"lacks {key.replace('|', ' or ')}",
                    nearest=nearest(key.split("|")[0], self.data),
                    fix="take the config.json that belongs to the weights",
                )
            )
        return value


@attrs.frozen
class Key:
    """What one key of `config.json` sets.

    Attributes:
        paths: of the config, below the root; all get the value.
        default: where the key is missing; without one, that is an error. It may be a function of the settings.
        values: their value -> ours, where they differ; no other value is known.
        read: their value -> ours, and `write` back, where they differ in another way.
    """

    paths: tuple[str, ...] | str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value

    @property
    def places(self) -> tuple[str, ...]:
        """`paths` as a tuple."""
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    def ours(self, name: str, hf: Settings) -> Any:
        """The value for our paths, as plain data."""
        value = hf.get(name, REQUIRED)
        if value is REQUIRED:
            if self.default is REQUIRED:
                value = hf.need(name)
            else:
                value = self.default(hf) if callable(self.default) else self.default
        if self.values is None:
            return None if value is None else self.read(value)
        if value not in self.values:
            raise unsupported(name, value, [repr(v) for v in self.values])
        return self.values[value]

    def theirs(self, config: Any) -> Any:
        """The value for `config.json`."""
        value = get(config, self.places[0])
        if self.values is None:
            return None if value is None else self.write(value)
        keys = {k: v for k, v in self.values.items() if v == value or (isinstance(v, dict) and isinstance(value, Node))}
        return next(iter(keys), value)


class Family(Configurable):
    """The base of families; a subclass sets these attributes, and overrides `settings` and `described` where it has to.

    Attributes:
        experiment: what the config tree begins as.
        architectures: what `config.json` may say.
        keys: of `config.json` -> what it sets (a path, or a `Key`).
        fixed: key -> the only value that the family's layers have; it is what a missing key means.
        rules: the table of tensors.
        ignored: tensors that may be in the files and are not part of the model, as patterns of `fnmatch`.
        idle: keys of `config.json` that say nothing where the `fixed` ones are as they are.
        prefix: of the names in the table; files may lack it throughout.
        text: whether the model reads text, so that a tokenizer belongs to it.
        copies: tensor -> another one that it may repeat, such as a tied output layer.
    """

    experiment: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    keys: ClassVar[Mapping[str, str | Key]]
    fixed: ClassVar[Mapping[str, Any]] = {}
    rules: ClassVar[tuple[Rule, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()
    idle: ClassVar[tuple[str, ...]] = ()
    prefix: ClassVar[str] = ""
    text: ClassVar[bool] = True
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, cfg: Any = None):
        self.model_type = ""

    def features(self, hf: Settings) -> Mapping[str, Json]:
        """The features that a model has, with their options."""
        return {}

    def settings(self, hf: Settings) -> Json:
        """Path -> value, as plain data: what `keys` cannot say."""
        return {}

    def described(self, config: Any) -> Json:
        """Key -> value of `config.json`, for a config tree: the inverse of `features` and `settings`."""
        return {}

    def missing(self, data: Json) -> Json:
        """Keys that a `config.json` lacks for readers of another version of transformers, which would take defaults."""
        return {}

    def table(self, model: Functional) -> tuple[Rule, ...]:
        """The rules for a model; where the names depend on it, a later rule holds instead of an earlier one."""
        return self.rules

    def resolve(self, data: Mapping[str, Any], **more: Any) -> tuple[Resolved, list[str]]:
        """The resolved experiment of a `config.json`, and the keys in it that nothing looked at.

        Args:
            data: the file.
            more: path -> value, set in addition.

        Raises:
            ConfigError: an architecture or a setting that the family does not have.
        """
        hf = Settings(data)
        for name in hf.get("architectures") or ():
            if name not in self.architectures:
                raise unsupported("architectures", name, self.architectures)
        for name, value in self.fixed.items():
            if (got := hf.get(name, value)) != value:
                raise unsupported(name, got, [repr(value)])
        if quantized := hf.get("quantization_config"):
            raise unsupported("quantization_config", quantized.get("quant_method"), ["weights that are not quantized"])
        values: Json = {}
        for name, key in self.keys.items():
            key = Key(key) if isinstance(key, str) else key
            values |= dict.fromkeys(key.places, key.ours(name, hf))
        features, settings = self.features(hf), self.settings(hf)
        resolved = resolve(Request.of(self.experiment, with_=features, set={**values, **settings, **more}))
        return resolved, sorted(hf.data.keys() - hf.used - IRRELEVANT - {*self.idle})

    def config_json(self, config: Any) -> Json:
        """`config.json` for a config tree; `differences` says whether it describes all of it."""
        keys = {n: Key(k) if isinstance(k, str) else k for n, k in self.keys.items()}
        written = {name.partition("|")[0]: key.theirs(config) for name, key in keys.items()}
        data = {
            "architectures": [self.architectures[0]],
            "model_type": self.model_type,
            **self.fixed,
            **_with_derived_heads(written),
            **self.described(config),
        }
        return data | self.missing(data)

    def differences(self, data: Mapping[str, Any], config: Any) -> list[Change]:
        """How the model of a `config.json` differs from that of a config, in what it computes."""
        theirs: Any = self.resolve(data)[0].config
        old, new = _with_derived_sizes(theirs.model), _with_derived_sizes(config.model)
        return [change for change, kind in change_kinds(diff(old, new), old, new) if kind == "mathematics"]


def _with_derived_heads(written: Json) -> Json:
    """The keys of a `config.json` with sizes of heads that were left to be derived: `transformers` does not load null ones."""
    sizes: Json = {}
    if "head_dim" in written and written["head_dim"] is None:
        sizes["head_dim"] = written["hidden_size"] // written["num_attention_heads"]
    if "num_key_value_heads" in written and written["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = written["num_attention_heads"]
    return {**written, **sizes}


def _with_derived_sizes(model: Node[Any]) -> Node[Any]:
    """A model's config, its sizes that were left to be derived set."""
    config: Any = model
    width = config.hidden_dim if "hidden_dim" in children(config) else config.decoder.hidden_dim

    def derive(part: Node[Any]) -> Node[Any]:
        fields: Json = children(part)
        sizes: Json = {}
        if fields.get("num_heads") and "head_dim" in fields and fields["head_dim"] is None:
            sizes["head_dim"] = width // fields["num_heads"]
        if fields.get("num_heads") and "num_kv_heads" in fields and fields["num_kv_heads"] is None:
            sizes["num_kv_heads"] = fields["num_heads"]
        if {"scale", "num_heads"} <= fields.keys() and fields["scale"] is None and "rope_head_dim" not in fields:
            sizes["scale"] = (fields["head_dim"] or sizes["head_dim"]) ** -0.5
        if isinstance(fields.get("hidden_dim"), Node):
            sizes["hidden_dim"] = size_of(fields["hidden_dim"], width)
        return attrs.evolve(part, **sizes)

    return map(model, derive)


def family(model_type: str) -> Family:
    """The installed family of a `model_type`; raises `RequestError` with the nearest names."""
    names = families()
    if model_type not in names:
        raise unknown("Hugging Face model_type", model_type, names, listing="axlearn plugins list")
    cls: Any = registry().component(PREFIX + model_type)
    instance = cls.owner()
    instance.model_type = model_type
    return instance


def families() -> list[str]:
    """The `model_type`s that are installed."""
    return sorted(n.removeprefix(PREFIX) for n in registry().claims["components"] if n.startswith(PREFIX))


def family_of(config: Any) -> tuple[Family, Json]:
    """The family that describes all of a config's model, and its `config.json`.

    Raises:
        RequestError: none does; it says what the nearest one cannot describe.
    """
    nearly: tuple[int, str, list[Change]] | None = None
    for name in families():
        one = family(name)
        try:
            data = one.config_json(config)
            changes = one.differences(data, config)
        except (AttributeError, RequestError):
            continue  # `described` reads what trees of its family have, and this one has other parts
        if not changes:
            return one, data
        if nearly is None or len(changes) < nearly[0]:
            nearly = len(changes), name, changes
    if nearly is None:
        raise RequestError(
            "no family describes this model: it lacks parts that every one of them has, or has others\n"
            f"    known: {', '.join(families())}\n    fix: install or write a family that has it; docs/huggingface.md says how"
        )
    raise RequestError(
        f"no family describes all of this model; {nearly[1]} has something else at\n"
        + "\n".join(f"    {c.path}: {c.old!r}, here {c.new!r}" for c in nearly[2][:8])
        + "\n    fix: leave out the features that change this, or merge them (`axlearn lora merge`)"
    )


def unsupported(key: str, value: Any, supported: Any) -> ConfigError:
    """The error for a value in `config.json` that a family does not know."""
    names = [str(k) for k in supported]
    return ConfigError(
        Problem(
            path=f"config.json: {key}",
            message="the family has no such variant",
            got=str(value),
            expected=", ".join(names),
            nearest=nearest(str(value), names),
            fix="install a family that has it: docs/huggingface.md says how one is made",
        )
    )
