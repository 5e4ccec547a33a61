"""The `chat-task` component: the examples of another task as conversations."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from axlearn_core.config import REQUIRED, Configurable, Node, node
from axlearn_core.errors import Problem
from axlearn_plugins_rl.rollout_contracts import Example, ScoresAnswers, Split, Task
from axlearn_plugins_rl.tasks.generated_task import LazyExamples

MARK = "{prompt}"


class ChatTask(Configurable):
    """The examples of another task as messages, for models with a chat template.

    A prompt that is a text becomes a message of the user. A prompt that is a conversation gets the system message, unless it has
    one.

    Args:
        cfg: Config of the task.
        offered: Arguments for the other task, such as the seed.
    """

    @node
    class Config(Configurable.Config["ChatTask"]):
        """The messages around a prompt.

        Attributes:
            base: The task with the examples.
            system: Text of the system message. None adds no message.
            user: Text of the user's message. `{prompt}` stands for the prompt.
        """

        wraps: ClassVar[tuple[str, ...]] = ("base",)

        base: Node[Task] = REQUIRED
        system: str | None = None
        user: str = MARK

        def validate(self) -> Iterable[Problem]:
            """Check that the message contains the prompt."""
            if MARK not in self.user:
                yield Problem(
                    path="user", message="does not contain the prompt", got=self.user, expected=f"text with {MARK}"
                )

    def __init__(self, cfg: Config, **offered: Any):
        self.config, self.base = cfg, cfg.base.build(**offered)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of the other task, with messages as prompts."""
        examples = self.base.examples(split)
        return LazyExamples(lambda index: self._add_messages(examples[index]), np.arange(len(examples)))

    def describe(self) -> Mapping[str, Any]:
        """Return the facts of the other task and the texts of the messages."""
        return {**self.base.describe(), "system": self.config.system, "user": self.config.user}

    def _add_messages(self, example: Example) -> Example:
        messages: tuple[Mapping[str, Any], ...]
        if isinstance(example.prompt, str):
            messages = ({"role": "user", "content": self.config.user.replace(MARK, example.prompt)},)
        else:
            messages = example.prompt
        if self.config.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": self.config.system}, *messages)
        return attrs.evolve(example, prompt=messages)


def find_scorer(task: Task) -> ScoresAnswers | None:
    """Return the task itself or the task below a `ChatTask` if it scores answers, otherwise None."""
    if isinstance(task, ChatTask):
        return find_scorer(task.base)
    return task if isinstance(task, ScoresAnswers) else None
