"""The trainer: the root of every experiment."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint import ShardedCheckpointer, open_storage
from axlearn_core.checkpoint.base import WEIGHTS_ONLY
from axlearn_core.checkpoint.state import agree
from axlearn_core.compose import Function, Functional, ModelAndObjective, Program, compose
from axlearn_core.compose.objective import decide_replication
from axlearn_core.compose.program import declared_batch
from axlearn_core.config import REQUIRED, Configurable, Node, check, node, setting
from axlearn_core.contracts.capabilities import (
    ChecksStart,
    ChecksTraining,
    FreezesParameters,
    HasClasses,
    KeepsLocalTier,
    OwnsCheckpoints,
    ReportsSaves,
    vocabulary_size,
)
from axlearn_core.contracts.experiment import checkpoint_uri
from axlearn_core.contracts.mesh import Mesh
from axlearn_core.contracts.parts import (
    BatchIterator,
    Checkpointer,
    Input,
    Model,
    Objective,
    ProcessGroup,
    Profiler,
    Tracker,
    Watchdog,
)
from axlearn_core.contracts.parts import Learner as LearnerProtocol
from axlearn_core.contracts.target import Machine
from axlearn_core.contracts.text import TextFacts
from axlearn_core.errors import AxlearnError, RequestError, WorkError
from axlearn_core.learn import Learner
from axlearn_core.nn.module_checks import check_stateless
from axlearn_core.plugins.decisions import Decision
from axlearn_core.plugins.registry import Entry
from axlearn_core.run.asset_copies import write_assets
from axlearn_core.run.events import RunListener, name_failures
from axlearn_core.run.lock import make_lock, peak_flops
from axlearn_core.run.notices import log_message
from axlearn_core.run.record import RunDir, lock_drift
from axlearn_core.run.run import Run
from axlearn_core.train.data_facts import check_facts, log_context, plain_facts
from axlearn_core.train.distributed import Distributed
from axlearn_core.train.evaluators import Evaluator, LossEvaluator
from axlearn_core.train.job_checks import check_same_config, check_same_data
from axlearn_core.train.listeners import (
    ProfilerListener,
    TrackerListener,
    check_job,
    plugin_listeners,
    watchdog_listener,
)
from axlearn_core.train.loop import Loop, TrainLoop
from axlearn_core.train.objective import ObjectiveWeights
from axlearn_core.train.ownership import SAVED, check_metrics, claim_checkpoints, was_saved
from axlearn_core.train.session import Session
from axlearn_core.train.step import TrainingFunctions
from axlearn_core.train.trackers import JsonlTracker, LinesTracker

SHOWN_METRICS = 4
"""Number of metrics in the repr of a result."""


@attrs.frozen(repr=False)
class Result:
    """The outcome of a run.

    Attributes:
        run_dir: Local run directory.
        step: Number of steps that the state has been trained for.
        metrics: Latest loss and evaluation results.
        stop_signal: Signal that stopped the run early, or None.
        uri: URI of the run, or None for a local run. If set, `run_dir` is its working copy.
    """

    run_dir: Path
    step: int
    metrics: Mapping[str, float]
    stop_signal: int | None = None
    uri: str | None = None

    @property
    def name(self) -> str:
        """The URI or directory of the run, as other commands expect it."""
        return self.uri or str(self.run_dir)

    def __repr__(self) -> str:
        values = [f"{name} {value:.4g}" for name, value in [*self.metrics.items()][:SHOWN_METRICS]]
        stopped = [] if self.stop_signal is None else [f"stopped by signal {self.stop_signal}"]
        return f"Result({', '.join([self.name, f'step {self.step:,}', *values, *stopped])})"


def _build_learner(learner: Node[LearnerProtocol], max_steps: int, trained: ModelAndObjective) -> LearnerProtocol:
    return check_stateless(learner.build(max_steps=max_steps, axes=trained.axes), "learner")


@attrs.frozen(kw_only=True)
class OpenParts:
    """The parts of a run that read data or check it, plus facts about the data and the model.

    Attributes:
        input: The input.
        batches: Its training data stream.
        facts: Facts about the data from `Input.describe`.
        evaluators: The evaluators by name.
        loop: The training loop.
        trained_parameters: Number of the model's parameters that training updates.
    """

    input: Input
    batches: BatchIterator
    facts: Mapping[str, Any]
    evaluators: Mapping[str, Evaluator]
    loop: Loop
    trained_parameters: int


class Trainer(Configurable):
    """Trains a model. Any component in its config can be replaced."""

    @node
    class Config(Configurable.Config["Trainer"]):
        """The root config. Paths such as `model.decoder.num_layers` start here.

        Execution settings determine how a run is measured, stored and laid out. They do not affect the updates.
        `max_steps` does affect them, because schedules end there, but it may still be changed when a run is resumed.

        Attributes:
            name: Name of the experiment, used for the run directory and in reports.
            objective: Training objective, or None for the model's own loss.
            keep_compiled_step: Cache the compiled step in the run directory, for processes that resume the run.
        """

        name: str = setting(default="", kind="execution", label=True)
        model: Node[Model] = REQUIRED
        objective: Node[Objective] | None = setting(default=None, hide_default=True)
        learner: Node[LearnerProtocol] = Learner.Config()
        input: Node[Input] = REQUIRED
        text: Node[TextFacts] | None = setting(default=None, kind="execution", hide_default=True)
        evaluators: Mapping[str, Node[Evaluator]] = setting(default={"eval": LossEvaluator.Config()}, kind="execution")
        checkpointer: Node[Checkpointer] = setting(default=ShardedCheckpointer.Config(), kind="execution")
        mesh: Mesh = setting(default=Mesh(), kind="execution")
        distributed: Node[ProcessGroup] = setting(default=Distributed.Config(), kind="execution")
        trackers: tuple[Node[Tracker], ...] = setting(
            default=(LinesTracker.Config(), JsonlTracker.Config()), kind="execution"
        )
        loop: Node[Loop] = TrainLoop.Config()
        profiler: Node[Profiler] | None = setting(default=None, kind="execution")
        watchdog: Node[Watchdog] | None = setting(default=None, kind="execution")
        max_steps: int = setting(default=REQUIRED, kind="duration", ge=1, le=2**31 - 1)  # steps are int32
        log_every_steps: int = setting(default=10, kind="execution", ge=1)
        keep_compiled_step: bool = setting(default=True, kind="execution", hide_default=True)
        seed: int = setting(default=0, ge=0, le=2**63 - 1)

        def functions(self, functional: Functional) -> Mapping[str, Function]:
            """Return the pure functions of this experiment by name. See `axlearn_core.compose`."""
            trained = ModelAndObjective.from_config(self, functional)
            learner = _build_learner(self.learner, self.max_steps, trained)
            return TrainingFunctions(functional, learner, trained).declare()

        def build_input(self, input_config: Node[Input], vocab_size: int | None) -> Input:
            """Build an input for this process."""
            sizes = {} if vocab_size is None else {"vocab_size": vocab_size}
            if isinstance(self.model, HasClasses):
                sizes["num_classes"] = self.model.num_classes
            source = input_config.build(
                seed=self.seed,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
                **sizes,
            )
            return check_stateless(source, "input")

        def open_parts(self, trained: ModelAndObjective, closing: ExitStack) -> "OpenParts":
            """Build the parts that can reject a run. Training and the checks before it both call this.

            Args:
                trained: The model and its objective.
                closing: Closes the data stream.

            Raises:
                RequestError: If the data, the tokenizer, the learner or another part of the config is invalid.
            """
            learner = _build_learner(self.learner, self.max_steps, trained)
            sizes = {path: spec.size for path, spec in trained.model.abstract.items()}
            if isinstance(learner, ChecksTraining):
                learner.check_training()
            frozen = learner.frozen_params(sizes) if isinstance(learner, FreezesParameters) else ()
            vocab_size = vocabulary_size(trained.model.describe())
            source = self.build_input(self.input, vocab_size)
            batches = source.train()
            closing.callback(batches.close)
            facts = plain_facts(source.describe())
            log_context(self)
            check_same_data(facts)
            offered = {"input": source, "build_input": lambda other: self.build_input(other, vocab_size)}
            evaluators = {name: e.build(name=name, **offered) for name, e in self.evaluators.items()}
            for name, evaluator in evaluators.items():
                check_stateless(evaluator, f"evaluators.{name}")
            return OpenParts(
                input=source,
                batches=batches,
                facts=facts,
                evaluators=evaluators,
                loop=check_stateless(self.loop.build(**offered), "loop"),
                trained_parameters=sum(sizes.values()) - sum(sizes[path] for path in frozen),
            )

    def __init__(self, cfg: Config):
        self.config = check(cfg)

    def run(
        self,
        run_dir: RunDir,
        *,
        experiment: str = "",
        config_text: str = "",
        assets: Mapping[str, bytes] = {},
        provenance: Mapping[str, Any] | None = None,
        restore_step: int | None = None,
        restart: bool = False,
        machine: Machine | None = None,
        decisions: Sequence[Decision] = (),
    ) -> Result:
        """Train up to `max_steps` in a checked run directory. Resume from the newest checkpoint if there is one.

        Everything is built, and the checkpoint is verified, before anything is written.

        Args:
            run_dir: Run directory from `RunDir.check`.
            experiment: Name of the experiment, for display.
            config_text: Resolved config as YAML, to write to the run directory.
            assets: Contents of the asset files, by path in the run.
            provenance: Source of the value at each config path, for the lock.
            restore_step: Step of the checkpoint to restore (default: the newest).
            restart: Start at step 0 and set existing checkpoints aside.
            machine: Machine to run on, or None for the machine that JAX detects.
            decisions: Decisions made for the user, to log and to record in the lock.
        """
        self.config.distributed.build().initialize()
        check_same_config(self.config)
        program = compose(self.config, machine=machine)
        with ExitStack() as closing:
            session, parts = self._open(program, run_dir, closing, experiment)
            self._restore(session, restore_step, restart=restart)
            if session.state is None and not restart:
                check_metrics(run_dir, session.lock)
            decisions = (*decisions, *decide_replication(program.trained))
            lock = make_lock(
                program,
                session.data_facts,
                experiment=experiment,
                trained_parameters=parts.trained_parameters,
                provenance=provenance,
                decisions=decisions,
            )
            if session.step == 0 and isinstance(parts.loop, ChecksStart):
                parts.loop.check_start()
            weights = ObjectiveWeights.open(program) if session.has_new_state else None
            lock |= {"run": session.run_id, SAVED: was_saved(session, restart=restart)}
            self._write(session, lock, config_text, assets, decisions)
            program.kernel_notes.listener = functools.partial(record_decision, session)
            session.events.notify("restored", session)
            session.start_phase("compile")
            if session.state is None:
                session.state = _initialize_state(session)
            if weights:
                session.state = weights.load(session.state)
            self._run_loop(parts.loop, session)
            session.finish()
        return Result(run_dir.path, session.step, dict(session.metrics), session.stop_signal, run_dir.uri)

    def _open(
        self, program: Program, run_dir: RunDir, closing: ExitStack, experiment: str
    ) -> tuple[Session, OpenParts]:
        """Build the parts, claim the checkpoints and register the listeners. Write nothing."""
        cfg, start_time = self.config, time.monotonic()
        parts = cfg.open_parts(program.trained, closing)
        checkpointer: Any = cfg.checkpointer.build(directory=run_dir.checkpoints)
        session = Session(
            program=program,
            max_steps=cfg.max_steps,
            log_every_steps=cfg.log_every_steps,
            seed=cfg.seed,
            input=parts.input,
            batches=parts.batches,
            evaluators=parts.evaluators,
            checkpointer=checkpointer,
            run_dir=run_dir,
            lock=Run(run_dir.uri or run_dir.path).lock if run_dir.resumes else {},
            peak_flops=peak_flops(program),
            data_facts=parts.facts,
            loop=parts.loop,
            closing=closing,
            start_time=start_time,
        )
        listeners: list[tuple[RunListener, Entry | None]] = []
        with _raise_on_all_processes():
            claim_checkpoints(session)
            listeners = plugin_listeners(session)
            check_job(session, (listener for listener, _ in listeners))
        with _raise_on_all_processes():
            for listener, plugin in listeners:
                if listener.position != "last":
                    self._listen(session, listener, closing, plugin)
        closing.callback(checkpointer.close)
        for listener in self._listeners(program, run_dir, experiment, parts.trained_parameters):
            self._listen(session, listener, closing)
        for listener, plugin in listeners:
            if listener.position == "last":
                self._listen(session, listener, closing, plugin)
        if isinstance(checkpointer, ReportsSaves):
            checkpointer.on_result = session.events.notify_saved
        session.start_phase("restore")
        return session, parts

    @staticmethod
    def _listen(session: Session, listener: RunListener, closing: ExitStack, plugin: Entry | None = None) -> None:
        closing.push(functools.partial(_close, name_failures(listener.closed, plugin)))
        session.events.add(listener, plugin)
        name_failures(listener.opened, plugin)(session)

    def _listeners(
        self, program: Program, run_dir: RunDir, experiment: str, trained_parameters: int
    ) -> Iterator[RunListener]:
        """Yield the listeners that the config defines."""
        cfg = self.config
        if cfg.watchdog:
            yield watchdog_listener(cfg.watchdog.build(run_dir=run_dir.path))
        info = {
            "experiment": experiment,
            "parameters": program.functional.num_parameters,
            "trained_parameters": trained_parameters,
            "devices": program.layout.mesh.size,
            "max_steps": cfg.max_steps,
        }
        for tracker in cfg.trackers if jax.process_index() == 0 else ():
            yield TrackerListener(functools.partial(tracker.build, run_dir=run_dir.path), info)
        if cfg.profiler:
            yield ProfilerListener(functools.partial(cfg.profiler.build, run_dir=run_dir.path))

    @staticmethod
    def _write(
        session: Session,
        lock: dict[str, Any],
        config_text: str,
        assets: Mapping[str, bytes],
        decisions: Sequence[Decision],
    ) -> None:
        """Log decisions and drift, and write the run directory."""
        run_dir, old = session.run_dir, session.lock
        for decision in decisions:
            log_message(str(decision))
        for note in (*run_dir.notes, *(lock_drift(old, lock) if old else ())):
            log_message(f"note: {note}")
        if jax.process_index() == 0 or run_dir.uri:  # each machine has its own working copy
            # Keep other keys of the old lock, such as the source of a derived run, only if the state was restored.
            earlier = (
                old if session.state is not None else {k: old[k] for k in ("kernels", "hlo_fingerprint") if k in old}
            )
            run_dir.write(config_text, {**earlier, **lock}, assets)
        if jax.process_index() == 0:
            config: Any = session.program.config
            if (uri := checkpoint_uri(config)) is not None:
                write_assets(open_storage(uri), assets)  # for use without the run directory
        session.checkpointer.files = {
            "config.yaml": config_text,
            "run.lock.json": (run_dir.path / "run.lock.json").read_text,
        }

    @staticmethod
    def _run_loop(loop: Loop, session: Session) -> None:
        try:
            loop.run(session)
            session.raise_failure()
        except RequestError as error:  # such as damaged data: the request itself was valid
            if session.step == session.start_step:
                raise
            raise WorkError(f"after step {session.step}: {error}") from error

    def _restore(self, session: Session, target_step: int | None, *, restart: bool) -> None:
        """Restore the state, step and data position from a checkpoint. Do nothing if the run has no checkpoint.

        The data position is valid only for the checkpoint's own data, so different data is refused.
        """
        program, checkpointer, run_dir = session.program, session.checkpointer, session.run_dir
        if restart:
            if isinstance(checkpointer, OwnsCheckpoints):
                checkpointer.restart()
            return
        if target_step is None and isinstance(checkpointer, KeepsLocalTier):
            newest = checkpointer.restore_newest(program.state)
            if newest is None:
                return
            state, extra, step = newest
        else:
            step = checkpointer.latest_step() if target_step is None else target_step
            if step is None:
                return
            if step not in checkpointer.steps():
                steps = ", ".join(map(str, checkpointer.steps())) or "none"
                raise RequestError(f"there is no checkpoint of step {step}\n    checkpoints: {steps}")
            state, extra = checkpointer.restore(step, program.state)
        if "data" in extra:  # absent if the run was derived from an external model
            before = extra.get("facts") or session.lock.get("data") or {}
            for note in check_facts(run_dir.path, before, session.data_facts, allow_drift=run_dir.allow_drift):
                log_message(f"note: {note}")
            session.batches.set_state(extra["data"])
        session.restore_loop(extra)
        session.set_start_step(step)
        session.state, session.has_new_state = state, bool(extra.get(WEIGHTS_ONLY))
        if session.has_new_state:
            log_message(f"starting from the weights at step {step} with a new optimizer state")
            session.state = program.begin(self.config.seed, state)
        else:
            log_message(f"resuming from the checkpoint of step {step}")


@contextlib.contextmanager
def _raise_on_all_processes() -> Iterator[None]:
    """Raise on every process if the block raises an `AxlearnError` on any process."""
    refusal: AxlearnError | None = None
    try:
        yield
    except AxlearnError as error:
        refusal = error
    agree(refusal, refusal and refusal.__cause__, "the run was refused")


def _close(closed: Callable[..., None], kind: object, error: BaseException | None, _: object) -> None:
    """Close a listener. If the run is already ending with an error, log the listener's error instead of raising it."""
    try:
        closed()
    except Exception as failure:
        if error is None:
            raise
        log_message(f"warning: {failure}", from_all=True)


def record_decision(session: Session, decision: Decision) -> None:
    """Log a decision that was made while compiling a function, and record it in the lock."""
    log_message(str(decision))
    if jax.process_index() == 0 or session.uri:
        session.run_dir.add_decision(decision)


def _initialize_state(session: Session) -> Any:
    """Initialize a new state. Compile the step in parallel with the initialization."""
    program = session.program
    batch = declared_batch(program.config) or _peek_batch(session)
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(program.init, session.seed)
        session.load_step(batch)
        program.compile("train", batch)
        return state.result()


def _peek_batch(session: Session) -> Mapping[str, jax.Array]:
    """Return the next batch of the input without advancing it."""
    start = session.batches.get_state()
    batch = session.program.put(next(session.batches))
    session.batches.set_state(start)
    return batch
