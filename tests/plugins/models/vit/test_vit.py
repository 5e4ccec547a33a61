"""The image classifier: against transformers (a fixture of scripts/make_hf_fixtures.py), with features, on meshes, trained."""

import json
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import axlearn_core as ax
from axlearn_core import resolve
from axlearn_core.cli.next_steps import after_training
from axlearn_core.compose import Functional, compose
from axlearn_core.config import get
from axlearn_core.errors import ConfigError, InputError, RequestError
from axlearn_core.learn import AdamW, Learner
from axlearn_core.plugins.request import Request
from axlearn_plugins_models.huggingface.family import find_family
from axlearn_plugins_models.huggingface.files import stored_tensors
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.source import open_model
from axlearn_plugins_models.vit.images import SHAPES, DrawnShapes, ImageArrays, ImageBatches
from support import generated_models

FIXTURE = Path(__file__).parent / "fixtures/vit"
SMALL = {
    "model.hidden_dim": 32,
    "model.encoder.num_layers": 2,
    "model.encoder.layer.attention.num_heads": 4,
    "model.encoder.embedding.image_size": 16,
    "input.image_size": 16,
    "input.batch_size": 16,
}


@pytest.fixture(scope="module", params=["vit", pytest.param("vit now", marks=generated_models.MARKS)])
def imported(request):
    """Return (source, parameters, batch, expected results)."""
    folder = FIXTURE if request.param == "vit" else generated_models.generate("vit")
    source = open_model(folder, set=["model.dtype=float32", "model.encoder.stack.mode=unrolled"])
    params = source.read(compose(source.config, jax.devices()[:1]).state.params)
    expected = load_file(folder / "expected.safetensors")
    images = jnp.asarray(expected["pixels"].transpose(0, 2, 3, 1))
    return source, params, {"images": images, "labels": jnp.asarray(expected["labels"])}, expected


@pytest.mark.slow_cases("vit")
def test_logits(imported):
    source, params, batch, expected = imported
    got = np.asarray(source.model.bind(params)(batch["images"]), np.float64)
    assert np.abs(got - expected["logits"]).max() < 1e-4
    assert np.linalg.norm(got - expected["logits"]) < 1e-5 * np.linalg.norm(expected["logits"])
    assert source.notes == ()


