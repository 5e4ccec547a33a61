"""`replay`: compute a step of a run again, in one call."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from axlearn_core.config import matches
from axlearn_core.contracts.capabilities import LocatesDocuments
from axlearn_core.errors import RequestError, nearest
from axlearn_core.nn.layer import DTYPES
from axlearn_plugins_tools.reporting.step_runner import ComputedStep, HostBatch
from axlearn_plugins_verify.replay import findings
from axlearn_plugins_verify.replay.differences import (
    ArrayDifference,
    ScalarDifference,
    compare_scalars,
    compare_states,
)
from axlearn_plugins_verify.replay.document_search import MAX_RERUNS, Bisection, bisect_documents
from axlearn_plugins_verify.replay.documents import Document, list_documents
from axlearn_plugins_verify.replay.findings import Divergence, Finding
from axlearn_plugins_verify.replay.history import History
from axlearn_plugins_verify.replay.probes import Statistics
from axlearn_plugins_verify.replay.replayer import Replayer, change_program
from axlearn_plugins_verify.replay.workbench import Measure, Workbench

NAMED = 16
"""Maximum number of documents whose files are looked up. Each lookup tokenizes records again."""

Progress = Callable[[str], None]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Replay:
    """A step that was computed again.

    Attributes:
        run: Path or URI of the run.
        step: Number of the step.
        start: Step of the restored checkpoint, or 0 for the initial state.
        changes: What changed since the run computed the step, if drift was allowed.
        scalars: Scalars of the step.
        compared_steps: Steps whose scalars were compared with the recorded ones.
        compared_scalars: Number of scalars that were compared.
        compared_arrays: Number of arrays that were compared with the checkpoint at the step. 0 if there is no such checkpoint.
        different_scalars: Scalars that differ, in the order of the steps.
        different_arrays: Arrays of the state that differ from the checkpoint.
        position: Position of the batch in the data.
        features: Additional features of a second execution of the step.
        feature_scalars: Scalars of the step with these features.
        probes: Statistics of the modules and parameters that match the pattern.
        weights: Paths of the weights and variables that were not finite before the step.
        nonfinite: First tensor with values that are not finite.
        grown: First tensor that is larger than usual.
        shadow: Name of the execution that was compared layer by layer.
        divergences: Distance to the shadow execution at each tensor, in the order of computation.
        bisection: Result of the search for documents.
    """

    run: str
    step: int
    start: int
    changes: Sequence[str] = ()
    scalars: Mapping[str, float] = {}
    compared_steps: Sequence[int] = ()
    compared_scalars: int = 0
    compared_arrays: int = 0
    different_scalars: Sequence[ScalarDifference] = ()
    different_arrays: Sequence[ArrayDifference] = ()
    position: str = ""
    features: Sequence[str] = ()
    feature_scalars: Mapping[str, float] = {}
    probes: Sequence[Statistics] = ()
    weights: Sequence[str] = ()
    nonfinite: Finding | None = None
    grown: Finding | None = None
    shadow: str = ""
    divergences: Sequence[Divergence] = ()
    bisection: Bisection | None = None

    @property
    def identical(self) -> bool | None:
        """Whether everything that the run recorded matches bit for bit. None if it recorded nothing."""
        if not self.compared_scalars and not self.compared_arrays:
            return None
        return not self.different_scalars and not self.different_arrays

    @property
    def divergence(self) -> Divergence | None:
        """First tensor at which the shadow execution diverges."""
        return findings.first_divergence(self.divergences)

    def __repr__(self) -> str:
        verdict = {None: "nothing to compare", True: "bit-identical", False: "not bit-identical"}[self.identical]
        return f"Replay(step {self.step:,} of {self.run}, {verdict})"

    def _repr_html_(self) -> str:
        """Return the sections of the result, for notebooks."""
        from axlearn_plugins_verify.replay.replay_report import fragment

        return fragment(self)

    def __str__(self) -> str:
        from axlearn_plugins_verify.replay.replay_report import text

        return text(self)


def replay(
    run: str | Path,
    *,
    step: int,
    with_: Iterable[str] = (),
    probe: str | None = None,
    shadow: str | None = None,
    bisect: bool = False,
    allow_drift: bool = False,
    from_start: bool = False,
    max_reruns: int = MAX_RERUNS,
    progress: Progress = lambda _: None,
) -> Replay:
    """Compute a step of a run again, and compare it with what the run recorded.

    The newest checkpoint before the step is restored, and the steps after it are computed with the same data and keys. Nothing
    in the run directory changes. If the step is not finite, the first tensor and the documents that caused it are named.

    Args:
        run: Run directory or URI.
        step: Number of the step, from 1.
        with_: Features of a second execution of the step, as on the command line. Probes, the shadow and the search apply to it.
        probe: Pattern of modules and parameters to measure, such as `decoder.**.attention`.
        shadow: Execution to compare with, layer by layer: a dtype such as `float32`, or a feature.
        bisect: Search for the documents that make the step abnormal.
        allow_drift: Continue if the config, the data, the versions or the code of the run changed.
        from_start: Begin with the initial state instead of a checkpoint.
        max_reruns: Maximum number of times to compute a part of the batch.
        progress: Receives a line of text at each stage.

    Raises:
        RequestError: The step cannot be replayed, or an option is invalid.
        ConfigError: The run's config cannot be composed on this machine.
    """
    with ExitStack() as closing:
        history = History.open(run)
        closing.callback(history.close)
        replayer = Replayer.open(history, step, closing, allow_drift=allow_drift, from_start=from_start)
        place = f"the checkpoint of step {replayer.start:,}" if replayer.start else "the initial state"
        progress(f"computing steps {replayer.start + 1:,} to {step:,} from {place}")
        features, program = list(with_), replayer.program
        changed = change_program(program, features, f"--with {' '.join(features)}") if features else program
        other = change_program(changed, [shadow_feature(shadow)], f"--shadow {shadow}") if shadow else None
        if probe is not None:
            check_probe(changed, probe)
        analysis = bool(features or probe or shadow or bisect)
        result, target, previous = _compare(history, replayer, step)
        abnormal = not all(np.isfinite(v) for n, v in target.scalars.items() if n in ("loss", "grad_norm"))
        if not analysis and not abnormal:
            return result
        if features:
            progress(f"computing step {step:,} with {' '.join(features)}")
            _, scalars = changed.train_step(jax.tree.map(jnp.copy, target.before), changed.put(target.batch))
            values = {name: float(np.asarray(value)) for name, value in scalars.items()}
            result = attrs.evolve(result, features=features, feature_scalars=values)
        usual = previous if previous is not None else next(replayer.batches)
        inspection = _Inspection(Workbench(changed, target.before), target, usual, progress)
        result = inspection.locate(result, probe)
        if other is not None:
            result = inspection.compare(result, Workbench(other, target.before), str(shadow))
        return inspection.name_sources(inspection.bisect(result, max_reruns) if bisect else result)


def _compare(history: History, replayer: Replayer, step: int) -> tuple[Replay, ComputedStep, HostBatch | None]:
    """Compute the steps up to `step` and compare them. Return the result, the last step, and the preceding batch."""
    scalars: list[ScalarDifference] = []
    compared: dict[int, int] = {}
    previous: HostBatch | None = None
    target: ComputedStep | None = None
    for current in replayer.run(step, keep=True):
        previous, target = None if target is None else target.batch, current
        recorded = history.scalars.get(current.number, {})
        if count := len(recorded.keys() & current.scalars.keys()):
            compared[current.number] = count
        scalars += compare_scalars(current.number, recorded, current.scalars)
    assert target is not None
    arrays: list[ArrayDifference] = []
    number = 0
    if step in history.steps:
        state, _ = history.restore(step, replayer.program.state)
        arrays, number = compare_states(state, target.state), len(jax.tree.leaves(state))
    result = Replay(
        run=str(history.run),
        step=step,
        start=replayer.start,
        changes=replayer.changes,
        scalars=target.scalars,
        compared_steps=tuple(compared),
        compared_scalars=sum(compared.values()),
        compared_arrays=number,
        different_scalars=tuple(scalars),
        different_arrays=tuple(arrays),
        position=str(target.position),
    )
    return result, target, previous


@attrs.frozen
class _Inspection:
    """Finds unusual values in a step, using the weights from before the step.

    Attributes:
        bench: Computes parts of the step.
        step: The step.
        usual: Another batch, which defines the usual values with these weights.
        progress: Receives a line of text at each stage.
    """

    bench: Workbench
    step: ComputedStep
    usual: HostBatch
    progress: Progress

    @property
    def documents(self) -> list[Document]:
        """The documents of the batch."""
        return list_documents(self.step.batch, self.bench.microbatches)

    def locate(self, result: Replay, probe: str | None) -> Replay:
        """Name the first tensors that are not finite or that grew, and measure the tensors that match a pattern."""
        bench, batch, documents = self.bench, self.step.batch, self.documents
        self.progress("measuring the outputs and gradients of each module")
        measured = self._measure(batch)
        usual = findings.usual_magnitudes(self._measure(self.usual))
        weights = findings.nonfinite_arrays({**bench.weights.params, **bench.weights.variables})
        probes = [] if probe is None else [
            s for s in measured if not s.tensor.startswith("input") and matches(probe, s.layer.partition("[")[0])
        ]  # fmt: skip
        return attrs.evolve(
            result,
            probes=probes,
            weights=weights,
            nonfinite=findings.first_nonfinite(measured, documents, bench.microbatches),
            grown=findings.first_grown(measured, usual, documents, bench.microbatches),
        )

    def _measure(self, batch: HostBatch) -> list[Statistics]:
        bench = self.bench
        return [
            *bench.trace(batch, "outputs"),
            *bench.trace(batch, "gradients"),
            *bench.trace_parameters(batch),
        ]

    def compare(self, result: Replay, shadow: Workbench, name: str) -> Replay:
        """Compare the outputs of modules with those of another execution."""
        self.progress(f"comparing the outputs of each module with {name}")
        pairs = findings.compare_executions(
            self.bench.trace(self.step.batch, "outputs"), shadow.trace(self.step.batch, "outputs")
        )
        return attrs.evolve(result, shadow=name, divergences=pairs)

    def bisect(self, result: Replay, max_reruns: int) -> Replay:
        """Search for the documents that make the step abnormal."""
        whole, usual = self.bench.measure(self.step.batch), self.bench.measure(self.usual)
        if result.weights:
            ended = "the weights were not finite before the step, so no document is to blame"
            return attrs.evolve(result, bisection=Bisection(whole=whole, ended=ended))
        if not whole.finite and not usual.finite:
            ended = "another batch is not finite with these weights either, so no document is to blame"
            return attrs.evolve(result, bisection=Bisection(whole=whole, ended=ended))
        finding = result.nonfinite or result.grown
        documents = self.documents
        self.progress(f"searching {len(documents)} documents")

        def measure(batch: Mapping[str, Any]) -> Measure:
            return self.bench.measure(batch)

        bisection = bisect_documents(
            self.step.batch,
            documents,
            measure,
            whole=whole,
            usual=usual.norm if usual.finite else None,
            suspects=finding.documents if finding else (),
            max_reruns=max_reruns,
        )
        return attrs.evolve(result, bisection=bisection)

    def name_sources(self, result: Replay) -> Replay:
        """Name the files of the documents that the result blames."""
        position, batch = self.step.position, self.step.batch

        @functools.cache
        def named(document: Document) -> Document:
            if not document.number or not isinstance(position, LocatesDocuments):
                return document
            return attrs.evolve(document, source=position.locate(batch, document.row, document.start, document.stop))

        def of(part: Any) -> Any:
            if part is None or len(part.documents) > NAMED:
                return part
            return attrs.evolve(part, documents=tuple(map(named, part.documents)))

        return attrs.evolve(
            result, nonfinite=of(result.nonfinite), grown=of(result.grown), bisection=of(result.bisection)
        )


def shadow_feature(shadow: str) -> str:
    """Return the feature of a shadow execution. A dtype stands for the feature that sets it."""
    return f"precision:dtype={shadow}" if shadow in DTYPES else shadow


def check_probe(program: Any, pattern: str) -> None:
    """Raise `RequestError` if a pattern matches no module and no parameter of the model. The error names the nearest paths."""
    from flax import nnx

    modules = [".".join(map(str, path)) for path, _ in nnx.iter_modules(program.functional.describe())]
    paths = [p for p in (*modules, *program.trained.abstract) if p]
    layered = [*paths, *(f"{head}.layer.0{tail}" for head, dot, tail in (p.partition(".layer") for p in paths) if dot)]
    if any(matches(pattern, path) for path in layered):
        return
    close = nearest(pattern.replace("**.", "").replace(".**", ""), paths)
    raise RequestError(
        f"--probe: the pattern {pattern!r} matches no module or parameter\n"
        f"    nearest: {', '.join(close or paths[:5])}\n"
        "    fix: `*` matches one part of a dotted path, `**` matches any number of parts; a layer of a stack has its index, as\n"
        "    in `decoder.layer.0.attention`"
    )
