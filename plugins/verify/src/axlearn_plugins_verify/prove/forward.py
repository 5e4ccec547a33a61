"""Compute a language model's logits for every token, and by how much rounding alone changes them."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.config import find, patch
from axlearn_core.config.roles import CompetingTokensRole
from axlearn_core.config.tree import children
from axlearn_core.contracts.capabilities import DeclaresBatches, HasVocabulary
from axlearn_core.contracts.experiment import get_input_config
from axlearn_plugins_transformer.cache_spec import KeepsCache, read_prefix
from axlearn_plugins_transformer.causal_lm import LanguageModel
from axlearn_plugins_verify.prove import module_calls
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.double_precision import (
    ALSO_IN_FLOAT32,
    Inconclusive,
    equations,
    repeat_if_doubtful,
    stop_if_vague,
    stopping_early,
)
from axlearn_plugins_verify.prove.reuse import reuse

EPSILON = {"float64": 2.0**-50, "float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}
"""Relative change of a parameter that simulates the rounding of a dtype."""
FLOOR = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Error that rounding alone causes even if `EPSILON` moves nothing, relative to the norm of a token's logits."""

Rows = Mapping[str, Any]
"""Arrays of a batch: `tokens`, and optionally `positions` and `segment_ids`, int32 [B, S]."""
Select = Callable[[np.ndarray], np.ndarray | None]


def missing_logits(case: Any) -> str | None:
    """Return why a model has no logits per token, or None if it has them."""
    model = case.program().functional.describe()
    if isinstance(model, LanguageModel) and isinstance(model, HasVocabulary):
        return None
    return "the model is not a language model: it has no `decoder` and `logits`"


def competing_tokens(case: Any) -> str | None:
    """Return which part of the model lets the tokens of a row compete, or None."""
    nodes = find(case.config.model, CompetingTokensRole)
    return next(
        (f"model.{path}: {type(n).owner.__name__} lets the tokens of a row compete" for path, n in nodes.items()), None
    )


def prefix_length(case: Any) -> int:
    """Return the number of leading tokens of each row that attend to one another in both directions."""
    model = case.program().functional.describe()
    return read_prefix(model.cache_spec()) if isinstance(model, KeepsCache) else 0


def all_in_prefix(case: Any) -> str | None:
    """Return why no token of a row is after the prefix, or None if some are."""
    prefix, (_, length) = prefix_length(case), rows_shape(case)
    return f"all {length} tokens of a row are in the prefix of {prefix} tokens" if prefix >= length else None


def random_rows(case: Any, seed: int, rows: int | None = None, length: int | None = None) -> np.ndarray:
    """Return random tokens, int32 [B, S], in the shape of the input's batches unless a shape is given."""
    shape = rows_shape(case)
    vocabulary = case.program().functional.describe().vocab_size
    rng = np.random.default_rng((case.seed, seed))
    return rng.integers(0, vocabulary, (rows or shape[0], length or shape[1]), dtype=np.int32)


def rows_shape(case: Any) -> tuple[int, int]:
    """Return the number of rows and of positions in a batch of tokens."""
    source = get_input_config(case.config)
    shapes = source.batch_shapes() if isinstance(source, DeclaresBatches) else {}
    sizes = [shape for shape, _ in shapes.values() if len(shape) >= 2]
    return (int(sizes[0][0]), int(sizes[0][1])) if sizes else (4, 16)


def model_weights(case: Any, program: Program) -> ModelWeights:
    """Return the weights of the model, excluding those of an objective."""
    weights, functional = case.weights(program.config), program.functional
    return ModelWeights(
        {p: weights.params[p] for p in functional.abstract}, {p: weights.variables[p] for p in functional.variables}
    )


def perturbed(params: Mapping[str, Any], amount: float, seed: int = 0) -> dict[str, Any]:
    """Move each parameter by a random multiple of `amount` times its magnitude."""
    if not amount:
        return dict(params)
    rng = np.random.default_rng(seed)

    def move(x: Any) -> Any:
        values = np.asarray(x)
        moves = amount * np.abs(values.astype(np.float64)) * rng.normal(size=values.shape)
        return jax.device_put((values + moves).astype(values.dtype), x.sharding)

    return {path: move(x) for path, x in params.items()}


def forward(program: Program) -> Callable[[ModelWeights, Rows], jax.Array]:
    """Return a traceable function from weights and rows to logits [B, S, V], in evaluation mode."""

    def run(weights: ModelWeights, rows: Rows) -> jax.Array:
        model = program.functional.bind(weights.params, weights.variables)
        hidden, _ = model.hidden_states(rows)
        return model.logits(hidden)

    return run


def compute_logits(program: Program, weights: ModelWeights, rows: Rows) -> np.ndarray:
    """Return the logits of rows, float64 [B, S, V]."""
    run = reuse(program, "logits", lambda: program.compile_trial(forward(program)))
    return np.asarray(run(weights, dict(rows)), np.float64)


def product_rounding(program: Program, rows: Rows) -> float:
    """Return the relative rounding error of the operands in 8-bit products of the forward pass, or 0 if it has none."""
    with program.tracing("train"):
        traced = jax.make_jaxpr(forward(program))(program.weights_spec, dict(rows))
    products = (e for e in equations(traced.jaxpr) if e.primitive.name == "dot_general")
    dtypes = {x.aval.dtype for product in products for x in product.invars if x.aval.dtype.itemsize == 1}
    return max((storage_rounding(dtype) for dtype in dtypes), default=0.0)


