"""Shrinking configs: what stays, what fits, and what cannot be shrunk."""

import functools

import attrs
import jax
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.compose.program import check_program
from axlearn_core.config import Configurable, find, get, node, patch, walk
from axlearn_core.errors import RequestError
from axlearn_core.extend import Constant, interface
from axlearn_core.plugins.registry import registry
from axlearn_plugins_transformer.layer_roles import AttentionKernelRole
from axlearn_plugins_verify.prove import shrink as shrinking
from axlearn_plugins_verify.prove.shrink import SIZES, shrink, synthetic_batch
from axlearn_plugins_verify.prove.structure import describe_structure
from support import toy_models

PAGES_AND_MICROBATCHES = ("quickstart", "cache-int8", "gradient-accumulation:steps=8")
describe = functools.cache(describe_structure)
"""Describes each config once for all tests."""


@pytest.fixture(autouse=True)
def share_structures(monkeypatch):
    monkeypatch.setattr(shrinking, "describe_structure", describe)


@functools.cache
def small(experiment, *features):
    return shrink(ax.resolve(experiment, with_=features).config)


def parameters(config):
    return sum(spec.size for spec in check_program(config).abstract.values())


def classes(config):
    return {type(value).__qualname__ for _, value in walk(config.model)}


def test_a_large_model_becomes_small_and_keeps_its_layers():
    config = ax.resolve("llama3-8b").config
    shrunk = small("llama3-8b")
    assert parameters(shrunk.config) < 50_000
    assert classes(shrunk.config) == classes(config)
    attention = get(shrunk.config, "model.decoder.layer.attention")
    assert 1 < attention.num_kv_heads < attention.num_heads
    assert shrunk.config.model.dtype == config.model.dtype
    assert shrunk.changes["model.decoder.num_layers"] == (32, 2)
    assert all(get(shrunk.config, path) == new for path, (_, new) in shrunk.changes.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "layers"),
    [
        ("gemma2-2b", 4),
        # Twice five layers with sliding windows and a global one, and one layer after them, since six do not divide 34.
        pytest.param("gemma3-4b", 13, marks=pytest.mark.slow),
        # Three dense layers, and four with experts: the scan runs over the longer part.
        pytest.param("deepseek-v3", 7, marks=pytest.mark.slow),
    ],
)
def test_two_periods_of_alternating_layers_are_left(experiment, layers):
    assert small(experiment).config.model.decoder.num_layers == layers


@pytest.mark.slow
def test_a_scan_and_a_loss_in_chunks_stay():
    before, after = (describe(c) for c in (ax.resolve("llama3-8b").config, small("llama3-8b").config))
    assert not before.lost_operations(after)
    assert {"scan/remat2/rsqrt", "scan/log"} <= before.operations
    assert small("llama3-8b").config.model.loss_chunk == 4
    assert small("llama3-8b").changes["model.loss_chunk"] == (None, 4)
    pairs = small("quickstart", "dpo:data=pairs.jsonl").config
    assert pairs.objective.loss_chunk < max(shape[-1] for shape, _ in pairs.input.batch_shapes().values())


@pytest.mark.slow
def test_lost_operations_are_noted():
    config = ax.resolve("llama3-8b").config
    without_chunks = {name: value for name, value in SIZES.items() if name != "loss_chunk"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shrinking, "SIZES", without_chunks)
        patched.setattr(shrinking, "OPTIONAL", ())
        notes = shrink(config).notes
    assert len(notes) == 1
    assert "does not compute scan/abs" in notes[0]


def test_cached_pages_are_shorter_than_the_rows():
    config = small(*PAGES_AND_MICROBATCHES).config
    assert get(config, "model.decoder.layer.attention.kv_cache.page_size") < config.input.sequence_length


@pytest.mark.slow
def test_experts_compete_in_groups_as_before():
    config = ax.resolve("quickstart", with_=("moe:num_experts=256,top_k=8",)).config
    router = "model.decoder.layer.feed_forward.router"
    config = patch(config, {f"{router}.num_groups": 8, f"{router}.top_groups": 4})
    layer = get(shrink(config).config, "model.decoder.layer.feed_forward")
    assert (layer.num_experts, layer.top_k) == (4, 2)
    assert (layer.router.num_groups, layer.router.top_groups) == (2, 1)


def test_windows_are_shorter_than_the_rows():
    config = small("mistral-7b").config
    assert get(config, "model.decoder.layer.attention.window") < config.input.sequence_length


def test_microbatches_stay():
    assert small(*PAGES_AND_MICROBATCHES).config.learner.accumulate_steps == 2


def test_the_meshes_have_every_axis():
    meshes = small("quickstart").meshes
    assert {axis for shape in meshes for axis in shape} == {"data", "fsdp", "expert", "seq", "tensor"}
    assert all(np.prod(list(shape.values())) <= 8 for shape in meshes)
    pipeline = small("quickstart", "pipeline:microbatches=2")
    assert pipeline.meshes[-1]["pipeline"] == 2
    assert not pipeline.notes


@pytest.mark.slow
def test_a_pipeline_that_no_mesh_divides_is_noted():
    shrunk = small("deepseek-v2-lite", "pipeline:microbatches=2")  # its only dense layer cannot be divided
    assert not any("pipeline" in shape for shape in shrunk.meshes)
    assert "no pipeline is checked" in shrunk.notes[0]


