"""Families of models, which convert `config.json` to a config tree and back, and map tensor names.

A family is a component named `huggingface-<model_type>`. It names an experiment to start from, and maps keys of
`config.json` to config paths. One table serves both directions. Methods handle everything that a table cannot express.
"""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from axlearn_core.compose import Functional
from axlearn_core.config import REQUIRED, Configurable, Node, diff, factor_of, get, map, replace_config, size_of
from axlearn_core.config.flat import Change
from axlearn_core.config.kinds import change_kinds
from axlearn_core.config.tree import children
from axlearn_core.errors import ConfigError, Problem, RequestError, nearest, unknown
from axlearn_core.plugins.index import not_installed_error
from axlearn_core.plugins.registry import registry
from axlearn_core.plugins.request import Request
from axlearn_core.plugins.resolve import Resolved, resolve
from axlearn_plugins_models.huggingface.depth_tensors import DEPTH, DepthFormat, depth_of
from axlearn_plugins_models.huggingface.files import StoredTensor
from axlearn_plugins_models.huggingface.quantized_tensors import SCHEMES, Scheme, dequantize, read_scheme
from axlearn_plugins_models.huggingface.table import Rule, Tensor, layout
from axlearn_plugins_transformer.alternate import with_shortest_cycles
from axlearn_plugins_transformer.attention import score_scale
from axlearn_plugins_transformer.causal_lm import CausalLM
from axlearn_plugins_transformer.multi_token import MultiTokenCausalLM

