"""Runs of the time when the bias of a sigmoid router was a parameter, which a rule of the learner moved. Imports no JAX.

Their config has a rule `{pattern: "**.router.bias", optimizer: {type: sign-descent, rate: 0.001}}`, and their checkpoints have
`params.<path>.router.bias`. Because of that rule the state of the main optimizer is one of several parts: it lies below
`learner.optimizer.inner_states..inner_state`, and that of the optimizer of rule N below `inner_states.N.inner_state`.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from axlearn_core.config import matches

Data = Mapping[str, Any]
BIAS, DESCENT = "router.bias", "sign-descent"
OPTIMIZER = "learner.optimizer."
PARTS = f"{OPTIMIZER}inner_states."


def rules_to_rates(config: Data) -> Data:
    """A `ConfigMigration`: the rate of the rules for biases becomes that of their routers, and the rules go."""
    learner = config.get("learner")
    rules = learner.get("rules") if isinstance(learner, Mapping) else None
    if not isinstance(learner, Mapping) or not isinstance(rules, list) or not any(map(_is_for_biases, rules)):
        return config
    other_rules = [rule for rule in rules if not _is_for_biases(rule)]
    return {**_with_rates(config, "", rules), "learner": {**learner, "rules": other_rules}}


def _is_for_biases(rule: Any) -> bool:
    """Whether a rule fits biases of routers and nothing else."""
    if not isinstance(rule, Mapping):
        return False
    optimizer = rule.get("optimizer")
    descends = isinstance(optimizer, Mapping) and optimizer.get("type") == DESCENT
    return descends or str(rule.get("pattern", "")).endswith(f".{BIAS}")


def _with_rates(value: Any, path: str, rules: list[Data]) -> Any:
    """A part of a config with the rate of each sigmoid router in it."""
    if isinstance(value, list):
        return [
            _with_rates(item, path, rules) for item in value
        ]  # of `alternate`: parameters have the path of the slot
    if not isinstance(value, Mapping):
        return value
    parts = {k: _with_rates(v, path if isinstance(v, list) else f"{path}.{k}", rules) for k, v in value.items()}
    if value.get("type") != "sigmoid-router" or "rate" in value:
        return parts
    return {**parts, "rate": _rate(f"{path.removeprefix('.model.')}.bias", rules)}


def _rate(bias: str, rules: list[Data]) -> float:
    """How far the rules moved a bias in a step."""
    rate, scale = 0.0, 1.0
    for rule in rules:
        pattern = str(rule.get("pattern", ""))
        if matches(pattern.removeprefix("!"), bias) == pattern.startswith("!"):
            continue
        if rule.get("freeze"):
            return 0.0
        scale *= rule.get("learning_rate_scale", 1.0)
        optimizer = rule.get("optimizer")
        if isinstance(optimizer, Mapping) and optimizer.get("type") == DESCENT:
            rate = optimizer.get("rate", 1e-3)
    return rate * scale


def parameters_to_variables(stored: Collection[str], expected: Collection[str]) -> dict[str, str | None]:
    """An `ArrayMigration`: biases among the variables, no moving averages of them, and the optimizer's state in one piece."""
    expected = set(expected)
    renamed: dict[str, str | None] = {}
    for path in stored:
        name = path.removeprefix("params.").removeprefix("learner.ema.")
        if path not in expected and name.endswith(f".{BIAS}") and f"variables.{name}" in expected:
            if path.startswith("params."):
                renamed[path] = f"variables.{name}"
            elif path.startswith("learner.ema."):
                renamed[path] = None
    return {**renamed, **dict(_optimizer(stored, expected))} if renamed else {}


def _optimizer(stored: Collection[str], expected: Collection[str]) -> Iterator[tuple[str, str]]:
    """(stored path, path today) of the optimizer's state: rules behind the one that went have other numbers now."""
    old, new = _labels(stored), _labels(expected)
    labels = dict(zip(old, new, strict=False)) if new else {}
    for path in stored:
        if path.startswith(PARTS):
            label, _, rest = path.removeprefix(PARTS).partition(".inner_state.")
            renamed = f"{PARTS}{labels[label]}.inner_state.{rest}" if label in labels else f"{OPTIMIZER}{rest}"
            if renamed in expected and renamed != path:
                yield path, renamed


def _labels(paths: Collection[str]) -> list[str]:
    """The parts of the optimizer's state that have arrays: `""` is the main optimizer, others are the numbers of rules."""
    labels = {p.removeprefix(PARTS).partition(".inner_state.")[0] for p in paths if p.startswith(PARTS)}
    return sorted(labels, key=lambda label: int(label or -1))