def test_a_batch_has_several_documents_and_the_tokens_that_follow():
    config = small("quickstart").config
    batch = synthetic_batch(config, 1)
    assert {name: (x.shape, str(x.dtype)) for name, x in batch.items()} == config.input.batch_shapes()
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert (batch["segment_ids"].max(axis=1) > 1).any()
    starts = np.diff(batch["segment_ids"], axis=1, prepend=0) > 0
    np.testing.assert_array_equal(batch["positions"] == 0, starts)
    assert set(np.unique(batch["weights"])) == {0, 1}
    assert not np.array_equal(batch["tokens"], synthetic_batch(config, 2)["tokens"])


def test_pairs_and_images_have_batches():
    pairs = synthetic_batch(small("quickstart", "dpo:data=pairs.jsonl").config, 0)
    assert {"chosen_tokens", "rejected_tokens"} <= set(pairs)
    assert not np.array_equal(pairs["chosen_tokens"], pairs["rejected_tokens"])
    images = synthetic_batch(small("vit-tiny").config, 0)
    assert images["labels"].max() < 4
    assert images["images"].shape[1:] == (8, 8, 3)


def test_a_batch_of_rollouts_has_the_log_probabilities_of_tokens():
    config = small("quickstart", "rloo:task={type: jsonl-task, paths: problems.jsonl}").config
    batch = synthetic_batch(config, 0)
    assert batch["rollout_logprobs"].max() <= 0
    assert batch["rollout_logprobs"].mean() == pytest.approx(-np.log(config.model.vocab_size), abs=0.5)
    assert batch["temperature"].min() >= 0.5


class Stubborn(Configurable):
    """An input that does not say what it reads."""

    @node
    class Config(Configurable.Config["Stubborn"]):
        batch_size: int = 8


def test_an_input_that_declares_nothing_is_refused():
    config = attrs.evolve(ax.resolve("quickstart").config, input=Stubborn.Config())
    with pytest.raises(RequestError, match=r"input: does not declare its batches[\s\S]*got: Stubborn"):
        shrink(config)


def test_a_size_that_cannot_be_shrunk_is_named(monkeypatch):
    """The structure of the model depends on its width, so a smaller one would be another model."""

    def describe_width(config):
        actual = describe(config)
        return attrs.evolve(actual, parts=actual.parts | {(str(config.model.decoder.hidden_dim),)})

    sizes = {"model.decoder.hidden_dim": 32_770, "model.decoder.layer.attention.head_dim": 8}
    config = patch(small("quickstart").config, sizes)
    monkeypatch.setattr(shrinking, "describe_structure", describe_width)
    monkeypatch.setattr(shrinking, "_attempts", lambda config: iter(()))
    with pytest.raises(
        RequestError, match=r"model\.decoder\.hidden_dim: cannot be shrunk[\s\S]*got: 32770[\s\S]*fix: "
    ):
        shrink(config)


def test_the_deadline_stops_the_search_for_smaller_sizes():
    config = small("quickstart").config
    assert shrink(config, deadline=0.0).config == config
    with pytest.raises(RequestError, match=r"time limit was reached[\s\S]*fix: allow more time with --minutes"):
        shrink(ax.resolve("llama3-8b").config, deadline=0.0)


class WideNetwork(ax.Layer):
    """A feed-forward layer whose sizes have other names, and go together in its own way."""

    @node
    class Config(ax.Layer.Config["WideNetwork"]):
        input_dim: int = interface()
        d_inner: int = 98_304
        multiple_of: int = 48

    def __init__(self, cfg, *, rngs, precision):
        super().__init__(cfg, precision=precision)
        if cfg.d_inner % cfg.multiple_of:
            raise ValueError("d_inner is not a multiple of multiple_of")
        shape = cfg.input_dim, cfg.d_inner
        self.weight = self.parameter(rngs, Constant(value=0.1), shape, ("embed", "mlp"))

    def __call__(self, x):
        weight = self.computed(self.weight)
        return jax.nn.relu(x @ weight) @ weight.T


def test_sizes_with_other_names_are_shrunk():
    config = patch(small("quickstart").config, {"model.decoder.layer.feed_forward": WideNetwork.Config()})
    shrunk = shrink(config)
    assert get(shrunk.config, "model.decoder.layer.feed_forward.d_inner") == 48
    assert parameters(shrunk.config) < 50_000


def test_sizes_that_do_not_fit_together_are_raised():
    config = patch(ax.resolve("quickstart").config, {"model.decoder.layer.attention.head_dim": None})
    assert parameters(shrink(config).config) < 50_000


def attention_kinds(config):
    """Return the kinds of attention: the class of each node with a kernel, and the type of each of its values."""
    nodes = find(config.model, AttentionKernelRole).values()
    return {(type(n), *((k, type(v)) for k, v in attrs.asdict(n, recurse=False).items())) for n in nodes}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [entry.name for entry in registry().entries("experiments")])
def test_every_experiment_with_every_feature_is_shrunk(experiment):
    for name in [None, *toy_models.features()]:
        try:
            config = ax.resolve(experiment, with_=toy_models.use(name) if name else ()).config
            check_program(attrs.evolve(config, mesh=attrs.evolve(config.mesh, shape={"fsdp": 1})))
        except RequestError:
            continue  # the feature does not fit: `freeze` names parameters that a model of images lacks
        shrunk = shrink(config).config
        assert parameters(shrunk) < 300_000, name
        assert synthetic_batch(shrunk, 0)
        assert attention_kinds(shrunk) == attention_kinds(config), name
