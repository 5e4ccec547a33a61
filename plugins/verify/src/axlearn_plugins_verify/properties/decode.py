"""Decoding: a cache gives the same logits as the forward pass, and generation picks the most probable tokens."""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.compose import ModelWeights, Program
from axlearn_core.config import Node, patch
from axlearn_core.config.tree import children, find_slots
from axlearn_core.contracts.capabilities import GeneratesTokens
from axlearn_plugins_transformer.kv_cache import KVCache
from axlearn_plugins_verify.properties.causality import bidirectional
from axlearn_plugins_verify.prove import module_calls
from axlearn_plugins_verify.prove.contract import Difference, Outcome
from axlearn_plugins_verify.prove.forward import (
    Run,
    all_in_prefix,
    check_precisely,
    competing_tokens,
    compute_logits,
    logits_tolerance,
    missing_logits,
    model_weights,
    precise_config,
    prefix_length,
    random_rows,
    storage_rounding,
    token_errors,
)
from axlearn_plugins_verify.prove.reuse import reuse

ROWS = 2
"""Rows that are decoded together."""
STORES = 4
"""Error in the logits that the rounding of keys and values explains, in units of that rounding."""


class CachedDecoding:
    """Decodes rows with a cache: a chunk of prompt, then single tokens. Then generates tokens from a padded prompt.

    The first part compares logits. The second part runs the functions that `axlearn generate` and a run's samples use: each
    token must have the largest logit of the forward pass, up to rounding.
    """

    summary: ClassVar[str] = "decoding with the cache gives the logits of the forward pass"

    def skip_reason(self, case: Any) -> str | None:
        """Skip models that do not generate."""
        reason = missing_logits(case) or bidirectional(case) or competing_tokens(case) or all_in_prefix(case)
        if reason is None and not isinstance(case.program().functional.describe(), GeneratesTokens):
            return "the model does not generate tokens"
        return reason

    def check(self, case: Any) -> Outcome:
        """Compare the logits, then the generated tokens. An 8-bit cache is also checked in the dtype of the model."""
        exact, rounding = exact_caches(case.config)
        base = case.config
        outcome = check_precisely(case, lambda config: self._check(case, case.program(patch(config, exact))))
        if not outcome.holds or not exact:
            return outcome
        return self._check(case, case.program(precise_config(base)), rounding)

    def _check(self, case: Any, program: Program, rounding: float = 0.0) -> Outcome:
        weights, tokens = model_weights(case, program), random_rows(case, 4, ROWS)
        expected = compute_logits(program, weights, {"tokens": tokens})
        rows = {"tokens": tokens}
        tolerance = logits_tolerance(case, program, rows)
        if rounding:  # routers and quantized layers may jump, so measure what this rounding does
            tolerance = max(tolerance, rounding, logits_tolerance(case, program, rows, rounding / STORES))
        prompt = max(1, tokens.shape[1] // 2, prefix_length(case))
        compared = f"logits of a prompt of {prompt} tokens and of {tokens.shape[1] - prompt} tokens after it"
        decoding = Decoding(program, weights, tokens, prompt)
        errors = token_errors(expected, decoding.logits())
        error = float(errors.max())
        if error > tolerance and not module_calls.is_located():
            return Outcome(
                error=error, tolerance=tolerance, compared=compared, difference=module_calls.unlocated(error)
            )
        if error > tolerance:
            position = int(np.argmax((errors > tolerance).any(axis=0)))
            part = "in the prompt" if position < prompt else "after the prompt"
            whole = Run(program=program, weights=weights, rows={"tokens": tokens})
            difference = module_calls.first_difference(
                whole.records(), decoding.records(), tolerance, whole.select_record, whole.select_record
            ) or Difference(layer="", tensor="logits", error=error)
            detail = f"first at position {position}, {part}; {difference.detail}".removesuffix("; ")
            return Outcome(
                error=error, tolerance=tolerance, compared=compared, difference=attrs.evolve(difference, detail=detail)
            )
        gap, difference = _generate(program, weights, tokens[0, :prompt], tokens.shape[1], tolerance)
        return Outcome(
            error=max(error, gap),
            tolerance=tolerance,
            compared=f"{compared}, and the tokens that it generates",
            difference=difference,
        )


def exact_caches(config: Any) -> tuple[dict[str, None], float]:
    """Return the settings that store all keys and values in the dtype of the model, and the error that they avoid.

    Returns:
        (settings by path, error in the logits that rounding in the config's own caches explains).
    """
    settings: dict[str, None] = {}
    rounding = 0.0
    for path, cache in find_slots(config.model, KVCache).items():
        store = children(cache).get("store") if isinstance(cache, Node) else None
        if store is not None:
            settings[f"model.{path}.store"] = None
            rounding = max(rounding, STORES * storage_rounding(store))
    return settings, rounding


@attrs.frozen(eq=False)
class Decoding:
    """Logits of rows, computed in chunks with a cache.

    Attributes:
        program: Program of the config.
        weights: Weights of the model.
        tokens: Tokens of the rows, int32 [B, S].
        prompt: Number of tokens in the first chunk. Later chunks have one token.
    """

    program: Program
    weights: ModelWeights
    tokens: np.ndarray
    prompt: int

    def logits(self) -> np.ndarray:
        """Return the logits, float64 [B, S, V]."""
        chunk = reuse(self.program, "decoding", lambda: _compile(self.program))
        parts = self._run(lambda cache, tokens: chunk(self.weights, cache, tokens))
        return np.asarray(np.concatenate(parts, axis=1), np.float64)

    def records(self) -> list[module_calls.Record]:
        """Record the calls of modules, with the positions of all chunks joined."""
        model, chunks = self.program.functional.describe(), []

        def record(cache: Any, tokens: np.ndarray) -> Any:
            result, records = module_calls.record_calls(model, _compile(self.program), self.weights, cache, tokens)
            chunks.append([r for r in records if r.value.shape[:2] == tokens.shape])
            return result

        self._run(record)
        return module_calls.join_chunks(chunks)

    def _run(self, decode: Callable[[Any, np.ndarray], Any]) -> list[np.ndarray]:
        init = reuse(
            self.program, ("cache", self.tokens.shape), lambda: _compile_cache(self.program, self.tokens.shape)
        )
        cache, parts = init(self.weights), []
        edges = [0, *range(self.prompt, self.tokens.shape[1] + 1)]
        for start, stop in itertools.pairwise(edges):
            logits, cache = decode(cache, self.tokens[:, start:stop])
            parts.append(np.asarray(logits))
        return parts


def _bind(program: Program, weights: ModelWeights) -> Any:
    return program.functional.bind(weights.params, weights.variables).unstacked()


def _compile_cache(program: Program, shape: tuple[int, ...]) -> Any:
    return program.compile_trial(lambda weights: _bind(program, weights).init_cache(*shape))


def _compile(program: Program) -> Any:
    name = "decode" if "decode" in program.functions else "train"
    return program.compile_trial(lambda weights, cache, tokens: _bind(program, weights)(tokens, cache=cache), name)


def _generate(
    program: Program, weights: ModelWeights, prompt: np.ndarray, length: int, tolerance: float
) -> tuple[float, Difference | None]:
    """Generate tokens, and return by how much the logits of the forward pass prefer another token.

    The gap is relative to the root mean square of the logits' norm, like the tolerance.
    """
    model = program.functional.bind(weights.params, weights.variables)
    count = length - len(prompt)
    generated = list(
        model.generate(prompt.tolist(), max_tokens=count, temperature=0.0, seed=0, eos_id=None, program=program)
    )
    row = np.asarray([[*prompt.tolist(), *generated]], np.int32)
    padded = np.zeros((ROWS, length), np.int32)
    padded[:1, : row.shape[1]] = row
    logits = compute_logits(program, weights, {"tokens": padded})[0]
    scale = float(np.sqrt(np.mean(np.square(np.linalg.norm(logits, axis=-1))))) or 1.0
    worst = 0.0
    for index, token in enumerate(generated):
        position = len(prompt) - 1 + index
        gap = float(logits[position].max() - logits[position, token]) / scale
        worst = max(worst, gap)
        if not gap <= 2 * tolerance:  # each of the two logits may be off
            what = "the first token after the prompt" if index == 0 else f"token {index + 1} after the prompt"
            return worst, Difference(
                layer="generate",
                tensor="tokens",
                error=gap,
                detail=f"{what} is {token}, but the forward pass prefers {int(logits[position].argmax())}",
            )
    return worst / 2, None
