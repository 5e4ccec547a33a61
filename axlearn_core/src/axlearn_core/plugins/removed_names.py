"""Removed hooks and names with their replacements, for the error messages of plugins that still use them.

Add an entry when you remove a hook, module, or name that plugins may use. `axlearn plugins doctor` prints the replacement.
"""

import re
from collections.abc import Mapping
from types import ModuleType

HOOKS: Mapping[str, str] = {
    "axlearn_command_options": "register an option that changes the request as `COMMAND--OPTION` in the entry-point group "
    "`axlearn.options`, and an option that performs a separate action as the subcommand `COMMAND-WORD` in `axlearn.commands`",
}
"""Replacement of each removed hook."""

_TEXT = (
    "HasAddedTokens", "HasBosId", "HasFolder", "HasSpecialTokens", "SpellsBos", "SpellsEos", "bos_id_of", "bos_token_of",
    "encode_prompt", "encodes_batches", "first_token", "folder_of", "special_tokens_of",
)  # fmt: skip
NAMES: Mapping[str, str] = {
    "axlearn_core.checkpoint.assets": "axlearn_core.run.asset_copies",
    "axlearn_core.checkpoint.orbax": "axlearn_core.checkpoint.sharded, or axlearn_plugins_orbax.checkpointer for Orbax",
    "axlearn_core.checkpoint.run": "axlearn_core.run.Run, which opens a run",
    "axlearn_core.checkpoint.weights": "axlearn_core.run, which has open_weights and RunWeights",
    **{f"axlearn_core.contracts.text.{name}": f"axlearn_plugins_transformer.text.protocols.{name}" for name in _TEXT},
    "axlearn_core.contracts.capabilities.BeginsElsewhere": "axlearn_core.contracts.capabilities.LoadsInitialWeights",
    "axlearn_core.contracts.capabilities.ChecksBeginning": "axlearn_core.contracts.capabilities.ChecksStart",
    "axlearn_core.contracts.capabilities.HasEndTokens": "axlearn_plugins_transformer.generate.HasEndTokens",
    "axlearn_core.contracts.capabilities.HasTokenizer": "axlearn_plugins_transformer.text.protocols.HasTokenizer",
    "axlearn_core.contracts.capabilities.tokenizer_of": "axlearn_plugins_transformer.text.protocols.tokenizer_of",
    "axlearn_core.contracts.capabilities.WarmsUp": "axlearn_plugins_tools.optimizers.schedule_free.WarmsUp",
    "axlearn_core.cli.completion": "axlearn_core.cli.common",
    "axlearn_core.cli.extension_checks": "axlearn_core.cli.extensible",
    "axlearn_core.compose.arrays": "axlearn_core.compose.functions",
    "axlearn_core.compose.collectives": "axlearn_plugins_runtime.part_transfers",
    "axlearn_core.config.configured": "axlearn_core.config, which has configure and with_subclass",
    "axlearn_core.config.fields_of": "axlearn_core.config.get_fields",
    "axlearn_core.config.missing": "axlearn_core.config.find_missing",
    "axlearn_core.config.options_of": "axlearn_core.config.get_options",
    "axlearn_core.config.kinds.kind_of": "axlearn_core.config.kinds.get_kind",
    "axlearn_core.config.subclass": "axlearn_core.config, which has with_subclass",
    "axlearn_core.contracts.roles": "axlearn_core.extend.StackRole",
    "axlearn_core.extend.nothing_to_set": "axlearn_core.extend.no_match_problem",
    "axlearn_core.learn.path_of": "axlearn_core.learn.format_key_path",
    "axlearn_core.nn.held": "axlearn_core.nn.module_checks",
    "axlearn_core.nn.padding.up_to_the_last_target": "axlearn_core.nn.padding.make_token_mask",
    "axlearn_core.plugins.entry_points": "axlearn_core.plugins.index",
    "axlearn_core.plugins.source_hash": "axlearn_core.compose.identity",
    "axlearn_core.train.trackers.common": "axlearn_core.train.trackers",
    "axlearn_core.train.trackers.jsonl": "axlearn_core.train.trackers",
    "axlearn_core.train.trackers.lines": "axlearn_core.train.trackers",
    "axlearn_core.plugins.doctor": "axlearn_core.extend, which has Finding; axlearn_plugins_tools.doctor.examine",
    "axlearn_core.cli.common.plain": "axlearn_core.cli.common.to_json_value",
    "axlearn_core.plugins.indivisible": "axlearn_core.plugins.mesh_replacement",
    "axlearn_core.plugins.registry.normalized": "axlearn_core.plugins.registry.normalize_name",
    "axlearn_core.plugins.request.with_file": "axlearn_core.plugins.request.merge_file",
    "axlearn_core.plugins.unregistered": "axlearn_core.plugins.code_names",
    "axlearn_core.plugins.application": "axlearn_core.plugins.resolve",
    "axlearn_core.plugins.layout_file": "axlearn_plugins_plan.search.layout_file",
    "axlearn_core.plugins.resolved": "axlearn_core.plugins.resolve",
    "axlearn_core.plugins.run_file": "axlearn_core.plugins.request",
    "axlearn_core.plugins.removed": "axlearn_core.plugins.removed_names",
    "axlearn_core.run.holder": "axlearn_plugins_runtime.job.holder",
    "axlearn_core.run.mirror": "axlearn_core.run.working_copy, or axlearn_plugins_runtime.job.mirror for RunMirror",
    "axlearn_core.run.phases": "axlearn_plugins_runtime.job.phases, axlearn_plugins_runtime.job.progress for Progress, or "
    "axlearn_core.run.metric_files for PHASES",
    "axlearn_core.train.compiled_step": "axlearn_plugins_runtime.job.compiled_step",
    "axlearn_core.train.distributed.preempted": "axlearn_plugins_runtime.job.stops.is_preempted",
    "axlearn_core.train.held_out": "axlearn_core.train.evaluation_loss",
    "axlearn_core.train.Loaded": "axlearn_core.train.LoadedModel",
    "axlearn_core.train.holder": "axlearn_plugins_runtime.job.holder",
    "axlearn_core.train.input_failure": "axlearn_plugins_runtime.job.input_failure",
    "axlearn_core.train.listeners.ClockListener": "axlearn_plugins_runtime.job.phases.ClockListener",
    "axlearn_core.train.listeners.MirrorListener": "axlearn_plugins_runtime.job.mirror.MirrorListener",
    "axlearn_core.train.lock": "axlearn_core.run.lock",
    "axlearn_core.train.mirror": "axlearn_core.run.working_copy, or axlearn_plugins_runtime.job.mirror for RunMirror",
    "axlearn_core.train.open_run": "axlearn_core.train.session.Session, which represents a run during training",
    "axlearn_core.train.peers": "axlearn_plugins_runtime.job.peers",
    "axlearn_core.train.ownership.Ownership": "axlearn_plugins_runtime.job.holder.HolderListener",
    "axlearn_core.train.phases": "axlearn_plugins_runtime.job.phases",
    "axlearn_core.train.run_dir": "axlearn_core.run.record",
    "axlearn_core.train.same_job": "axlearn_core.train.job_checks",
    "axlearn_core.train.signals": "axlearn_plugins_runtime.job.signals",
    "axlearn_core.train.trainer.run_listeners": "axlearn_core.train.listeners.plugin_listeners",
    "axlearn_plugins_finetune.runs": "axlearn_core.run.Run.derive to write a run; axlearn_plugins_finetune.conversion",
    "axlearn_core.nn.linear.WEIGHT_FIRST_ROWS": "axlearn_plugins_serving.serving_linear.WEIGHT_FIRST_ROWS",
    "axlearn_plugins_serving.weight_layout": "axlearn_plugins_serving.serving_linear for layouts of weights, and "
    "axlearn_plugins_serving.parity for the parity mode",
    "axlearn_plugins_transformer.transformer.TwoHalves": "axlearn_plugins_transformer.layer_roles.SplitLayerRole, a base of "
    "the layer's Config",
    "axlearn_core.nn.padding.known_to_layers": "axlearn_core.nn.padding.use_context",
    "axlearn_plugins_finetune.conversion.bridges": "axlearn_plugins_finetune.conversion.load_bridges",
    "axlearn_plugins_finetune.conversion.carry": "axlearn_plugins_finetune.conversion.param_transfer",
    "axlearn_plugins_finetune.conversion.convert.converted": "axlearn_plugins_finetune.conversion.convert.convert_run",
    "axlearn_plugins_models.bridges.wrapped": "axlearn_plugins_models.bridges.wrapper",
    "axlearn_plugins_models.huggingface.published": "axlearn_plugins_models.huggingface.published_config.published_model",
    "axlearn_plugins_plan.command.styled": "axlearn_plugins_plan.command.style_line",
    "axlearn_plugins_plan.compilation.uncached": "axlearn_plugins_plan.compilation.disable_compilation_cache",
    "axlearn_plugins_plan.plan.Plan": "axlearn_plugins_plan.plan.FunctionPlan",
    "axlearn_plugins_plan.plan.prepared": "axlearn_plugins_plan.plan.compose_program",
    "axlearn_plugins_plan.search.command.positive": "axlearn_plugins_plan.search.command.parse_positive",
    "axlearn_plugins_plan.search.compiled": "axlearn_plugins_plan.search.compile_layouts",
    "axlearn_plugins_plan.search.rank.varied": "axlearn_plugins_plan.search.rank.parse_vary",
    "axlearn_plugins_serving.contracts.Pending": "axlearn_plugins_serving.contracts.SubmittedStep",
    "axlearn_plugins_serving.disaggregated.opening": "axlearn_plugins_serving.disaggregated.open_router",
    "axlearn_plugins_serving.paged": "axlearn_plugins_serving.paged_cache_feature",
    "axlearn_plugins_serving.waiting": "axlearn_plugins_serving.waiting_queue",
    "axlearn_plugins_transformer.alternate.change_slot": "axlearn_core.extend.edit_innermost",
    "axlearn_plugins_transformer.alternate.Plan": "axlearn_plugins_transformer.alternate.LayerPattern",
    "axlearn_plugins_transformer.alternate.plan": "axlearn_plugins_transformer.alternate.find_pattern",
    "axlearn_plugins_transformer.causal_lm.TwoPartDecoder": "axlearn_plugins_transformer.causal_lm.SplitDecoder",
    "axlearn_plugins_transformer.layer_roles.TwoHalvesRole": "axlearn_plugins_transformer.layer_roles.SplitLayerRole",
    "axlearn_plugins_transformer.layer_roles.TwoPartRole": "axlearn_plugins_transformer.layer_roles.SplitDecoderRole",
    "axlearn_plugins_transformer.paged_cache.window_size": "axlearn_plugins_transformer.paged_cache.paged_mask",
    "axlearn_plugins_transformer.stacked": "axlearn_plugins_transformer.stack_layers",
    "axlearn_plugins_transformer.text.chat_template.Rendered": "axlearn_plugins_transformer.text.chat_template.RenderedChat",
    "axlearn_plugins_transformer.text.writing": "axlearn_plugins_transformer.text.text_stream",
    "axlearn_core.testing": "axlearn_testing, from the distribution axlearn-testing",
    "axlearn_testing.chaos.Plan": "axlearn_testing.chaos.FaultPlan",
    "axlearn_core.cli.open_command": "axlearn_core.cli.extensible.ExtensibleCommand, which replaces OpenCommand",
}
"""Replacement of each removed module or `module.name`. The entry of a module covers all names below it."""


def find_replacement(error: BaseException) -> tuple[str, str] | None:
    """Look up the removed name that caused an import error or attribute error.

    Returns:
        (key in `NAMES`, replacement), or None if the error has a different cause.
    """
    name = _missing_name(error)
    parts = name.split(".")
    keys = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next(((key, NAMES[key]) for key in keys if key in NAMES), None)


def _missing_name(error: BaseException) -> str:
    if isinstance(error, ImportError):
        name = re.match(r"cannot import name '(\w+)'", str(error))
        return f"{error.name}.{name[1]}" if name else error.name or ""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return f"{error.obj.__name__}.{error.name}"
    return ""
