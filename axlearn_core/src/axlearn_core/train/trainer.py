"""The root of every experiment, and how its parts become a running job."""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import jax

from axlearn_core.checkpoint import ShardedCheckpointer, open_storage
from axlearn_core.checkpoint.base import WEIGHTS_ONLY
from axlearn_core.compose import Function, Functional, ModelAndObjective, Program, compose
from axlearn_core.compose.objective import replicated
from axlearn_core.config import REQUIRED, Configurable, Node, check, node, setting
from axlearn_core.contracts.capabilities import ChecksBeginning, KeepsLocalTier, OwnsCheckpoints, vocabulary_size
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
from axlearn_core.errors import RequestError, WorkError
from axlearn_core.learn import Learner
from axlearn_core.nn.held import check_stateless
from axlearn_core.plugins.decisions import Decision
from axlearn_core.run.asset_copies import write_assets
from axlearn_core.run.lock import make_lock, peak_flops
from axlearn_core.run.phases import PhaseClock
from axlearn_core.run.record import RunDir, lock_drift
from axlearn_core.train.compiled_step import CompiledStep
from axlearn_core.train.data_facts import check_facts, log_context, plain_facts
from axlearn_core.train.distributed import Distributed
from axlearn_core.train.evaluators import Evaluator, LossEvaluator
from axlearn_core.train.loop import Loop, TrainLoop
from axlearn_core.train.mirror import RunMirror, read_lock
from axlearn_core.train.objective import FrozenWeights
from axlearn_core.train.open_run import OnSave, OpenRun, record_decision, record_saves
from axlearn_core.train.ownership import SAVED, check_metrics, hold_run
from axlearn_core.train.peers import PeerWatch
from axlearn_core.train.same_job import check_same_config, check_same_data
from axlearn_core.train.session import Session, log_message
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
        # In the run directory, for the processes that continue it.
        keep_compiled_step: bool = setting(default=True, kind="execution", hide_default=True)
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
        assets: Mapping[str, bytes] = {},
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
            assets: path in the run -> content of the files that this config names.
            provenance: path -> who set it, for the lock.
            restore_step: a step to go back to; the default is the newest.
            restart: begin at step 0 and set existing checkpoints aside.
            machine: what it has to run on; None is what JAX finds.
            decisions: what was decided for the user, to be shown and kept in the lock.
        """
        self.config.distributed.build().initialize()
        check_same_config(self.config)
        program = compose(self.config, machine=machine)
        with ExitStack() as closing:
            peers = PeerWatch(run_dir.uri or str(run_dir.path))
            closing.callback(peers.close)  # after all else: closing the checkpointer may wait for one that is lost
            run = self._open(program, run_dir, closing)
            self._restore(run, restore_step, restart=restart)
            if run.state is None and not restart:
                check_metrics(run_dir, run.old_lock)
            decisions = (*decisions, *replicated(program.trained))
            lock = make_lock(program, run.facts, experiment=experiment, provenance=provenance, decisions=decisions)
            saved = run.step > 0 or (run.old_lock.get(SAVED, False) and not restart)
            if run.step == 0 and isinstance(run.loop, ChecksBeginning):
                run.loop.check_beginning()
            frozen = FrozenWeights.of(program) if run.begins else None
            self._write(run, lock | {"run": run.run_id, SAVED: saved}, config_text, assets, decisions)
            program.kernel_notes.listener = functools.partial(record_decision, run)
            on_save = OnSave(run, saved)
            session = self._start(run, frozen, experiment, on_save)
            closing.callback(lambda: run.clock.write("end", session.step))
            peers.start(lambda: session.kept_step)
            self._run_loop(run.loop, session)
            session.beat("save")
            run.checkpointer.wait()
            on_save()
        return Result(run_dir.path, session.step, dict(session.metrics), session.stop_signal, run_dir.uri)

    def _open(self, program: Program, run_dir: RunDir, closing: ExitStack) -> OpenRun:
        """Builds the parts and takes hold of the run; nothing is written."""
        cfg, clock = self.config, PhaseClock()
        vocab_size = vocabulary_size(program.functional.describe())
        source = cfg.build_input(cfg.input, vocab_size)
        batches = source.train()
        closing.callback(batches.close)
        facts = plain_facts(source.describe())
        log_context(cfg)
        check_same_data(facts)
        offered = {"input": source, "build_input": lambda own: cfg.build_input(own, vocab_size)}
        evaluators = {name: e.build(name=name, **offered) for name, e in cfg.evaluators.items()}
        for name, evaluator in evaluators.items():
            check_stateless(evaluator, f"evaluators.{name}")
        loop = check_stateless(cfg.loop.build(**offered), "loop")
        checkpointer: Any = cfg.checkpointer.build(directory=run_dir.checkpoints)
        mirror = RunMirror(run_dir.uri, run_dir.path) if run_dir.uri else None
        old_lock = read_lock(run_dir, mirror)
        run_id, check_held = hold_run(run_dir, checkpointer, old_lock, closing)
        if mirror and jax.process_index() == 0:
            mirror.fetch()
            closing.callback(mirror.push)
        closing.callback(checkpointer.close)
        record_saves(checkpointer, clock)
        watchdog = cfg.watchdog.build(run_dir=run_dir.path) if cfg.watchdog else None
        if watchdog:
            closing.callback(watchdog.close)
            watchdog.start()
            watchdog.beat("restore", 0)
        clock.begin("restore")
        return OpenRun(
            run_dir=run_dir,
            closing=closing,
            clock=clock,
            program=program,
            source=source,
            batches=batches,
            evaluators=evaluators,
            loop=loop,
            checkpointer=checkpointer,
            mirror=mirror,
            old_lock=old_lock,
            run_id=run_id,
            check_held=check_held,
            watchdog=watchdog,
            facts=facts,
        )

    @staticmethod
    def _write(
        run: OpenRun,
        lock: dict[str, Any],
        config_text: str,
        assets: Mapping[str, bytes],
        decisions: Sequence[Decision],
    ) -> None:
        """Logs what was decided and what changed, and writes the run directory."""
        run_dir, old = run.run_dir, run.old_lock
        for decision in decisions:
            log_message(str(decision))
        for note in (*run_dir.notes, *(lock_drift(old, lock) if old else ())):
            log_message(f"note: {note}")
        if jax.process_index() == 0 or run.mirror:  # machines do not share a working copy
            run_dir.write(config_text, {k: old[k] for k in ("kernels", "hlo_fingerprint") if k in old} | lock, assets)
        if jax.process_index() == 0:
            run.clock.open(run_dir.path, run.step)
            config: Any = run.program.config
            if (elsewhere := getattr(config.checkpointer, "uri", None)) is not None:
                write_assets(open_storage(elsewhere), assets)  # its checkpoints can be used without the run directory
        run.checkpointer.files = {
            "config.yaml": config_text,
            "run.lock.json": (run_dir.path / "run.lock.json").read_text,
        }

    def _start(
        self, run: OpenRun, frozen: FrozenWeights | None, experiment: str, on_save: Callable[[], None]
    ) -> Session:
        """Opens trackers and the profiler, compiles the step, and puts the state on the devices."""
        cfg, program, run_dir = self.config, run.program, run.run_dir
        trackers = [t.build(run_dir=run_dir.path) for t in cfg.trackers] if jax.process_index() == 0 else []
        for tracker in trackers:
            run.closing.callback(tracker.close)
            tracker.start(
                {
                    "experiment": experiment,
                    "parameters": program.functional.num_parameters,
                    "devices": program.layout.mesh.size,
                    "max_steps": cfg.max_steps,
                    "start_step": run.step,
                    "run_dir": str(run_dir.path),
                }
            )
        profiler = cfg.profiler.build(run_dir=run_dir.path) if cfg.profiler else None
        if profiler:
            run.closing.callback(profiler.close)
        if run.watchdog:
            run.watchdog.beat("compile", run.step)
        run.clock.begin("compile", step=run.step)
        compiled_step = CompiledStep(run_dir.path, program) if cfg.keep_compiled_step and not run.mirror else None
        if compiled_step:
            run.closing.callback(compiled_step.close)
        state = _ready(program, run.batches, cfg.seed, compiled_step) if run.state is None else run.state
        return Session(
            program=program,
            state=frozen.load(state) if frozen else state,
            step=run.step,
            max_steps=cfg.max_steps,
            log_every_steps=cfg.log_every_steps,
            seed=cfg.seed,
            input=run.source,
            batches=run.batches,
            evaluators=run.evaluators,
            checkpointer=run.checkpointer,
            trackers=trackers,
            run_dir=run_dir.path,
            peak_flops=peak_flops(program),
            on_compiled=lambda s, batch: self._record_compilation(s, batch, run_dir),
            on_save=on_save,
            compiled_step=compiled_step,
            profiler=profiler,
            watchdog=run.watchdog,
            clock=run.clock,
            facts=run.facts,
        )

    @staticmethod
    def _run_loop(loop: Loop, session: Session) -> None:
        try:
            loop.run(session)
            session.raise_input_failure()
        except RequestError as error:  # such as data that went bad: not the request's fault any more
            if session.step == session.start_step:
                raise
            raise WorkError(f"after step {session.step}: {error}") from error

    def _restore(self, run: OpenRun, target_step: int | None, *, restart: bool) -> None:
        """Fills in the state and step of a checkpoint; leaves them as they are where there is none.

        The position in the data is one in the data that the checkpoint was written with: other data is refused.
        """
        program, checkpointer, run_dir = run.program, run.checkpointer, run.run_dir
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
        if "data" in extra:  # not where the run was made of a model from elsewhere
            before = extra.get("facts") or run.old_lock.get("data") or {}
            for note in check_facts(run_dir.path, before, run.facts, allow_drift=run_dir.allow_drift):
                log_message(f"note: {note}")
            run.batches.set_state(extra["data"])
        run.state, run.step, run.begins = state, step, bool(extra.get(WEIGHTS_ONLY))
        if run.begins:
            log_message(f"starting from the weights of step {step}: the optimizer's state is new")
            run.state = program.begin(self.config.seed, state)
        else:
            log_message(f"continuing from the checkpoint of step {step}")

    @staticmethod
    def _record_compilation(session: Session, batch: Mapping[str, Any], run_dir: RunDir) -> None:
        if jax.process_index() != 0:
            return
        step = session.compiled_step
        facts = dict(step.facts) if step else {}
        if not facts:
            kernels = [str(c) for c in session.program.choices("train")]
            facts = {"kernels": kernels, "fingerprint": session.program.fingerprint(batch)}
            if step:
                step.write(batch, {**facts, "flops": session.flops_per_step})
        run_dir.write_fact("kernels", facts["kernels"])
        before, now = run_dir.read_lock().get("hlo_fingerprint"), facts["fingerprint"]
        if before and before != now:
            log_message(f"note: the compiled step changed ({before} -> {now}); losses may differ in the last bits")
        run_dir.write_fact("hlo_fingerprint", now)


def _ready(program: Program, batches: BatchIterator, seed: int, compiled_step: CompiledStep | None) -> Any:
    """A fresh state; while its initialisation compiles, so does the step."""
    start = batches.get_state()
    batch = program.put(next(batches))
    batches.set_state(start)
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(program.init, seed)
        if compiled_step:
            compiled_step.load(batch)
        program.compile("train", batch)
        return state.result()
