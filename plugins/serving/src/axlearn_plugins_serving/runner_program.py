"""`RunnerProgram`: the functions that a runner compiles.

It also works without a runner: a plan compiles it for devices that are not present.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from axlearn_core.compose import Function, Functional, Program
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import Node, find
from axlearn_core.config.tree import find_slots
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.target import Target
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.engine_weights import KeptArray
from axlearn_plugins_serving.functions import ServingFunctions, Sizes
from axlearn_plugins_serving.paged_cache_feature import UsePagedCache
from axlearn_plugins_serving.parity import min_rows
from axlearn_plugins_serving.programs import Shapes, identity
from axlearn_plugins_serving.prompt_extras import PromptFunctions
from axlearn_plugins_serving.runner_config import RunnerConfig
from axlearn_plugins_serving.serving_linear import WeightLayout, choose_layout, describe_kept_layouts
from axlearn_plugins_serving.token_records import list_records
from axlearn_plugins_transformer.attention_variants.latent_cache import LatentCache
from axlearn_plugins_transformer.batch_invariant import with_invariant_kernels
from axlearn_plugins_transformer.cache_spec import has_states, read_prefix
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_plugins_transformer.layer_roles import RecurrentRole

if TYPE_CHECKING:
    from axlearn_plugins_finetune.lora.rows import RowAdapters

BLOCKS_PER_CALL = 16
"""Number of blocks that one call copies, reads or writes."""
SETUP_FUNCTIONS = ("serve_tables", "serve_cache", "serve_weights")
"""Functions that create the inputs of steps."""


class RunnerProgram(ModelProgram):
    """The functions of a runner, for devices that need not be present.

    Steps are declared after the cache.

    Attributes:
        cfg: Config of the runner.
        model: Config of the model, without the caches and adapters that the runner adds.
        buckets: Shapes of steps, in ascending order.
    """

    def __init__(
        self,
        cfg: RunnerConfig[Any],
        model: Node[Any],
        devices: Sequence[Any],
        mesh: Mesh | None = None,
        target: Target | None = None,
    ):
        """Build the program.

        `model` is the config of a `CausalLM`; see `ModelProgram` for the other arguments.
        """
        self.cfg, self.model = cfg, model
        parity, on_cpu = cfg.mode == "parity", devices[0].platform == "cpu"
        has_adapters = bool(cfg.adapters or cfg.adapter_slots)
        self._weight_layout: WeightLayout | None = choose_layout(
            model, devices, parity=parity, has_adapters=has_adapters, stacked=cfg.layers == "stacked"
        )
        cache = UsePagedCache(
            page_size=cfg.block_size,
            heads_first=on_cpu,
            store=cfg.cache_dtype,
            expand_latents=parity,
            kernel=cfg.kernel,
        )
        # A model without attention has no cache of tokens.
        has_attention = find_slots(model, KVCache) or find_slots(model, LatentCache)
        served = model if find(model, RecurrentRole) and not has_attention else cache.apply(model)
        if has_adapters:
            served = read_adapters(cfg).apply(served)
        if parity:
            served = with_invariant_kernels(served)
        super().__init__(Functional.from_config(served), devices, mesh, target, self._declare)
        self.buckets = cfg.buckets(states=has_states(self.cache_spec))
        if (prefix := read_prefix(self.cache_spec)) > cfg.chunk:
            raise RequestError(
                f"a chunk cannot contain the prefix, whose tokens attend to each other in both directions\n"
                f"    got: runner.chunk={cfg.chunk}, and a prefix of {prefix} tokens\n    expected: at least {prefix}\n"
                f"    fix: set serving.runner.chunk={prefix}"
            )

    @classmethod
    def for_program(cls, program: Program | ModelProgram | None, cfg: RunnerConfig[Any], model: Any) -> "RunnerProgram":
        """Build the program on the devices of `program`, or on one device if it is None."""
        if program is None:
            return cls(cfg, model.cfg, jax.local_devices()[:1])
        return cls(cfg, model.cfg, list(program.layout.mesh.devices.flat), program.mesh, program.target)

    @classmethod
    def with_steps(
        cls,
        cfg: RunnerConfig[Any],
        model: Node[Any],
        devices: Sequence[Any],
        mesh: Mesh | None = None,
        target: Target | None = None,
    ) -> "RunnerProgram":
        """Build the program with all its functions.

        This allocates nothing on the devices.
        """
        program = cls(cfg, model, devices, mesh, target)
        shapes, places = program.trace("serve_cache").out_info, program.compile("serve_cache").output_shardings
        program.declare_steps(
            jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)
        )
        return program

    @property
    def cache_spec(self) -> Any:
        """The entries of each layer's cache; see `axlearn_plugins_transformer.cache_spec`."""
        return self._serving.cache_spec

    @property
    def records(self) -> tuple[str, ...]:
        """Names of the records that the layers keep in their caches."""
        return list_records(self.cache_spec)

    @property
    def prompts(self) -> PromptFunctions | None:
        """The functions of prompts with extras, or None if the config allows no extras."""
        return self._serving.prompts

    @property
    def kept_weights(self) -> Mapping[str, KeptArray]:
        """The arrays that steps read as the model has them, by the path that steps use."""
        steps = self.arguments("serve", self.buckets[0])[0]
        return {path: KeptArray(source, steps[path].sharding) for path, source in self._serving.unchanged.items()}

    @property
    def configs(self) -> Mapping[str, Node[Any]]:
        """The configs that determine the functions."""
        return {"model": self.model, "runner": self.cfg}

    def _declare(self, model: Any) -> Mapping[str, Function]:
        cfg = self.cfg
        sizes = Sizes(
            blocks=cfg.total_blocks,
            block_size=cfg.block_size,
            slots=cfg.max_rows,
            blocks_per_call=BLOCKS_PER_CALL,
            steps=cfg.decode_steps,
            adapters=len(cfg.adapters) + cfg.adapter_slots,
            min_rows=min_rows(model) if cfg.mode == "parity" else 1,
            layout=self._weight_layout,
            snapshots=cfg.total_snapshots,
            stacked=cfg.layers == "stacked",
            drafts=cfg.drafts,
            pooling=cfg.embed_pooling,
            kept_tokens=cfg.kept_tokens,
            extras=cfg.extras,
        )
        self._serving = ServingFunctions(model, sizes)
        return self._serving.declare()

    def declare_steps(self, cache: Any) -> None:
        """Declare the steps.

        `cache` is the output of `serve_cache`: arrays, or abstract arrays with shardings.
        """
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), cache)
        self.functions.update(self._serving.declare_steps(specs))

    def step_shapes(self) -> Shapes:
        """Return the shapes of all functions that steps may need."""
        moves = ("serve_assign", "serve_assign_plain", "serve_mask", "serve_copy", "serve_read", "serve_write")
        moves = (*moves, "serve_records") if self.records else moves
        shapes: dict[str, Sequence[Any]] = {**{name: [None] for name in moves}, "serve": self.buckets}
        if self.cfg.adapter_slots:
            shapes["serve_adapters"] = [None]
        if self.cfg.embed_pooling is not None:
            shapes["serve_embed"] = self.cfg.embed_buckets
        if self.cfg.decode_steps > 1:
            shapes["serve_decode"] = [bucket for bucket in self.buckets if not bucket.chunks]
        return shapes

    def shapes(self) -> Shapes:
        """Return the shapes of all the runner's functions."""
        return {**{name: [None] for name in SETUP_FUNCTIONS}, **self.step_shapes()}

    def notes(self) -> tuple[str, ...]:
        """Return notes about linear maps that keep the training weight layout.

        There are none if all maps keep it.
        """
        return () if self._weight_layout is None else describe_kept_layouts(self.functional.describe())

    def export_all(self, directory: Path) -> None:
        """Compile all functions and write them to a new directory.

        Raises:
            RequestError: If the directory exists or a function cannot be written.
        """
        self.export(directory, self.shapes(), identity(self, self.configs))


def read_adapters(cfg: RunnerConfig[Any]) -> "RowAdapters":
    """Read the adapters of a runner's config, and its room for other adapters.

    Raises:
        RequestError: If the adapter plugin is not installed or the adapters cannot be selected per row.
        CheckpointError: If a directory has no adapter.
    """
    try:
        from axlearn_plugins_finetune.lora.rows import FreeSlots, RowAdapters
    except ImportError as error:
        raise RequestError(
            f"adapters need a plugin that is not installed: {error}\n    fix: pip install axlearn-plugins-finetune"
        ) from error
    free = FreeSlots(cfg.adapter_slots, cfg.adapter_rank, cfg.adapter_targets)
    return RowAdapters.read(cfg.adapters, free)
