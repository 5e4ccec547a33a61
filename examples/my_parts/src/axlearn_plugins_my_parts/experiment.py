"""The `my-parts` experiment."""

from axlearn_core.extend import LinesTracker, LossEvaluator, Trainer
from axlearn_plugins_my_parts.checkpointer import MsgpackCheckpointer
from axlearn_plugins_my_parts.data import CopyTask
from axlearn_plugins_my_parts.evaluator import ParameterNorms
from axlearn_plugins_my_parts.learner import SignLearner
from axlearn_plugins_my_parts.loop import StopAtLoss
from axlearn_plugins_my_parts.model import Bigram
from axlearn_plugins_my_parts.process_group import RankFromEnvironment
from axlearn_plugins_my_parts.profiler import SlowestSteps
from axlearn_plugins_my_parts.tracker import CsvTracker
from axlearn_plugins_my_parts.watchdog import StackDump


def my_parts() -> Trainer.Config:
    """Return a bigram model that learns to repeat tokens.

    Every slot of the trainer has a component of this package.
    """
    return Trainer.Config(
        model=Bigram.Config(vocab_size=16),
        learner=SignLearner.Config(learning_rate=0.05),
        input=CopyTask.Config(batch_size=64, copied=1),
        evaluators={"eval": LossEvaluator.Config(), "norm": ParameterNorms.Config()},
        checkpointer=MsgpackCheckpointer.Config(),
        distributed=RankFromEnvironment.Config(),
        trackers=(LinesTracker.Config(), CsvTracker.Config()),
        loop=StopAtLoss.Config(loss=1.0),
        profiler=SlowestSteps.Config(),
        watchdog=StackDump.Config(),
        max_steps=200,
    )
