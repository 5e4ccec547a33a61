"""The table of state in docs/layers.md, with a function that checks each cell.

    PYTHONPATH=tests uv run python -m support.state_table     # writes the table

`check(kind, column, path)` trains a small model with state of a kind and compares it with a plain reference: one device, an
unrolled stack, no rematerialization.
"""

import json
import shutil
import sys

from support.paths import HF_FIXTURES, ROOT

DOCS = ROOT / "docs/layers.md"
BEGIN, END = "<!-- state: begin -->\n", "<!-- state: end -->\n"

KINDS = {
    "dropout": "dropout",
    "batch-norm": "batch statistics",
    "amax": "amax history",
    "router-bias": "router bias",
}
COLUMNS = {
    "scan": "scanned stack",
    "unrolled": "sharded over 8 devices",
    "alternating": "alternating layers",
    "remat": "rematerialization",
    "accumulation": "gradient accumulation",
    "pipeline": "pipeline",
    "ema": "moving average (`ema`)",
    "lora": "`lora`",
    "resume": "resume",
    "export": "`checkpoint export-hf`",
    "stored": "stored integers (`quantize`)",
}
EXPORT, PEFT = "no family describes", "PEFT's format cannot store this model's variables"
"""The first words of the errors in refused cells."""
OUTCOMES = {
    "equal": "same losses and state as the plain model",
    "per microbatch": "each microbatch draws its own numbers or continues from the previous state; equal for any number of stages",
    "left out": "only parameters are averaged; evaluation uses the newest state and draws no random numbers",
    "kept": "the state is carried over unchanged, bit for bit",
    "frozen": "frozen as part of the base, bit for bit; `lora export` and `--format peft` leave it out",
    "updated": f"still updated; `lora export` writes it, and `--format peft` exits with 2: `{PEFT}`",
    "refused": f"exit code 2: `{EXPORT} ...`, with the parts that the format lacks",
}
SAME = dict.fromkeys(("scan", "unrolled", "alternating", "remat"), "equal") | {"ema": "left out", "resume": "kept"}
MOVES = {
    **SAME,
    "accumulation": "per microbatch",
    "pipeline": "per microbatch",
    "lora": "updated",
    "export": "refused",
    "stored": "kept",
}
TABLE = {
    "dropout": {**MOVES, "lora": "equal"},
    "batch-norm": MOVES,
    "amax": MOVES,
    "router-bias": {**MOVES, "accumulation": "equal", "pipeline": "equal", "lora": "frozen", "export": "kept"},
}
"""Kind -> column -> outcome."""


def markdown():
    """Return the table as Markdown."""
    lines = [f"| | {' | '.join(KINDS.values())} |", f"|---{'|---' * len(KINDS)}|"]
    lines += [f"| {title} | {' | '.join(TABLE[k][column] for k in KINDS)} |" for column, title in COLUMNS.items()]
    lines += ["", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in OUTCOMES.items())]
    return "\n".join(lines) + "\n"


def check(kind, column, path):
    """Train and compare. Raises `AssertionError` if the cell is wrong."""
    return globals()[f"_{column}"](kind, path)


def _reference(kind):
    from support.stateful_models import trained

    return trained(kind, mode="unrolled")


def _scan(kind, _):
    from support.stateful_models import same, trained

    same(trained(kind), _reference(kind))


def _unrolled(kind, _):
    from support.stateful_models import same, trained

    same(trained(kind, mode="unrolled", mesh=(("data", 2), ("fsdp", 2), ("tensor", 2))), _reference(kind))


def _alternating(kind, _):
    from axlearn_core import patch
    from axlearn_plugins_transformer.alternate import Alternate
    from support import toy_models
    from support.stateful_models import config, same, train

    tree = config(kind)
    dense = patch(toy_models.small("llama2-7b"), {"model.decoder.layer.feed_forward.hidden_dim": 32})
    turns = Alternate(
        first=(), children=(dense.model.decoder.layer.feed_forward, tree.model.decoder.layer.feed_forward)
    )
    tree = patch(tree, {"model.decoder.layer.feed_forward": turns, "model.decoder.num_layers": 4})
    same(train(tree), train(tree, mode="unrolled"))


