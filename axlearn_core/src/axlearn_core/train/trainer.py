"""The root of every experiment, and how its parts become a running job."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint import OrbaxCheckpointer
from axlearn_core.checkpoint.orbax import WEIGHTS_ONLY
from axlearn_core.compose import Function, Functional, ModelAndObjective, Program, compose
from axlearn_core.compose.objective import replicated
from axlearn_core.config import REQUIRED, Configurable, Node, check, node, setting
from axlearn_core.contracts.capabilities import KeepsLocalTier, OwnsCheckpoints, ReportsSaves, vocabulary_size
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
from axlearn_core.errors import MissingFileError, RequestError, WorkError
from axlearn_core.learn import Learner
from axlearn_core.nn.held import check_stateless
from axlearn_core.plugins.decisions import Decision
from axlearn_core.train.data_facts import check_facts, plain_facts
from axlearn_core.train.distributed import Distributed
from axlearn_core.train.evaluators import Evaluator, LossEvaluator
from axlearn_core.train.lock import make_lock, peak_flops
from axlearn_core.train.loop import Loop, TrainLoop
from axlearn_core.train.mirror import RunMirror
from axlearn_core.train.objective import FrozenWeights
from axlearn_core.train.ownership import SAVED, check_metrics, hold_run
from axlearn_core.train.phases import PhaseClock
from axlearn_core.train.run_dir import RunDir, lock_drift
from axlearn_core.train.session import Session, say
from axlearn_core.train.step import TrainingFunctions
from axlearn_core.train.trackers import JsonlTracker, LinesTracker


@attrs.frozen
class Result:
    """What a run came to.

    Attributes:
        step: how many steps the state has seen.
        metrics: the latest loss and evaluation results.
        stop_signal: the signal that ended it early, or None.
        uri: of the run, where it is kept in a storage; `run_dir` is a working copy then.
    """

    run_dir: Path
    step: int
    metrics: Mapping[str, float]
    stop_signal: int | None = None
    uri: str | None = None

    @property
    def name(self) -> str:
        """What other commands take: the URI or the directory."""
        return self.uri or str(self.run_dir)


class Trainer(Configurable):
    """Trains a model. Every field is a part that another component can replace."""

    @node
    class Config(Configurable.Config["Trainer"]):
        """The root config: paths such as `model.decoder.num_layers` start here.

        What is marked as execution measures the run, keeps it or lays it out: no update depends on it. Schedules take
        their horizon from `max_steps`, so that another one is another computation; a run may still be extended.
        """

        model: Node[Model] = REQUIRED
        # None: the model's own loss.
        objective: Node[Objective] | None = setting(default=None, hide_default=True)
        learner: Node[LearnerProtocol] = Learner.Config()
        input: Node[Input] = REQUIRED
        evaluators: Mapping[str, Node[Evaluator]] = setting(default={"eval": LossEvaluator.Config()}, kind="execution")
        checkpointer: Node[Checkpointer] = setting(default=OrbaxCheckpointer.Config(), kind="execution")
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
        seed: int = setting(default=0, ge=0, le=2**63 - 1)

        def functions(self, functional: Functional) -> Mapping[str, Function]:
            """The pure functions of this experiment by name; see `axlearn_core.compose`."""
            trained = ModelAndObjective.of(self, functional)
            learner = check_stateless(self.learner.build(max_steps=self.max_steps, axes=trained.axes), "learner")
            return TrainingFunctions(functional, learner, trained).declare()

        def build_input(self, own: Node[Input], vocab_size: int | None) -> Input:
            """An input for this process."""
            tokens = {} if vocab_size is None else {"vocab_size": vocab_size}
            source = own.build(
                seed=self.seed,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
                **tokens,
            )
            return check_stateless(source, "input")

    def __init__(self, cfg: Config):
        self.config = check(cfg)

    def run(
        self,
        run_dir: RunDir,
        *,
        experiment: str = "",
        config_text: str = "",
        provenance: Mapping[str, Any] | None = None,
        restore_step: int | None = None,
        restart: bool = False,
        machine: Machine | None = None,
        decisions: Sequence[Decision] = (),
    ) -> Result:
        """Trains to `max_steps` in a run directory that was checked, from its newest checkpoint where it has one.

        Everything is built, and the checkpoint verified, before anything is written.

        Args:
            run_dir: from `RunDir.check`.
            experiment: a name for people.
            config_text: the resolved config as YAML, to be kept in the directory.
            provenance: path -> who set it, for the lock.
            restore_step: a step to go back to; the default is the newest.
            restart: begin at step 0 whatever is there; it is set aside.
            machine: what it has to run on; None is what JAX finds.
            decisions: what was decided for the user, to be shown and kept in the lock.
        """
        cfg, clock = self.config, PhaseClock()
        cfg.distributed.build().initialize()
        program = compose(cfg, machine=machine)
        decisions = (*decisions, *replicated(program.trained))
        vocab_size = vocabulary_size(program.functional.describe())
        with ExitStack() as closing:
            source = cfg.build_input(cfg.input, vocab_size)
            batches = source.train()
            closing.callback(batches.close)
            offered = {"input": source, "build_input": lambda own: cfg.build_input(own, vocab_size)}
            evaluators = {name: e.build(name=name, **offered) for name, e in cfg.evaluators.items()}
            for name, evaluator in evaluators.items():
                check_stateless(evaluator, f"evaluators.{name}")
            loop = check_stateless(cfg.loop.build(**offered), "loop")
            checkpointer = cfg.checkpointer.build(directory=run_dir.checkpoints)
            mirror = RunMirror(run_dir.uri, run_dir.path) if run_dir.uri else None
            old = _read_lock(run_dir, mirror)
            run_id, check_held = hold_run(run_dir, checkpointer, old, closing)
            if mirror and jax.process_index() == 0:
                mirror.fetch()
                closing.callback(mirror.push)
            closing.callback(checkpointer.close)
            _record_saves(checkpointer, clock)
            watchdog = cfg.watchdog.build(run_dir=run_dir.path) if cfg.watchdog else None
            if watchdog:
                closing.callback(watchdog.close)
                watchdog.start()
                watchdog.beat("restore", 0)
            clock.begin("restore")
            facts = plain_facts(source.describe())
            state, step, begins = self._restore(
                program, checkpointer, batches, restore_step, restart=restart, facts=facts, old=old, run_dir=run_dir
            )
            if state is None and not restart:
                check_metrics(run_dir, old)
            frozen = FrozenWeights.of(program) if begins else None
            lock = make_lock(program, facts, experiment=experiment, provenance=provenance, decisions=decisions)
            lock |= {"run": run_id, SAVED: step > 0 or (old.get(SAVED, False) and not restart)}
            drift = lock_drift(old, lock) if old else []
            for decision in decisions:
                say(str(decision))
            for note in (*run_dir.notes, *drift):
                say(f"note: {note}")
            if jax.process_index() == 0 or mirror:  # machines do not share a working copy
                run_dir.write(config_text, {k: old[k] for k in ("kernels", "hlo_fingerprint") if k in old} | lock)
            if jax.process_index() == 0:
                clock.open(run_dir.path, step)
            checkpointer.files = {
                "config.yaml": config_text,
                "run.lock.json": (run_dir.path / "run.lock.json").read_text,
            }
            trackers = [t.build(run_dir=run_dir.path) for t in cfg.trackers] if jax.process_index() == 0 else []
            for tracker in trackers:
                closing.callback(tracker.close)
                tracker.start(
                    {
                        "experiment": experiment,
                        "parameters": program.functional.num_parameters,
                        "devices": program.layout.mesh.size,
                        "max_steps": cfg.max_steps,
                        "start_step": step,
                        "run_dir": str(run_dir.path),
                    }
                )
            profiler = cfg.profiler.build(run_dir=run_dir.path) if cfg.profiler else None
            if profiler:
                closing.callback(profiler.close)
            if watchdog:
                watchdog.beat("compile", step)
            clock.begin("compile", step=step)

            def on_save() -> None:
                check_held()
                if not lock[SAVED] and jax.process_index() == 0 and checkpointer.latest_step() is not None:
                    lock[SAVED] = True
                    run_dir.write_fact(SAVED, True)
                if mirror and jax.process_index() == 0:
                    mirror.push()

            state = _ready(program, batches, cfg.seed) if state is None else state
            session = Session(
                program=program,
                state=frozen.load(state) if frozen else state,
                step=step,
                max_steps=cfg.max_steps,
                log_every_steps=cfg.log_every_steps,
                seed=cfg.seed,
                input=source,
                batches=batches,
                evaluators=evaluators,
                checkpointer=checkpointer,
                trackers=trackers,
                run_dir=run_dir.path,
                peak_flops=peak_flops(program),
                on_compiled=lambda s, batch: self._compiled(s, batch, run_dir),
                on_save=on_save,
                profiler=profiler,
                watchdog=watchdog,
                clock=clock,
                facts=facts,
            )
            closing.callback(lambda: clock.write("end", session.step))
            self._run_loop(loop, session)
            session.beat("save")
            checkpointer.wait()
            on_save()
        return Result(run_dir.path, session.step, dict(session.metrics), session.stop_signal, run_dir.uri)

    @staticmethod
    def _run_loop(loop: Loop, session: Session) -> None:
        try:
            loop.run(session)
        except RequestError as error:  # such as data that went bad: not the request's fault any more
            if session.step == session.start_step:
                raise
            raise WorkError(f"after step {session.step}: {error}") from error

    def _restore(
        self,
        program: Program,
        checkpointer: Any,
        batches: Any,
        wanted: int | None,
        *,
        restart: bool,
        facts: Mapping[str, Any],
        old: Mapping[str, Any],
        run_dir: RunDir,
    ) -> tuple[Any, int, bool]:
        """(state, step, whether the objective begins here) of a checkpoint; no state where there is none.

        The position in the data is one in the data that the checkpoint was written with: other data is refused.
        """
        if restart:
            if isinstance(checkpointer, OwnsCheckpoints):
                checkpointer.restart()
            return None, 0, True
        if wanted is None and isinstance(checkpointer, KeepsLocalTier):
            newest = checkpointer.restore_newest(program.state)
            if newest is None:
                return None, 0, True
            state, extra, step = newest
        else:
            step = checkpointer.latest_step() if wanted is None else wanted
            if step is None:
                return None, 0, True
            if step not in checkpointer.steps():
                known = ", ".join(map(str, checkpointer.steps())) or "none"
                raise RequestError(f"there is no checkpoint of step {step}\n    checkpoints: {known}")
            state, extra = checkpointer.restore(step, program.state)
        if "data" in extra:  # not where the run was made of a model from elsewhere
            before = extra.get("facts") or old.get("data") or {}
            for note in check_facts(run_dir.path, before, facts, allow_drift=run_dir.allow_drift):
                say(f"note: {note}")
            batches.set_state(extra["data"])
        if extra.get(WEIGHTS_ONLY):
            say(f"starting from the weights of step {step}: the optimizer's state is new")
            return program.begin(self.config.seed, state), step, True
        say(f"continuing from the checkpoint of step {step}")
        return state, step, False

    @staticmethod
    def _compiled(session: Session, batch: Mapping[str, Any], run_dir: RunDir) -> None:
        if jax.process_index() != 0:
            return
        kernels = [str(c) for c in session.program.choices("train")]
        run_dir.write_fact("kernels", kernels)
        before, now = run_dir.read_lock().get("hlo_fingerprint"), session.program.fingerprint(batch)
        if before and before != now:
            say(
                f"note: the compiled step is another one than before ({before} -> {now}); losses may differ in the last bits"
            )
        run_dir.write_fact("hlo_fingerprint", now)


def _record_saves(checkpointer: Any, clock: PhaseClock) -> None:
    if isinstance(checkpointer, ReportsSaves):
        checkpointer.on_result = clock.checkpoint


def _read_lock(run_dir: RunDir, mirror: RunMirror | None) -> dict[str, Any]:
    """The lock of a run that is continued; empty for a new one."""
    if not run_dir.resumes:
        return {}
    if mirror is None:
        return run_dir.read_lock()
    try:
        return json.loads(mirror.read("run.lock.json"))
    except (MissingFileError, ValueError):
        return {}


def _ready(program: Program, batches: BatchIterator, seed: int) -> Any:
    """A fresh state; while its initialisation compiles, so does the step."""
    start = batches.get_state()
    batch = program.put(next(batches))
    batches.set_state(start)
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(program.init, seed)
        program.compile("train", batch)
        return state.result()
