"""The loop of reinforcement learning: roll out, score, and train."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from axlearn_core.compose import ModelWeights
from axlearn_core.compose.process_weights import ProcessWeights
from axlearn_core.config import REQUIRED, Configurable, Node, node, setting
from axlearn_core.contracts.capabilities import ChecksStart, KeepsState
from axlearn_core.errors import RequestError
from axlearn_core.run.notices import log_message
from axlearn_core.train.loop import Loop, TrainLoop
from axlearn_core.train.session import Session
from axlearn_plugins_rl.engine_policy import EnginePolicy, is_parity, open_policy
from axlearn_plugins_rl.host_clock import HostClock, frozen_heap
from axlearn_plugins_rl.policy_gradient.critic_model import check_critic
from axlearn_plugins_rl.rollout_batches import BatchFacts, Cursor, Result, RolloutBatches
from axlearn_plugins_rl.rollout_buffer import RolloutBuffer, merge_batches
from axlearn_plugins_rl.rollout_contracts import Advantage, Buffer, Group, Reward, RolloutSource, WeightSync
from axlearn_plugins_rl.rollout_exchange import RolloutExchange
from axlearn_plugins_rl.rollout_jobs import collect_groups
from axlearn_plugins_rl.rollout_log import RolloutLog, WriteDuringStep
from axlearn_plugins_rl.rollout_rows import build_rows
from axlearn_plugins_rl.rollout_worker import RESOURCE, RolloutWorker
from axlearn_plugins_rl.single_turn import SingleTurn
from axlearn_plugins_rl.task_input import ExampleStream, TaskInput
from axlearn_plugins_rl.weight_sync import InProcessSync
from axlearn_plugins_transformer.batch_invariant import with_invariant_kernels
from axlearn_plugins_transformer.text.processor import text_processor


class RLLoop(Configurable):
    """Trains on rollouts. The inner loop does everything else: it trains, logs, evaluates and saves.

    Before a step, the loop rolls out a batch of examples with the weights of the training state, scores the rollouts, and computes
    their advantages. With `buffer.ahead`, the rollouts of the next steps run at the same time as the step.

    In a job with several processes, each process has an engine on its own devices, and rolls out its share of the examples.
    """

    @node
    class Config(Configurable.Config["RLLoop"]):
        """The parts of the loop.

        Attributes:
            policy: The engine that samples, and its sampling parameters.
            source: Turns examples into rollouts.
            reward: Scores the rollouts.
            advantage: Computes the advantages of tokens from the scores.
            buffer: Holds batches until their step, and limits the age of their weights.
            sync: Brings the weights of the training state to the engine.
            dead_groups: What to do with a group of equal rewards. `keep` trains on it, `drop` gives its tokens the weight 0, and
                `resample` rolls out more examples in its place (dynamic sampling; Yu et al., 2025, arXiv 2503.14476).
            resample_rounds: Maximum number of times to roll out more examples for a batch. Dead groups fill the rest of it.
            log: Writes the rollouts to files in the run directory.
            loop: Loop that trains.
        """

        wraps: ClassVar[tuple[str, ...]] = ("loop",)

        policy: EnginePolicy.Config = EnginePolicy.Config()
        source: Node[RolloutSource] = SingleTurn.Config()
        reward: Node[Reward] = REQUIRED
        advantage: Node[Advantage] = REQUIRED
        buffer: Node[Buffer] = RolloutBuffer.Config()
        sync: Node[WeightSync] = setting(default=InProcessSync.Config(), kind="execution")
        dead_groups: Literal["keep", "drop", "resample"] = "keep"
        resample_rounds: int = setting(default=3, ge=1, le=100)
        log: RolloutLog.Config = setting(default=RolloutLog.Config(), kind="execution")
        loop: Node[Loop] = TrainLoop.Config()

    def __init__(self, cfg: Config, *, input: Any = None, build_input: Any = None):
        if not isinstance(input, TaskInput):
            raise RequestError(
                f"loop needs the examples of a task\n    got: input is a {type(input).__name__}\n"
                "    expected: a task-input\n    fix: use the feature grpo, or set input to a task-input"
            )
        self.cfg, self.input, self.share = cfg, input, input.share
        self.source, self.buffer, self.advantage = cfg.source.build(), cfg.buffer.build(), cfg.advantage.build()
        self.reward = cfg.reward.build(task=input.task)
        self.log = cfg.log.build()
        self.loop = cfg.loop.build(input=input, build_input=build_input)
        self._batches: RolloutBatches | None = None
        self._restored: Any = None
        self._restored_batches: dict[int, list[Group]] = {}

    def check_start(self) -> None:
        """See `axlearn_core.contracts.capabilities.ChecksStart`."""
        if isinstance(self.loop, ChecksStart):
            self.loop.check_start()

    def get_state(self) -> Any:
        """Return the batches that are rolled out but not trained on. See `axlearn_core.contracts.capabilities.KeepsState`."""
        if self._batches is None:
            return self._restored
        self._batches.finish_rollouts()
        buffer = self.buffer.get_state()
        return {
            **({"buffer": buffer} if self.share.count == 1 else {"buffers": {str(self.share.index): buffer}}),
            "facts": {str(number): attrs.asdict(facts) for number, facts in self._batches.facts.items()},
            "advantage": self.advantage.get_state() if isinstance(self.advantage, KeepsState) else None,
            "loop": self.loop.get_state() if isinstance(self.loop, KeepsState) else None,
        }

    def set_state(self, state: Any) -> None:
        """Restore the state that `get_state` returned."""
        self._restored = state
        self._restore_buffer(state["buffers"] if "buffers" in state else {"0": state["buffer"]})
        if isinstance(self.advantage, KeepsState) and state["advantage"] is not None:
            self.advantage.set_state(state["advantage"])
        if isinstance(self.loop, KeepsState) and state["loop"] is not None:
            self.loop.set_state(state["loop"])

    def _restore_buffer(self, states: Mapping[str, Any]) -> None:
        """Restore the share of this process from the buffers of all processes that saved."""
        saved = [states[str(index)] for index in range(len(states))]
        if len(saved) == self.share.count == 1:
            self.buffer.set_state(saved[0])
            return
        self._restored_batches = merge_batches(self.cfg.buffer, saved)
        if len(saved) == self.share.count:
            self.buffer.set_state(saved[self.share.index])
            return
        change = f"from {len(saved)} to {self.share.count}"
        log_message(f"note: the number of processes changed {change}, so the batches in the checkpoint are split again")
        for number, groups in self._restored_batches.items():
            self.buffer.put(number, groups[self.share.select(len(groups))])

    def run(self, session: Session) -> None:
        """See `axlearn_core.train.loop.Loop`."""
        check_critic(session.program, self.input.tokenizer, is_new=session.start_step == 0)
        exchange, local = RolloutExchange(self.share), ProcessWeights(session.program)
        weights = local.fetch(session.program.weights(session.state))
        with exchange.together("opening the engine"):
            open_worker = functools.partial(self._open_worker, session, local, weights, exchange)
            worker = session.share(RESOURCE, open_worker)
            if self.share.index == 0:
                self.log.start(session.path, session.start_step)
        with exchange.together("opening the files of rollouts"):
            if self.share.index:  # process 0 has set files of an earlier run aside
                self.log.start(session.path, session.start_step, self.share.index)
        del weights, open_worker
        stream: Any = session.batches
        clock, files = HostClock(), WriteDuringStep(self.log)
        for listener in (clock, files):
            session.events.add(listener)
        self._batches = batches = RolloutBatches(
            session,
            worker=worker,
            buffer=self.buffer,
            roll_out=functools.partial(self._roll_out, worker, stream),
            weights=self._weights_for_rollouts(session, local),
            build_rows=functools.partial(self._build_rows, exchange, files),
            position=stream.get_state()["position"],
            exchange=exchange,
            clock=clock,
        )
        if self._restored:
            batches.facts = {int(number): BatchFacts(**facts) for number, facts in self._restored["facts"].items()}
            batches.whole = {**self._restored_batches}
        session.batches = batches
        try:
            with frozen_heap():
                self.loop.run(session)
            with exchange.together("the files of the last rollouts"):
                files.check()
        finally:
            batches.close()

    def _open_worker(
        self, session: Session, local: ProcessWeights, weights: ModelWeights, exchange: RolloutExchange
    ) -> RolloutWorker:
        """Build the engine of this process and the thread of its rollouts."""
        program = session.program
        text = text_processor(program.config, self.input.tokenizer)
        assert text is not None
        policy = open_policy(
            self.cfg.policy,
            model=program.config.model,
            program=local.program,
            weights=weights,
            text=text,
            max_context=self.input.config.sequence_length + 1,
            examples=self.share.counts(self.input.config.batch_size)[self.share.index],
            group_size=self.input.config.group_size,
        )
        width, limits, top_k = self.input.config.kept_tokens, self.cfg.policy.limits, self.cfg.policy.top_k
        if width and (top_k is None or top_k > width):
            raise RequestError(
                "the step cannot replay the limits on the tokens to sample from\n"
                f"    got: loop.policy.top_k is {'not set' if top_k is None else top_k}\n"
                f"    expected: at most input.kept_tokens = {width}\n    fix: set top_k of the feature sampling-mask"
            )
        if limits and not width:
            log_message(
                f"note: rollouts sample with {limits}, which the training step does not know, so the ratios of the objective start "
                "below 1\n    fix: --with sampling-mask"
            )
        if is_parity(self.cfg.policy) and with_invariant_kernels(program.config.model) != program.config.model:
            log_message(
                "note: the engine computes in the mode parity, but the training step does not, so their log-probabilities differ "
                "in the last bits\n    fix: --with batch-invariant"
            )
        sync = self.cfg.sync.build(engine=policy.engine)
        return RolloutWorker(policy, sync, self.source, self.reward, fetch=local.fetch, exchange=exchange)

    def _weights_for_rollouts(self, session: Session, local: ProcessWeights) -> Callable[[Any], ModelWeights]:
        """Return the function from a training state to weights that stay valid until their rollouts have ended."""
        trained, runs_ahead = session.program.trained, self.buffer.admits(1, 0)

        def select(state: Any) -> ModelWeights:
            weights = trained.select_model_weights(ModelWeights(state.params, state.variables))
            return local.fetch(weights, copy=runs_ahead)  # a step donates the state

        return select

    async def _roll_out(
        self, worker: RolloutWorker, stream: ExampleStream, weights: Any, version: int, cursor: Cursor
    ) -> Result:
        """Make the share of a batch: load the weights, roll out and score."""
        start = time.perf_counter()
        worker.load(weights, version)
        loaded = time.perf_counter()
        stream.set_state({"position": cursor.position})
        size = self.input.config.batch_size
        live, dead = await self._fill(worker, stream)
        groups = [*live, *dead][: self.share.counts(size)[self.share.index]]
        seconds = time.perf_counter() - loaded
        tokens = sum(rollout.num_drawn for group in [*live, *dead] for rollout in group.rollouts)
        drawn, cursor.position = stream.get_state()["position"] - cursor.position, stream.get_state()["position"]
        scalars = {
            "rollout_seconds": seconds,
            "rollout_tokens_per_second": tokens / seconds,
            "weight_sync_seconds": loaded - start,
        }
        if self.cfg.dead_groups == "resample":
            scalars["resampled_groups"] = float(drawn - size)
        return groups, BatchFacts(version=version, end=cursor.position, scalars=scalars)

    async def _fill(self, worker: RolloutWorker, stream: ExampleStream) -> tuple[list[Group], list[Group]]:
        """Roll out the share of this process. Return groups to train on, and dead groups that may fill the batch.

        With `resample`, each process replaces its own dead groups, until none of the processes has any or the rounds end. All
        processes together draw the same examples as one process would.
        """
        missing = self.share.counts(self.input.config.batch_size)
        part = self.share.select_counts(missing)
        if self.cfg.dead_groups != "resample":
            return await self._collect(worker, stream, sum(missing), part), []
        live: list[Group] = []
        dead: list[Group] = []
        for round_number in range(1 + self.cfg.resample_rounds):
            count, failure = 0, None
            try:
                more, others = _split(await self._collect(worker, stream, sum(missing), part))
                live, dead, count = [*live, *more], [*dead, *others], len(more)
            except Exception as error:  # the other processes wait for the number
                failure = error
            work = f"round {round_number + 1} of the rollouts"
            counts = await worker.exchange.gather_from_rollouts(count, work, error=failure)
            missing = [size - count for size, count in zip(missing, counts, strict=True)]
            part = self.share.select_counts(missing)
            if not any(missing):
                break
        return live, dead

    async def _collect(self, worker: RolloutWorker, stream: ExampleStream, count: int, part: slice) -> list[Group]:
        """Roll out a part of the next examples."""
        return await collect_groups(
            stream.draw(count, part),
            policy=worker.policy,
            source=worker.source,
            reward=worker.reward,
            group_size=self.input.config.group_size,
            seed=self.input.seed,
        )

    def _build_rows(
        self,
        exchange: RolloutExchange,
        files: WriteDuringStep,
        number: int,
        groups: Sequence[Group],
        batch: Sequence[Group],
    ) -> dict[str, np.ndarray]:
        """Return the rows of the rollouts of this process."""
        with exchange.together(f"the batch of step {number + 1}"):
            files.check()
            files.hold(number + 1, groups)
            return build_rows(
                groups,
                self.advantage.compute(groups, batch),
                self.input.config,
                temperature=self.cfg.policy.temperature,
                drop_dead=self.cfg.dead_groups == "drop",
                processes=self.share.count,
            )


def _split(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups that are not dead, and the dead ones."""
    return [g for g in groups if not g.is_dead], [g for g in groups if g.is_dead]