def _remat(kind, _):
    from support.stateful_models import same, trained

    same(trained(kind, "remat:save=[]"), _reference(kind))


def _accumulation(kind, _):
    import jax
    import numpy as np

    from axlearn_core.train.step import TrainingFunctions
    from support import toy_models
    from support.stateful_models import same, trained

    parts = trained(kind, "gradient-accumulation:steps=2", steps=1)
    program = parts[3]
    functional = program.functional
    functions = TrainingFunctions(functional, program.config.learner.build(max_steps=10, axes=functional.axes))
    state, batch = program.init(seed=0), toy_models.batch(0)

    @jax.jit
    def by_hand(state):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        variables, total, weight = functional.begin_step(state.variables), 0.0, 0.0
        for i in range(2):
            rows = {k: v[i::2] for k, v in batch.items()}
            value, (summaries, variables) = functions.training_loss(
                state.params, variables, rows, jax.random.fold_in(key, i)
            )
            total, weight = total + value * summaries["weight"], weight + summaries["weight"]
        return total / weight, functional.end_step(state.params, variables)

    loss, variables = by_hand(state)
    same(parts, ([float(loss)], jax.device_get(variables)))
    if TABLE[kind]["accumulation"] == "equal":
        same(trained(kind, "gradient-accumulation:steps=2"), trained(kind))
    else:
        whole = trained(kind, steps=1)
        assert not np.array_equal(parts[0], whole[0])


def _pipeline(kind, _):
    from support.stateful_models import same, trained

    one = trained(kind, "pipeline:microbatches=2", mode=None)
    same(trained(kind, "pipeline:microbatches=2", mode=None, mesh=(("pipeline", 2), ("fsdp", 4))), one)
    if TABLE[kind]["pipeline"] == "equal":
        same(one, _reference(kind))


def _ema(kind, _):
    import jax
    import numpy as np

    from support.stateful_models import same, trained

    averaged = trained(kind, "ema:decay=0.5")
    same(averaged, trained(kind))
    _, variables, state, program = averaged
    weights = program.weights(state)
    assert weights.variables.keys() == variables.keys()
    assert all(np.array_equal(weights.variables[p], x) for p, x in variables.items())
    assert not np.array_equal(*(jax.device_get(p["decoder.embedding.weight"]) for p in (weights.params, state.params)))


def _lora(kind, path):
    import numpy as np
    import pytest

    from axlearn_core.errors import RequestError
    from axlearn_core.run import open_weights
    from axlearn_plugins_finetune.lora.adapters import is_adapter, load
    from axlearn_plugins_finetune.lora.merge import export_run, merge_run
    from axlearn_plugins_models.huggingface.peft import export_peft
    from support.stateful_models import same, trained

    adapted = trained(kind, "lora:rank=2")
    same(adapted, trained(kind, "lora:rank=2", mode="unrolled"))
    _, variables, state, program = adapted
    fresh = program.init(seed=0)
    assert all(np.array_equal(x, state.params[p]) for p, x in fresh.params.items() if not is_adapter(p))
    frozen = TABLE[kind]["lora"] == "frozen"
    assert all(np.array_equal(fresh.variables[p], x) == frozen for p, x in variables.items())
    if not variables:
        return
    base = run(kind, path / "base", 1)
    run(kind, path / "run", 2, f"lora:rank=2,base={base}")
    export_run(path / "run", path / "adapters")
    if frozen:
        assert not load(path / "adapters").variables
        before, begun = open_weights(path / "run").read(), open_weights(base).read()
        assert all(np.array_equal(before[name], begun[name]) for name in variables)
        return
    adapted = open_weights(path / "adapters")
    exported, tensors = load(path / "adapters"), open_weights(path / "run").read()
    assert exported.variables.keys() == open_weights(path / "run").functional.variables.keys() != set()
    merge_run(path / "run", path / "merged")
    for name, value in exported.variables.items():
        assert np.array_equal(value, tensors[name])
        assert np.array_equal(value, adapted.read(name)[name])
        assert not np.array_equal(value, open_weights(base).read(name)[name])
        assert np.array_equal(value, open_weights(path / "merged").read(name)[name])
    with pytest.raises(RequestError, match=f"^{PEFT}, which") as error:
        export_peft(path / "run", path / "peft")
    assert error.value.exit_code == 2
    assert not (path / "peft").exists()


