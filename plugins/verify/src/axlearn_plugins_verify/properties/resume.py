"""A resumed run equals an uninterrupted one, bit for bit."""

import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from axlearn_core.checkpoint.state import collect_arrays
from axlearn_core.config import patch, walk
from axlearn_core.contracts.experiment import get_checkpointer_config
from axlearn_plugins_verify.prove.contract import Difference, Outcome

BEFORE, AFTER = 2, 2
"""Number of steps before and after the checkpoint."""


class Resume:
    """Trains for a few steps, saves and restores a checkpoint halfway, and compares the states at the end.

    The checkpoint is written with the config's checkpointer to a temporary directory on this machine. The batches are
    synthetic, so the position in the data is not compared.
    """

    summary: ClassVar[str] = "a resumed run equals an uninterrupted one, bit for bit"

    def skip_reason(self, case: Any) -> str | None:
        """Skip configs without a checkpointer."""
        return None if get_checkpointer_config(case.config) is not None else "the config has no checkpointer"

    def check(self, case: Any) -> Outcome:
        """Compare the states of both runs."""
        program = case.program()
        batches = [program.put(case.batch(case.seed + i)) for i in range(BEFORE + AFTER)]
        train = program.compile("train", batches[0])

        def advance(state: Any, some: list[Any]) -> Any:
            for batch in some:
                state, _ = train(state, batch)
            return state

        with tempfile.TemporaryDirectory(prefix="axlearn-prove-") as directory:
            checkpointer = local_checkpointer(case.config, directory).build(directory=f"{directory}/checkpoints")
            try:
                state = advance(program.init(case.seed), batches[:BEFORE])
                checkpointer.save(BEFORE, state, extra={}, metrics={})
                expected = arrays(advance(state, batches[BEFORE:]))
                checkpointer.wait()
                restored, _ = checkpointer.restore(BEFORE, program.state)
                actual = arrays(advance(restored, batches[BEFORE:]))
            finally:
                checkpointer.close()
        return Outcome(
            error=0.0
            if (difference := first_array(expected, actual, program.trained.axes)) is None
            else difference.error,
            tolerance=0.0,
            compared=f"the training state after {BEFORE + AFTER} steps, with and without a checkpoint after {BEFORE}",
            difference=difference,
        )


def local_checkpointer(config: Any, directory: str) -> Any:
    """Return the config of the checkpointer, with every location that it names moved into a directory."""
    checkpointer = get_checkpointer_config(config)
    places = {path: value for path, value in walk(checkpointer) if isinstance(value, str)}
    names = {path: path.rpartition(".")[2] for path in places}
    moved = {path: f"{directory}/{path}" for path, name in names.items() if name == "directory"}
    return patch(checkpointer, {**moved, **{path: None for path, name in names.items() if name == "uri"}})


def arrays(state: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a state by path."""
    return {path: np.asarray(jax.device_get(x)) for path, x in collect_arrays(state)[1].items()}


def first_array(
    expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray], axes: Mapping[str, Any]
) -> Difference | None:
    """Return the first array that is not bitwise equal."""
    for path, value in expected.items():
        other = actual[path]
        if value.tobytes() == other.tobytes():
            continue
        apart = np.asarray(other, np.float64) - np.asarray(value, np.float64)
        norm = float(np.linalg.norm(np.asarray(value, np.float64)))
        error = float(np.linalg.norm(apart)) / norm if norm else float("inf")
        count = int(np.count_nonzero(apart))
        module = next((p for p in sorted(axes, key=len, reverse=True) if path.endswith(p)), "").rpartition(".")[0]
        return Difference(
            layer=module,
            tensor=path,
            error=error or np.finfo(np.float64).tiny,
            detail=f"{count} of {value.size} values",
        )
    return None