PREFIX, KIND = "huggingface-", "Hugging Face model_type"
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
    """.split()  # noqa: SIM905 - a list with one word per line would be longer than the code that uses it
)
"""Keys of `config.json` that do not change what a model computes from its weights, or that families read together with other
keys."""


class Settings(Mapping[str, Any]):
    """A `config.json` that raises an error for missing keys. A key may list alternatives: `num_experts|num_local_experts`."""

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
        """Return the value of a key. Raise `ConfigError` with the nearest names if it is missing or null."""
        if (value := self.get(key)) is None:
            raise ConfigError(
                Problem(
                    path="config.json",
                    message=f"does not have {key.replace('|', ' or ')}",
                    got="null" if key in self else None,
                    nearest=nearest(key.split("|")[0], [k for k, v in self.data.items() if v is not None]),
                    fix="use the config.json that belongs to the weights",
                )
            )
        return value


@attrs.frozen
class Key:
    """Mapping of one key of `config.json` to config paths.

    Attributes:
        paths: Config paths, below the root, that all get the value.
        default: Value of a missing key, or a function of the settings. Without a default, a missing key is an error.
        values: Hugging Face's value -> our value. Other values are not supported.
        read: Function from Hugging Face's value to ours.
        write: Function from our value to Hugging Face's.
    """

    paths: tuple[str, ...] | str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value

    @property
    def places(self) -> tuple[str, ...]:
        """Paths as a tuple."""
        return (self.paths,) if isinstance(self.paths, str) else self.paths

    def ours(self, name: str, hf: Settings) -> Any:
        """Return our value, as plain data."""
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
        """Return the value for `config.json`.

        For a node that JSON cannot describe, such as alternating layers, it is None, or the default if only some values are
        supported. `Family.differences` then names the node.
        """
        value = get(config, self.places[0])
        if self.values is not None:
            keys = {
                k: v for k, v in self.values.items() if v == value or (isinstance(v, dict) and isinstance(value, Node))
            }
            stand_in = None if self.default is REQUIRED or callable(self.default) else self.default
            value = next(iter(keys), stand_in if isinstance(value, Node) else value)
        elif value is not None:
            value = self.write(value)
        return None if isinstance(value, Node) else value


class Family(Configurable):
    """Base class for families. A subclass sets these attributes, and overrides `settings` and `export_keys` if it needs to.

    Attributes:
        experiment: Experiment that the config tree starts from.
        architectures: Supported values of `architectures` in `config.json`.
        keys: Key of `config.json` -> a config path, or a `Key`.
        fixed: Key -> the only supported value, which is also assumed if the key is missing.
        rules: Table of tensors.
        ignored: Patterns (`fnmatch`) of tensors that files may contain although they are not part of the model.
        unused_keys: Keys of `config.json` that have no effect while the `fixed` keys have their values.
        prefix: Prefix of the tensor names in the table. Files may omit it, if they omit it everywhere.
        text: Whether the model reads text, and therefore has a tokenizer.
        common: Whether to prefer this family if several describe a model, because most tools read it.
        copies: Tensor -> the tensor that it may duplicate, such as a tied output layer.
        depths: Tensors of multi-token prediction in the files. None if the family does not read or write them.
    """

    experiment: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    keys: ClassVar[Mapping[str, str | Key]]
    fixed: ClassVar[Mapping[str, Any]] = {}
    rules: ClassVar[tuple[Rule, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()
    unused_keys: ClassVar[tuple[str, ...]] = ()
    prefix: ClassVar[str] = ""
    text: ClassVar[bool] = True
    common: ClassVar[bool] = False
    copies: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    depths: ClassVar[DepthFormat | None] = None

    def __init__(self, cfg: Any = None):
        self.model_type = ""

    def features(self, hf: Settings) -> Mapping[str, Json]:
        """Return the features of a model, with their options."""
        return {}

    def settings(self, hf: Settings) -> Json:
        """Return path -> value, as plain data, for settings that `keys` cannot express."""
        return {}

    def export_keys(self, config: Any) -> Json:
        """Return key -> value of `config.json` for a config tree, the inverse of `features` and `settings`."""
        return {}

    def compatibility_keys(self, data: Json) -> Json:
        """Return keys for other versions of transformers, which would otherwise use their defaults."""
        return {}

    def table(self, model: Functional) -> tuple[Rule, ...]:
        """Return the rules for a model, if tensor names depend on it. Later rules override earlier ones."""
        return self.rules

    def ignored_tensors(self, hf: Settings) -> Sequence[str]:
        """Return patterns (`fnmatch`) of ignored tensors: `ignored`, and the layers that predict more than the next token."""
        count = hf.get("num_nextn_predict_layers")
        layers = range(hf.need("num_hidden_layers"), hf.need("num_hidden_layers") + count) if type(count) is int else ()
        return (*self.ignored, *(f"model.layers.{i}.*" for i in layers))

    def ignored_names(self, data: Mapping[str, Any], names: Iterable[str], depth: int = 0) -> set[str]:
        """Return the names that match `ignored_tensors`.

        Args:
            data: Content of `config.json`.
            names: Names of tensors.
            depth: Number of depths of the model. Their tensors are not ignored.
        """
        patterns = self.ignored_tensors(Settings(data))
        read = self.depths.prefixes(depth, data["num_hidden_layers"]) if self.depths and depth else ()
        return {n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns) and not n.startswith(read)}

    def quantizations(self, hf: Settings) -> Mapping[str, Scheme]:
        """Return `quant_method` -> scheme, for the quantized weights that the family reads."""
        return SCHEMES

    def dequantize(self, data: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Replace quantized weights with tensors that are read as floats; see `quantized_tensors`.

        Args:
            data: Content of `config.json`.
            stored: Name -> tensor in the files, without ignored tensors.

        Raises:
            RequestError: If the family does not support the quantization.
        """
        return dequantize(data, stored, self.quantizations(Settings(data)))

    def layout(self, model: Functional, data: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return every tensor in a file of a model by name; see `table.layout`. `data` is the content of `config.json`."""
        rules = self.table(model)
        depth = len({path.split(".")[1] for path in model.abstract if path.startswith(DEPTH)})
        if self.depths is not None and depth:
            rules = (*rules, *self.depths.rules(rules, depth, data["num_hidden_layers"]))
        return layout(model, rules, data)

    def depth_copies(self, config: Any, data: Mapping[str, Any]) -> dict[str, str]:
        """Return the tensors of the depths that duplicate others: name -> name of the original.

        Args:
            config: Config of the model.
            data: Content of `config.json`.
        """
        depth = depth_of(config)
        return self.depths.find_copies(depth, data["num_hidden_layers"]) if self.depths is not None and depth else {}

    def resolve(self, data: Mapping[str, Any], **more: Any) -> tuple[Resolved, list[str]]:
        """Resolve the experiment of a `config.json`. Return it with the keys of the file that were not read.

        Args:
            data: Content of the file.
            more: Additional settings, path -> value.

        Raises:
            ConfigError: If the family does not support an architecture or a setting.
        """
        hf = Settings(data)
        for name in hf.get("architectures") or ():
            if name not in self.architectures:
                raise unsupported("architectures", name, self.architectures)
        for name, value in self.fixed.items():
            if (got := hf.get(name, value)) != value:
                raise unsupported(name, got, [repr(value)])
        read_scheme(hf, self.quantizations(hf))
        values: Json = {}
        for name, key in self.keys.items():
            key = Key(key) if isinstance(key, str) else key
            values |= dict.fromkeys(key.places, key.ours(name, hf))
        features, settings = self.features(hf), self.settings(hf)
        resolved = resolve(Request.from_arguments(self.experiment, with_=features, set={**values, **settings, **more}))
        return resolved, sorted(hf.data.keys() - hf.used - IRRELEVANT - {*self.unused_keys})

    def config_json(self, config: Any) -> Json:
        """Return the `config.json` of a config tree. `differences` checks whether it describes the whole tree."""
        config = attrs.evolve(config, model=_with_hidden_sizes(config.model))
        keys = {n: Key(k) if isinstance(k, str) else k for n, k in self.keys.items()}
        written = {name.partition("|")[0]: key.theirs(config) for name, key in keys.items()}
        data = {
            "architectures": [self.architectures[0]],
            "model_type": self.model_type,
            **self.fixed,
            **_with_derived_heads(written),
            **self.export_keys(config),
        }
        if self.depths is not None and self.depths.key is not None and (depth := depth_of(config.model)):
            data[self.depths.key] = depth
        return data | self.compatibility_keys(data)

    def differences(self, data: Mapping[str, Any], config: Any) -> list[Change]:
        """Return the differences that affect results between the model of a `config.json` and that of a config."""
        theirs: Any = self.resolve(data)[0].config
        depth = depth_of(config.model)
        if self.depths is not None and depth:  # no key of `config.json` says whether the model keeps its depths
            count = min(self.depths.count(data, depth), self.depths.most or depth)
            theirs = attrs.evolve(
                theirs, model=replace_config(theirs.model, CausalLM, MultiTokenCausalLM.Config(depth=count))
            )
        old, new = (_with_derived_sizes(_with_shortest_cycles(model)) for model in (theirs.model, config.model))
        return [change for change, kind in change_kinds(diff(old, new), old, new) if kind == "mathematics"]


def _with_derived_heads(written: Json) -> Json:
    """Set derived head sizes in a `config.json`, because `transformers` cannot load null sizes."""
    sizes: Json = {}
    if "head_dim" in written and written["head_dim"] is None:
        sizes["head_dim"] = written["hidden_size"] // written["num_attention_heads"]
    if "num_key_value_heads" in written and written["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = written["num_attention_heads"]
    return {**written, **sizes}


def _with_shortest_cycles(model: Node[Any]) -> Node[Any]:
    """Rewrite the cycles of each stack in the shortest form, so that another form of the same cycle compares equal."""

    def shorten(part: Any) -> Any:
        fields: Json = children(part)
        is_stack = isinstance(fields.get("layer"), Node) and isinstance(fields.get("num_layers"), int)
        return attrs.evolve(part, layer=with_shortest_cycles(part.layer, part.num_layers)) if is_stack else part

    return map(model, shorten)


def _width(model: Any) -> int:
    return model.hidden_dim if "hidden_dim" in children(model) else model.decoder.hidden_dim


def _with_hidden_sizes(model: Node[Any]) -> Node[Any]:
    """Convert hidden sizes and factors that are relative to the width into numbers."""
    width = _width(model)

    def derive(part: Node[Any]) -> Node[Any]:
        fields: Json = children(part)
        numbers: Json = {}
        if isinstance(hidden := fields.get("hidden_dim"), Node):
            numbers["hidden_dim"] = size_of(hidden, width)
        for name in ("multiplier", "output_multiplier", "logit_multiplier"):
            if isinstance(factor := fields.get(name), Node):
                numbers[name] = factor_of(factor, width=width)
        if isinstance(fields.get("scale"), Node) and fields.get("num_heads"):
            numbers["scale"] = _score_scale(fields, width)
        return attrs.evolve(part, **numbers) if numbers else part

    return map(model, derive)


def _score_scale(attention: Json, width: int) -> float:
    head_dim = attention["head_dim"] or width // attention["num_heads"]
    size = head_dim + size_of(attention.get("rope_head_dim", 0), head_dim)
    return score_scale(attention["scale"], size, width, grows=attention["head_dim"] is None)


def _with_derived_sizes(model: Node[Any]) -> Node[Any]:
    """Set the derived sizes in the config of a model."""
    width = _width(model)

    def derive(part: Node[Any]) -> Node[Any]:
        fields: Json = children(part)
        sizes: Json = {}
        if fields.get("num_heads") and "head_dim" in fields and fields["head_dim"] is None:
            sizes["head_dim"] = width // fields["num_heads"]
        if fields.get("num_heads") and "num_kv_heads" in fields and fields["num_kv_heads"] is None:
            sizes["num_kv_heads"] = fields["num_heads"]
        if {"scale", "num_heads"} <= fields.keys() and fields["scale"] is None and "rope_head_dim" not in fields:
            sizes["scale"] = (fields["head_dim"] or sizes["head_dim"]) ** -0.5
        return attrs.evolve(part, **sizes)

    return map(_with_hidden_sizes(model), derive)


def family(model_type: str) -> Family:
    """Return the installed family of a `model_type`.

    Raises:
        RequestError: There is none. The error names its package, or the nearest names.
    """
    names = families()
    if model_type not in names:
        raise not_installed(model_type) or unknown(KIND, model_type, names, listing="axlearn plugins list")
    cls: Any = registry().component(PREFIX + model_type)
    instance = cls.owner()
    instance.model_type = model_type
    return instance


def not_installed(model_type: str) -> RequestError | None:
    """Return the error for a family whose package is not installed, or None if no index lists the family."""
    return not_installed_error("components", PREFIX + model_type, f"{KIND} {model_type!r}")


def families() -> list[str]:
    """Return the installed `model_type`s."""
    return sorted(n.removeprefix(PREFIX) for n in registry().claims["components"] if n.startswith(PREFIX))


def find_family(config: Any) -> tuple[Family, Json]:
    """Return the family that describes the whole model of a config, and its `config.json`.

    If several do, it is the one that the model was imported with, a `common` one, or the first by name.

    Raises:
        RequestError: If no family does. The message lists what the nearest one cannot describe.
    """
    nearly: tuple[int, str, list[Change]] | None = None
    imported = children(config).get("name") if isinstance(config, Node) else None
    candidates = [family(name) for name in families()]
    for one in sorted(candidates, key=lambda f: (f.model_type != imported, not f.common)):
        try:
            data = one.config_json(config)
            changes = one.differences(data, config)
        except (AttributeError, LookupError, RequestError):
            continue  # `export_keys` reads fields of its own family, and this model has different parts
        if not changes:
            return one, data
        if nearly is None or len(changes) < nearly[0]:
            nearly = len(changes), one.model_type, changes
    if nearly is None:
        raise RequestError(
            "no family describes this model: it lacks parts that they all have, or has different parts\n"
            f"    known: {', '.join(families())}\n    fix: install or write a family for it; see docs/huggingface.md"
        )
    raise RequestError(
        f"no family describes this whole model; {nearly[1]} differs at\n"
        + "\n".join(f"    {c.path}: {c.old!r}, here {c.new!r}" for c in nearly[2][:8])
        + "\n    fix: remove the features that change this, or merge them (`axlearn lora merge`)"
    )


def unsupported(key: str, value: Any, supported: Any) -> ConfigError:
    """Return the error for a value in `config.json` that a family does not support."""
    names = [str(k) for k in supported]
    return ConfigError(
        Problem(
            path=f"config.json: {key}",
            message="the family does not support this value",
            got=str(value),
            expected=", ".join(names),
            nearest=nearest(value, names) if isinstance(value, str) else (),
            fix="install or write a family that supports it; see docs/huggingface.md",
        )
    )