def _resume(kind, path):
    import numpy as np

    from axlearn_core.run import open_weights

    whole, parts = run(kind, path / "whole", 4), run(kind, path / "parts", 2)
    run(kind, path / "parts", 4)
    assert _losses(parts) == _losses(whole)
    assert [step for step, _ in _losses(whole)] == [1, 2, 3, 4]
    one, other = (open_weights(place).read() for place in (whole, parts))
    assert one.keys() == other.keys()
    assert all(np.array_equal(value, other[name]) for name, value in one.items())


def _export(kind, path):
    import numpy as np
    from click.testing import CliRunner
    from safetensors.numpy import load_file

    from axlearn_core.cli.main import cli
    from axlearn_core.run import open_weights

    place = deepseek(path) if kind == "router-bias" else run(kind, path / "run", 2)
    result = CliRunner().invoke(cli, ["checkpoint", "export-hf", str(place), str(path / "exported")])
    if TABLE[kind]["export"] == "refused":
        assert result.exit_code == 2, result.output
        assert f"error: {EXPORT}" in result.output
        assert not (path / "exported").exists()
        return
    assert result.exit_code == 0, result.output
    tensors = load_file(path / "exported/model.safetensors")
    stored = open_weights(place).read()
    (name,) = [p for p in stored if p.endswith("router.bias")]
    biases = [x for n, x in sorted(tensors.items()) if n.endswith("e_score_correction_bias")]
    assert all(x.dtype == np.float32 for x in biases)
    assert np.array_equal(np.stack(biases), stored[name])
    again = open_weights(path / "exported").read()
    assert np.array_equal(again[name], stored[name])


def _stored(kind, path):
    import numpy as np

    from axlearn_core.run import open_weights
    from axlearn_core.train.inference import load
    from axlearn_plugins_quantization.store import quantize_run

    place = run(kind, path / "run", 2)
    quantize_run(place, path / "integers", storage="int8")
    dense, integers = open_weights(place), open_weights(path / "integers")
    assert any(spec.dtype == "int8" for spec in integers.specs().values())
    tensors, variables = dense.read(), dense.functional.variables
    assert integers.functional.variables.keys() == variables.keys()
    for name in variables:
        assert np.array_equal(integers.read(name)[name], tensors[name])
    one, other = (load(p).model.loss(_batch())[0] for p in (place, path / "integers"))
    assert abs(float(one) - float(other)) < 0.02 * float(one)


SETTINGS = {
    "model.decoder.num_layers": 2,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
    "model.dtype": "float32",
    "learner.optimizer": {"type": "adamw", "learning_rate": 0.01},
    "input.batch_size": 8,
    "input.sequence_length": 16,
    "evaluators": {},
    "trackers": [{"type": "jsonl"}],
    "checkpointer.every_steps": 2,
    "log_every_steps": 1,
}


def experiment(kind, *features):
    """Return the config of a small run with state of this kind."""
    from axlearn_core.plugins.resolve import resolve
    from support.stateful_models import FEATURES, with_state

    return with_state(resolve("quickstart", with_=[*features, *FEATURES.get(kind, ())], set=SETTINGS).config, kind)


def run(kind, place, steps, *features):
    """Train a run to this number of steps, or continue it. Returns its directory."""
    import axlearn_core as ax

    ax.train(experiment(kind, *features), steps=steps, run_dir=place)
    return place


def deepseek(path):
    """Return a run whose model Hugging Face's format can describe, with updated biases."""
    from axlearn_core.run import Run
    from axlearn_plugins_models.huggingface.import_export import import_run

    fixture = HF_FIXTURES / "deepseek-v3"
    import_run(fixture, path / "imported")
    run = Run(path / "imported")

    def moved(weights):
        return {name: x + 0.25 if name.endswith("router.bias") else x for name, x in weights.read().items()}

    run.derive(path / "moved", run.config, moved)
    shutil.copytree(path / "imported/huggingface", path / "moved/huggingface")  # its `config.json`
    return path / "moved"


def _losses(place):
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def _batch():
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def page(text):
    """Return the page with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    DOCS.write_text(page(DOCS.read_text()))
    sys.exit(0)
