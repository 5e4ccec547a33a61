"""Each model_type on every path. The table in `docs/models.md` shows what these tests, those of test_huggingface_parity.py
(import, generate, train) and those of test_plan_published.py (plan) check.
"""

import jax
import numpy as np
import pytest

from axlearn_core.compose import Functional, compose
from axlearn_core.config import find, patch
from axlearn_core.learn import AdamW
from axlearn_core.plugins.resolve import resolve
from axlearn_core.run import bind_weights, split_weights
from axlearn_plugins_finetune.lora.adapters import is_adapter
from axlearn_plugins_models.huggingface.files import stored_tensors
from axlearn_plugins_models.huggingface.import_export import export_run, import_run
from axlearn_plugins_quantization.feature import weight_only_config
from axlearn_plugins_quantization.store import quantize_params
from axlearn_plugins_serving.local_engine import serve
from support import generated_models, model_table
from support.imported_models import MODELS, expected_results, folder, loaded, model_types, opened

QUICK = {"llama3"}
SIZES = {
    "runner.block_size": 4, "runner.max_context": 96, "runner.max_rows": 5, "runner.max_step_tokens": 24, "runner.chunk": 8,
    "runner.row_buckets": (5,), "runner.chunk_buckets": (1,), "runner.num_blocks": 26,
}  # fmt: skip
"""Of an engine with less memory than the requests need together."""
UNPUBLISHED = {"granitemoeshared"}
"""Types whose published models are not known by their sizes here."""
WINDOWED = {"mistral", "phi3", "starcoder2"}
"""Every layer has a window, so that their requests do not fill the memory."""


def _each(also=(), quick=QUICK):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in MODELS] + [
        pytest.param(f"{n} now", marks=generated_models.MARKS) for n in also
    ]


@pytest.mark.parametrize("name", _each(quick=()))
def test_served_together_each_gets_the_tokens_of_transformers(name):
    _, _, model, expected = loaded(name)
    prompt, rest = expected["prompt"].tolist(), expected["generated"].tolist()
    starts = [0, 3, 8, 14, 20, 29, 36, 40]  # each prompt is a prefix of what another request generates
    with serve(model, set=SIZES) as engine:
        generations = engine.generate([prompt + rest[:k] for k in starts], max_tokens=24, temperature=0)
        again = engine.generate([prompt], max_tokens=64, temperature=0)
        statistics = engine.statistics()
    assert [list(g.tokens) for g in generations] == [rest[k : k + 24] for k in starts]
    assert list(again[0].tokens) == rest
    assert statistics.cached_prompt_tokens > 0
    assert (statistics.preemptions > 0) == (name not in WINDOWED)
    assert statistics.used_blocks == 0


def batch_of(expected):
    return {"tokens": expected["batch"][:, :-1], "targets": expected["batch"][:, 1:]}


def losses(name, *features):
    """Of three steps from the weights of the fixture, with features; and the parameters before and after."""
    source = opened(name)
    config = resolve(source.config, with_=list(features)).config
    optimizer = AdamW(learning_rate=3e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
    unused = {p: 0.0 for n in ("load_balance", "z_loss") if find(config, p := f"model.**.router.{n}")}
    program = compose(patch(config, {"learner.optimizer": optimizer, **unused}), jax.devices()[:1])
    state = program.init(0)
    weights = {**state.params, **state.variables}
    stored = source.read({p: x for p, x in weights.items() if not is_adapter(p)})
    params, variables = split_weights({**weights, **stored}, program.functional)
    state, values = state.replace(params=params, variables=variables), []
    before = jax.device_get(params)
    for _ in range(3):
        state, scalars = program.train_step(state, program.put(batch_of(expected_results(name))))
        values.append(float(scalars["loss"]))
    return values, before, jax.device_get(state.params)


@pytest.mark.parametrize("name", _each(quick=()))
def test_adapters_start_from_the_model_and_learn(name):
    values, before, after = losses(name, "lora:rank=4")
    assert abs(values[0] - expected_results(name)["losses"][0]) < 1e-4
    assert values[-1] < values[0]
    changed = {p for p in before if np.any(before[p] != after[p])}
    assert changed
    assert all(is_adapter(p) for p in changed)


@pytest.mark.parametrize("name", _each(quick=()))  # tests/plugins/quantization is faster
def test_quantized_training_starts_near_the_model_and_learns(name):
    values, _, _ = losses(name, "quantization")
    first = expected_results(name)["losses"][0]
    assert 0 < abs(values[0] - first) < 0.05 * first
    assert values[-1] < values[0]


@pytest.mark.parametrize("name", _each(quick=()))  # tests/plugins/quantization is faster
def test_integer_weights_compute_nearly_the_same(name):
    source, params, model, expected = loaded(name)
    config = weight_only_config(source.config, storage="int8", tile_size=None)
    functional = Functional.from_config(config.model)
    small = bind_weights(functional, quantize_params(params, functional))
    before, after = (float(m.loss(batch_of(expected))[0]) for m in (model, small))
    assert 0 < abs(after - before) < 0.05 * before


@pytest.mark.parametrize("name", _each(also=MODELS))
def test_an_export_has_every_value_and_transformers_reads_it(name, tmp_path):
    import_run(folder(name), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    before, after = (
        {n: np.asarray(t.rows(0, t.shape[0] if t.shape else 1), np.float32) for n, t in stored_tensors(d).items()}
        for d in (folder(name), tmp_path / "out")
    )
    assert {n: (x.shape, x.tobytes()) for n, x in after.items()} == {
        n: (x.shape, x.tobytes()) for n, x in before.items()
    }
    if name.endswith(" now"):
        import torch
        import transformers

        expected = expected_results(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        logits = model(torch.tensor(expected["packed"][:, : int(expected["documents"][0])])).logits.detach().numpy()
        np.testing.assert_allclose(logits, expected["packed_logits"][:, : logits.shape[1]], atol=1e-4)


@pytest.mark.slow
def test_every_type_has_a_fixture_and_an_experiment_and_is_in_the_table():
    experiments = model_table.experiments()
    for name in model_table.text_types():
        assert name in model_types(), f"{name} has no fixture: add one to scripts/make_hf_fixtures.py"
        assert experiments.get(name) or name in UNPUBLISHED, f"{name} has no experiment with a published size"
    text = model_table.PAGE.read_text()
    assert model_table.table() in text, "run `PYTHONPATH=tests uv run python -m support.model_table`"
