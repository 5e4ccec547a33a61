"""Imported models against what transformers computes: fixtures made by scripts/make_hf_fixtures.py, so that no torch is needed.

Where torch and transformers are installed (`uv run --group parity pytest -m slow tests/plugins/models/huggingface`), the slow tests
also have them compute the same with other weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_core.compose import Functional
from axlearn_core.config import find, patch
from axlearn_core.learn import AdamW, Learner
from axlearn_core.run import bind_weights, split_weights
from support import generated_models
from support.imported_models import MODELS, expected_results, loaded

QUICK = {"deepseek-v3", "gemma3", "gpt2", "llama3", "qwen3-moe"}
"""Models that are not only for slow tests: one of each kind."""
GRADIENTS = [n for n in MODELS if any(k.startswith("gradient.") for k in expected_results(n))]


def some(names, quick):
    """Return the models for a test. Models outside `quick`, and models that are made now, are slow tests."""
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in names] + [
        pytest.param(f"{n} now", marks=generated_models.MARKS) for n in names
    ]


def assert_close(got, expected):
    """Assert that each value is within 1e-4, and all of them within 1e-5 of their norm."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() < 1e-4
    assert np.linalg.norm(got - expected) < 1e-5 * np.linalg.norm(expected)


def rows(expected):
    """Return (tokens, positions, segments): the padded rows, then the row of packed documents."""
    sizes, width = expected["documents"], expected["padded"].shape[1]
    tokens = np.concatenate([expected["padded"], expected["packed"]])
    positions = [*np.tile(np.arange(width), (2, 1)), np.concatenate([np.arange(n) for n in sizes])]
    segments = [*(np.arange(width) < expected["lengths"][:, None]), np.repeat(np.arange(1, len(sizes) + 1), sizes)]
    return [jnp.asarray(x, jnp.int32) for x in (tokens, np.stack(positions), np.stack(segments))]


@pytest.mark.fast_cases("llama3")
@pytest.mark.parametrize("name", some(MODELS, QUICK))
def test_logits(name):
    source, params, _, expected = loaded(name)
    tokens, positions, segments = rows(expected)
    run = jax.jit(lambda p: bind_weights(source.model, p)(tokens, positions=positions, segment_ids=segments))
    logits = np.asarray(run(params))
    for row, length in enumerate(expected["lengths"]):
        assert_close(logits[row, :length], expected["padded_logits"][row, :length])
    assert_close(logits[2:], expected["packed_logits"])


@pytest.mark.fast_cases("gemma3")
@pytest.mark.parametrize("name", some(MODELS, {"gemma3", "deepseek-v3"}))
def test_greedy_tokens_with_a_cache(name):
    _, _, model, expected = loaded(name)
    tokens = list(model.generate(expected["prompt"].tolist(), max_tokens=64))
    assert tokens == expected["generated"].tolist()


def three_steps(name):
    """Return the initial losses of three AdamW steps, and the loss after them."""
    source, params, _, expected = loaded(name)
    batch = {"tokens": jnp.asarray(expected["batch"][:, :-1]), "targets": jnp.asarray(expected["batch"][:, 1:])}
    optimizer = AdamW(learning_rate=3e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    # transformers adds no auxiliary losses here, and does not move the biases that balance a router.
    learner = Learner.Config(optimizer=optimizer, max_grad_norm=None)
    auxiliary = [f"model.**.router.{n}" for n in ("load_balance", "z_loss", "rate")]
    unused = {p: 0.0 for p in auxiliary if find(source.config, p)}
    config = patch(source.config, {"learner": learner, **unused})
    model = Functional.from_config(config.model)
    functions = config.functions(model)
    state = jax.eval_shape(functions["init"].call, jax.random.key(0))
    learner = config.learner.build(max_steps=10, axes=source.model.axes)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    params, variables = split_weights(params, model)
    state = state.replace(params=params, variables=variables, learner=learner.init(params))
    train, losses = jax.jit(functions["train"].call), []
    for _ in range(4):
        state, summaries = train(state, batch)
        losses.append(float(summaries["loss"]))
    return losses, expected["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MODELS, {"llama2"}))
def test_three_steps_of_adamw(name):
    losses, expected = three_steps(name)
    assert np.abs(np.asarray(losses) - expected).max() < 1e-4
    assert expected[0] - expected[-1] > 0.01


@pytest.mark.parametrize("name", some(GRADIENTS, {"llama2"}))
def test_gradients(name):
    source, params, _, expected = loaded(name)
    batch = {"tokens": jnp.asarray(expected["batch"][:, :-1]), "targets": jnp.asarray(expected["batch"][:, 1:])}
    gradients = jax.jit(jax.grad(lambda p: bind_weights(source.model, p).loss(batch)[0]))(params)
    from axlearn_plugins_models.huggingface import stream

    outputs = [(n, "F32", t.shape) for n, t in source.tensors.items()]
    for (tensor, _, _), value in zip(outputs, stream.values(source.tensors, gradients, [outputs]), strict=True):
        assert_close(value, expected[f"gradient.{tensor}"])
