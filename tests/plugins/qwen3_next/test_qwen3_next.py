"""Tests of the layer, the family and the experiments."""

import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import axlearn_core as ax
from axlearn_core.extend import ConfigError, Functional, Mesh, compose, find
from axlearn_plugins_models.huggingface.family import family, find_family
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_models.huggingface.source import open_model

TOY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
       "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
       "linear_value_head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
       "shared_expert_intermediate_size": 40}  # fmt: skip
PROMPT = [5, 17, 3, 80, 41, 9, 9, 22]
FLOAT32 = ["model.dtype=float32"]
SMALL = {"input.batch_size": 8, "input.sequence_length": 32, "evaluators": {}, "model.vocab_size": 2048}
DEVICES = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return a random model that transformers writes, with its logits and its greedy tokens."""
    torch, transformers = (
        pytest.importorskip("torch", reason="needs torch"),
        pytest.importorskip("transformers", reason="needs transformers"),
    )
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**TOY)).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms too are not the identity
            weight += 0.1 * torch.randn_like(weight)
        prompt = torch.tensor([PROMPT])
        logits = model(prompt).logits[0].numpy()
        tokens = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist()
    folder = tmp_path_factory.mktemp("toy")
    model.save_pretrained(folder)
    vocabulary = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, TOY["vocab_size"])}}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="w1")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder, logits, tokens


@pytest.fixture(scope="module")
def imported(toy):
    """Return the bound model of the directory, in float32."""
    source = open_model(toy[0], set=[*FLOAT32, "model.decoder.stack.mode=unrolled"])
    state = compose(source.config, jax.devices()[:1]).state
    return source.model.bind(source.read({**state.params, **state.variables}), {})


def test_the_published_size():
    config = ax.resolve("qwen3-next-80b-a3b").config
    count = sum(leaf.size for leaf in jax.tree.leaves(Functional.from_config(config.model).abstract))
    assert round(count / 1e9, 1) == 79.7
    family, data = find_family(config)
    assert (family.model_type, data["full_attention_interval"]) == ("qwen3_next", 4)
    assert data["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(
    "wrong", [{"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 3}, {"full_attention_interval": 1}]
)
def test_other_orders_of_layers_raise_an_error(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        family("qwen3_next").resolve({**TOY, **wrong})


@pytest.mark.slow
def test_logits_and_greedy_tokens_are_those_of_transformers(toy, imported):
    _, logits, tokens = toy
    np.testing.assert_allclose(imported(jnp.asarray([PROMPT]))[0], logits, rtol=1e-4, atol=1e-4)
    assert list(imported.generate(PROMPT, max_tokens=16)) == tokens


@pytest.mark.slow
def test_the_paged_engine_gives_the_same_tokens(toy, imported):
    _, _, tokens = toy
    sizes = {
        "block_size": 4,
        "max_context": 32,
        "max_rows": 4,
        "max_step_tokens": 16,
        "chunk": 4,
        "row_buckets": (1,),
        "chunk_buckets": (1,),
    }
    with ax.serve(imported, set={f"runner.{k}": v for k, v in sizes.items()}, warm_up=False) as engine:
        generations = engine.generate([PROMPT, PROMPT[:3], PROMPT], max_tokens=16, temperature=0)
    expected = [tokens, list(imported.generate(PROMPT[:3], max_tokens=16)), tokens]
    assert [list(g.tokens) for g in generations] == expected


@pytest.mark.slow
def test_an_export_contains_the_same_tensors(toy, tmp_path):
    torch, transformers = (
        pytest.importorskip("torch", reason="needs torch"),
        pytest.importorskip("transformers", reason="needs transformers"),
    )
    import_run(toy[0], tmp_path / "run", set=FLOAT32)
    export_run(tmp_path / "run", tmp_path / "exported")
    before, after = (
        transformers.Qwen3NextForCausalLM.from_pretrained(p).state_dict() for p in (toy[0], tmp_path / "exported")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_layers_that_predict_more_tokens_are_ignored(toy, tmp_path):
    folder = shutil.copytree(toy[0], tmp_path / "toy")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")
    assert "mtp.fc.weight" not in open_model(folder).tensors


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["lora", "quantization"])
def test_features_apply_to_the_new_parts_and_train(feature, tmp_path):
    config = ax.resolve("qwen3-next-toy", with_=[feature]).config
    changed = find(config, "model.decoder.layer.attention.children.3.output_gate.**")
    assert changed != find(
        ax.resolve("qwen3-next-toy").config, "model.decoder.layer.attention.children.3.output_gate.**"
    )
    result = ax.train("qwen3-next-toy", with_=[feature], set=SMALL, steps=2, run_dir=tmp_path / "run")
    assert result.step == 2


def train(shape, *features):
    """Return the losses of three steps on a mesh."""
    # Pipelines compute this loss for each microbatch.
    unbalanced = {"model.decoder.layer.feed_forward.router.load_balance": 0.0}
    settings = {**SMALL, **unbalanced, "model.decoder.num_layers": 8}
    config = ax.resolve("qwen3-next-toy", with_=features, set=settings).config
    config = ax.patch(config, {"mesh": Mesh(shape=shape, rules=config.mesh.rules)})
    program = compose(config, jax.devices()[: math.prod(shape.values())])
    rows = np.random.default_rng(0).integers(0, 2048, (8, 33))
    batch = program.put({"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)})
    state, losses = program.init(0), []
    for _ in range(3):
        state, summaries = program.train_step(state, batch)
        losses.append(float(summaries["loss"]))
    return losses


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "features"),
    [({"fsdp": 2, "tensor": 2}, ()), ({"expert": 4}, ()), ({"pipeline": 2}, ("pipeline:microbatches=4",))],
)
def test_a_mesh_gives_the_loss_of_one_device(shape, features):
    np.testing.assert_allclose(train(shape, *features), train({"fsdp": 1}), rtol=1e-4)