@pytest.mark.slow
def test_three_steps_of_adamw(imported):
    source, params, batch, expected = imported
    optimizer = AdamW(learning_rate=3e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    config = ax.patch(source.config, {"learner": Learner.Config(optimizer=optimizer, max_grad_norm=None)})
    functions = config.functions(Functional.from_config(config.model))
    learner = config.learner.build(max_steps=10, axes=source.model.axes)
    shapes = jax.eval_shape(functions["init"].call, jax.random.key(0))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    state = state.replace(params=params, learner=learner.init(params))
    train, losses = jax.jit(functions["train"].call), []
    for _ in expected["losses"]:
        state, summaries = train(state, batch)
        losses.append(float(summaries["loss"]))
    assert np.abs(np.asarray(losses) - expected["losses"]).max() < 1e-4


@pytest.mark.slow
def test_a_round_trip_changes_no_bit(tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(FIXTURE, source)
    (source / "expected.safetensors").unlink()
    import_run(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    one, other = (stored_tensors(d) for d in (source, tmp_path / "out"))
    assert {n: t.rows(0, t.shape[0]).tobytes() for n, t in one.items()} == {
        n: t.rows(0, t.shape[0]).tobytes() for n, t in other.items()
    }
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    with pytest.raises(RequestError, match="does not have a tokenizer"):
        ax.load(tmp_path / "run").generate("a")


def test_families_of_text_and_of_images_keep_apart():
    result, data = find_family(ax.resolve("vit-b16").config)
    assert (result.model_type, data["hidden_size"], len(data["id2label"])) == ("vit", 768, 1000)
    assert find_family(ax.resolve("quickstart").config)[0].model_type == "llama"
    with pytest.raises(RequestError, match=r"pool: .*token"):
        find_family(ax.resolve("vit-tiny", set={"model.pool": "mean"}).config)


def test_the_published_size():
    # 86,567,656: https://huggingface.co/google/vit-base-patch16-224
    assert Functional.from_config(ax.resolve("vit-b16").config.model).num_parameters == 86_567_656


@pytest.mark.slow
def test_it_trains_evaluates_and_continues(tmp_path):
    settings = {**SMALL, "learner.optimizer": {"type": "adamw", "learning_rate": 3e-3}, "input.held_out": 24,
                "trackers": [{"type": "jsonl"}], "evaluators": {"eval": {"type": "loss-evaluator"}}}  # fmt: skip
    run = lambda name, steps: ax.train("vit-tiny", set=settings, steps=steps, run_dir=tmp_path / name)  # noqa: E731
    whole = run("whole", 30)
    assert whole.metrics["eval_loss"] < np.log(len(SHAPES)) - 0.05
    run("parts", 15)
    assert run("parts", 30).metrics["loss"] == whole.metrics["loss"]


MESHES = {"tensor": {"data": 2, "fsdp": 2, "tensor": 2}, "experts": {"expert": 4, "fsdp": 2}}
TOGETHER = [
    ("tensor", ["lora:target=model.**", "remat", "scan", "ema"]),
    ("tensor", ["quantization", "rope", "gradient-accumulation:steps=2", "precision:dtype=bfloat16"]),
    ("experts", ["moe:num_experts=8", "alibi", "optimizer-precision"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "features"), [TOGETHER[0], *(pytest.param(*t, marks=pytest.mark.slow) for t in TOGETHER[1:])]
)
def test_features_and_meshes_of_decoders_serve_it(mesh, features):
    more = {"model.hidden_dim": 64, "mesh.shape": MESHES[mesh]}
    config = ax.resolve("vit-tiny", with_=features, set={**SMALL, **more}).config
    program = compose(config, jax.devices()[:8])
    state = program.init(0)
    assert any(not x.sharding.is_fully_replicated for x in state.params.values())
    batch = next(config.input.build(seed=0).train())
    _, summaries = program.train_step(state, program.put(batch))
    assert 0.5 < float(summaries["loss"]) < 4


def test_rows_that_fill_the_last_batch_have_no_weight():
    def rows(numbers):
        return np.zeros((len(numbers), 2, 2, 3), np.float32), numbers.astype(np.int32)

    batches = list(ImageBatches(rows, [np.array([0, 1]), np.array([2, -1])].__getitem__, slice(None), count=2))
    assert [batch["weights"].tolist() for batch in batches] == [[1, 1], [1, 0]]
    assert [batch["labels"].tolist() for batch in batches] == [[0, 1], [2, 0]]


def test_drawn_shapes_are_of_all_kinds_and_of_their_number_alone():
    source = DrawnShapes.Config(batch_size=64, image_size=16).build(seed=0)
    batches = source.train()
    first = next(batches)
    assert set(first["labels"]) == set(range(len(SHAPES)))
    assert not np.array_equal(next(batches)["labels"], first["labels"])
    own_rows = DrawnShapes.Config(batch_size=8, image_size=16).build(seed=0, process_index=1, process_count=2).train()
    np.testing.assert_array_equal(next(own_rows)["images"], first["images"][4:8])


def test_shapes_that_the_model_has_no_class_for_are_refused():
    config = ax.resolve("vit-tiny").config
    for classes in (4, 7):
        ax.patch(config, {"model.num_classes": classes}).build_input(config.input, None)
    with pytest.raises(ConfigError, match=r"model\.num_classes: is 3, less than the 4 shapes of input"):
        ax.patch(config, {"model.num_classes": 3}).build_input(config.input, None)


def test_invalid_images_are_reported(tmp_path):
    images = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "float.npz", images=images.astype(np.float32), labels=np.zeros(4, int))
    np.savez(tmp_path / "lacks.npz", images=images)
    np.savez(tmp_path / "right.npz", images=images, labels=np.zeros(4, int))
    for name, reason in (("float", "got: images float32"), ("lacks", "labels"), ("none", "no image file matches")):
        with pytest.raises(InputError, match=reason):
            ImageArrays.Config(batch_size=2, paths=str(tmp_path / f"{name}.npz")).build(seed=0)
    with pytest.raises(InputError, match="no images are held out"):
        ImageArrays.Config(batch_size=2, paths=str(tmp_path / "right.npz"), held_out=0.01).build(seed=0).evaluation()


def test_a_label_that_the_model_has_no_class_for_is_refused(tmp_path):
    images = np.zeros((4, 32, 32, 3), np.uint8)
    config = ax.resolve("vit-tiny").config  # it has four classes
    for label, named in ((3, None), (4, r"labels\[2\] is not a class\n *got: 4\n *expected: 0 to 3"), (-1, "got: -1")):
        np.savez(tmp_path / "own.npz", images=images, labels=np.array([0, 1, label, 2]))
        own = ImageArrays.Config(batch_size=2, paths=str(tmp_path / "own.npz"), image_size=32)
        if named is None:
            assert config.build_input(own, None).describe()["images"] == 4
        else:
            with pytest.raises(InputError, match=named):
                config.build_input(own, None)


@pytest.mark.parametrize("count", [5, 11, 40])
def test_the_images_of_a_batch_are_different(count, tmp_path):
    images = np.arange(count, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "some.npz", images=images, labels=np.arange(count))
    config = ImageArrays.Config(batch_size=8, paths=str(tmp_path / "some.npz"), held_out=1e-9)
    batches = config.build(seed=0).train()
    labels = [next(batches)["labels"].tolist() for _ in range(4 * count)]
    assert min(len(set(batch)) for batch in labels) == min(8, count)
    old = np.concatenate([np.random.default_rng([0, epoch]).permutation(count) for epoch in range(8)])
    batches.set_state({"batches": 1})  # as older versions stored it; the run keeps the old order
    assert next(batches)["labels"].tolist() == old[8:16].tolist()
    assert batches.get_state() == {"batches": 2}


def test_a_size_that_is_given_tells_the_batches_and_is_held_to_the_data(tmp_path):
    images = np.zeros((4, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "eight.npz", images=images, labels=np.zeros(4, int))
    config = ImageArrays.Config(batch_size=2, paths=str(tmp_path / "eight.npz"), image_size=8)
    batch = next(config.build(seed=0).train())
    assert {k: (v.shape, str(v.dtype)) for k, v in batch.items()} == config.batch_shapes()
    assert ImageArrays.Config(batch_size=2, paths="x.npz").batch_shapes() == {}
    with pytest.raises(InputError, match=r"(?s)of the wrong size.*8 x 8 x 3.*expected: 16 x 16 x 3"):
        ImageArrays.Config(batch_size=2, paths=str(tmp_path / "eight.npz"), image_size=16).build(seed=0)
    with pytest.raises(RequestError, match=r"got: 1 over 2|batch_size"):
        DrawnShapes.Config(batch_size=1, image_size=8).build(seed=0, process_count=2)
    with pytest.raises(RequestError, match=r"patch_size: does not divide image_size[\s\S]*got: 8 of 20"):
        ax.resolve("vit-tiny", set={"model.encoder.embedding.image_size": 20}).check()
    config = ax.resolve("vit-tiny", set={**SMALL, "input.image_size": 24}).config
    with pytest.raises(RequestError, match=r"images of the wrong size\s+got: \[24, 24, 3\]\s+expected: \[16, 16, 3\]"):
        compose(config, jax.devices()[:1]).compile("train", next(config.input.build(seed=0).train()))


def test_what_is_suggested_after_a_run_can_be_done_with_it(tmp_path):
    for experiment, commands in {
        "vit-tiny": ["report", "config"],
        "quickstart": ["generate", "report", "config"],
    }.items():
        run = tmp_path / "my run"
        run.mkdir(exist_ok=True)
        (run / "config.yaml").write_text(resolve(experiment).to_yaml())
        lines = after_training(str(run), Request.from_arguments(experiment))
        assert all(str(run) in shlex.split(line) for line in lines[:-1])  # the shell parses the path as one word
        assert [line.split()[1] for line in lines] == commands
        get(resolve(experiment).config, lines[-1].split()[-1])  # it exists
