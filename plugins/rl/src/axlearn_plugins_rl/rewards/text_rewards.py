"""The rewards `exact` and `format`, which read the text of the answer."""

import re
import unicodedata
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from axlearn_core.config import node
from axlearn_core.errors import Problem
from axlearn_plugins_rl.patterns import ANSWER, extract_answer, pattern_problems
from axlearn_plugins_rl.rewards.judged_reward import JudgedReward
from axlearn_plugins_rl.rollout_contracts import Example

_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+(\.\d*)?|\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,4})?")


class ExactReward(JudgedReward):
    """1 if the answer equals the reference answer, otherwise 0.

    The answer is what `pattern` extracts from the text, or the whole text if the pattern does not match. Texts are equal
    if they only differ in case, spaces, or the form of their characters (Unicode NFKC). Numbers are equal if their values
    are: `1,000.0` equals `1000`. If the reference is a list, the answer must equal one of its items.
    """

    @node
    class Config(JudgedReward.Config):
        """Settings to find and compare answers.

        Attributes:
            pattern: Regular expression that finds the answer in the text. The last match counts. If it has a group, the first
                group is the answer.
            normalize: Compare as described above. If False, the texts must be identical.
        """

        pattern: str = ANSWER
        normalize: bool = True

        def validate(self) -> Iterable[Problem]:
            """Check the pattern."""
            return pattern_problems("pattern", self.pattern)

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._pattern = re.compile(cfg.pattern)

    def judge(self, example: Example, text: str) -> float:
        """Return 1.0 or 0.0.

        Raises:
            ValueError: The example has no reference answer.
        """
        references = example.answer if isinstance(example.answer, list | tuple) else [example.answer]
        if not references or None in references:
            raise ValueError("the example has no reference answer")
        answer = extract_answer(self._pattern, text)
        if not self.config.normalize:
            return float(answer in map(str, references))
        return float(normalize_answer(answer) in map(normalize_answer, references))


def normalize_answer(answer: Any) -> str | Decimal:
    """Return a number as a decimal, and any other answer as text in lower case without differences in spaces."""
    text = " ".join(unicodedata.normalize("NFKC", str(answer)).split()).casefold()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else text


class FormatReward(JudgedReward):
    """1 if the whole text matches a regular expression, otherwise 0. Spaces around the text are ignored."""

    @node
    class Config(JudgedReward.Config):
        """The format.

        Attributes:
            pattern: Regular expression for the whole text. The default is any text that ends with an answer in tags:
                `<answer>42</answer>`.
        """

        pattern: str = rf"(?s:.*?){ANSWER.replace('(?s)', '')}"

        def validate(self) -> Iterable[Problem]:
            """Check the pattern."""
            return pattern_problems("pattern", self.pattern)

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._pattern = re.compile(cfg.pattern)

    def judge(self, example: Example, text: str) -> float:
        """Return 1.0 or 0.0."""
        return float(self._pattern.fullmatch(text.strip()) is not None)