def storage_rounding(dtype: Any) -> float:
    """Return the relative rounding error of numbers that are stored in 8 bits."""
    return 1 / 127 if dtype == "int8" else float(jnp.finfo(dtype).eps)


def compute_dtype(config: Any) -> str:
    """Return the dtype that a model computes in."""
    fields = children(config.model)
    return fields["dtype"] if fields.get("dtype") in EPSILON else "float32"


def precise_config(config: Any) -> Any:
    """Return the config with float32 instead of a 16-bit dtype."""
    return patch(config, {"model.dtype": "float32"}) if compute_dtype(config) in ("bfloat16", "float16") else config


def check_precisely(case: Any, check: Callable[[Any], Outcome]) -> Outcome:
    """Check a property of a config in its dtype. If that is a 16-bit dtype and the property holds, check it in float32 too.

    Rounding hides small faults in a 16-bit dtype. If float32 leaves doubt, float64 decides.

    Args:
        case: `axlearn_plugins_verify.prove.case.Case`.
        check: Checks a config.
    """
    precise = precise_config(case.config)
    if precise is case.config:
        return check_single(case, precise, check)
    outcome = check(case.config)
    if not outcome.holds:
        return outcome
    return check_single(case, precise, check, note=ALSO_IN_FLOAT32, stops_early=True)


def check_single(
    case: Any, config: Any, check: Callable[[Any], Outcome], *, note: str = "", stops_early: bool = False
) -> Outcome:
    """Check a property of a config in float32. If that leaves doubt, float64 decides.

    Args:
        case: `axlearn_plugins_verify.prove.case.Case`.
        config: The config in float32.
        check: Checks a config.
        note: Note for the description of the outcome.
        stops_early: Whether a comparison may be left out if it would leave doubt.
    """
    with module_calls.without_location(), stopping_early() if stops_early else contextlib.nullcontext():
        try:
            outcome = check(config)
        except Inconclusive as reason:
            outcome = reason.outcome
    outcome = attrs.evolve(outcome, compared="; ".join(filter(None, [outcome.compared, note])))
    return repeat_if_doubtful(case, outcome, config, check)


def logits_tolerance(case: Any, program: Program, rows: Rows, epsilon: float = 0.0) -> float:
    """Return the largest relative error of a token's logits that rounding explains.

    Args:
        case: The case, which holds the weights.
        program: Program of the config.
        rows: Rows to compute.
        epsilon: Relative size of the rounding, if it is larger than that of the dtype.
    """
    dtype = compute_dtype(program.config)
    weights = model_weights(case, program)
    exact = compute_logits(program, weights, rows)
    moved = compute_logits(
        program, ModelWeights(perturbed(weights.params, max(epsilon, EPSILON[dtype])), weights.variables), rows
    )
    return max(FLOOR[dtype], 4 * float(token_errors(exact, moved).max()))


def token_errors(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Return the error of each token's logits, [B, S, V] -> [B, S], relative to the root mean square over all tokens."""
    norms = np.linalg.norm(expected, axis=-1)
    scale = float(np.sqrt(np.mean(np.square(norms)))) or 1.0
    errors = np.linalg.norm(actual - expected, axis=-1) / scale
    return np.where(np.isfinite(errors), errors, np.inf)


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """One of two computations of the same logits.

    Attributes:
        program: Program of the config.
        weights: Weights of the model.
        rows: Rows to compute.
        select: Selects the comparable part of an array [B, S, ...].
    """

    program: Program
    weights: ModelWeights
    rows: Rows
    select: Select = lambda x: x

    def logits(self) -> np.ndarray:
        """Return the comparable logits, [..., V]."""
        logits = self.select(compute_logits(self.program, self.weights, self.rows))
        assert logits is not None
        return logits

    def records(self) -> list[module_calls.Record]:
        """Run again and record the calls of modules."""
        model = self.program.functional.describe()
        run = self.program.compile_trial(forward(self.program))
        _, records = module_calls.record_calls(model, run, self.weights, dict(self.rows))
        return records

    def select_record(self, value: np.ndarray) -> np.ndarray | None:
        """Select the comparable part of a recorded array, or None if it has no rows and positions."""
        return self.select(value) if value.shape[:2] == self.rows["tokens"].shape else None


def compare_logits(one: Run, other: Run, *, tolerance: float, compared: str) -> Outcome:
    """Compare two computations of the same logits, and name the first layer that differs if they do."""
    stop_if_vague(tolerance, compared)
    expected, actual = one.logits(), other.logits()
    errors = token_errors(expected, actual)
    error = float(errors.max())
    if error <= tolerance:
        return Outcome(error=error, tolerance=tolerance, compared=compared)
    if not module_calls.is_located():
        return Outcome(error=error, tolerance=tolerance, compared=compared, difference=module_calls.unlocated(error))
    difference = module_calls.first_difference(
        one.records(), other.records(), tolerance, one.select_record, other.select_record
    ) or Difference(layer="", tensor="logits", error=error)
    place = np.unravel_index(int(np.argmax(errors > tolerance)), errors.shape)
    detail = "; ".join(filter(None, [difference.detail, f"first token with other logits: {list(map(int, place))}"]))
    return Outcome(
        error=error, tolerance=tolerance, compared=compared, difference=attrs.evolve(difference, detail=detail)
    )
