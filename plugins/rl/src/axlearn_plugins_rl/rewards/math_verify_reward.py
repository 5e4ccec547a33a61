"""The `math-verify` reward: the answer and the reference are equal as mathematical expressions."""

import importlib
import logging
from typing import Any

from axlearn_core.config import node
from axlearn_core.errors import RequestError
from axlearn_plugins_rl.rewards.judged_reward import JudgedReward
from axlearn_plugins_rl.rollout_contracts import Example


class MathVerifyReward(JudgedReward):
    """1 if the answer equals the reference answer as a mathematical expression, otherwise 0.

    The library Math-Verify reads the last expression of the text, in LaTeX or as plain text, and compares it with SymPy. Needs
    the extra `math-verify` of axlearn-plugins-rl.
    """

    @node
    class Config(JudgedReward.Config):
        """How to compare.

        Attributes:
            digits: Number of decimal digits that must agree.
        """

        digits: int = 6

    config: Config

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        try:
            self._library: Any = importlib.import_module("math_verify")
        except ImportError:
            raise RequestError(
                "the reward `math-verify` requires the package math-verify, which is not installed\n"
                "    fix: pip install 'axlearn-plugins-rl[math-verify]'"
            ) from None
        # The worker process limits the time. The library's own limits use signals, and it warns about each call without them.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def judge(self, example: Example, text: str) -> float:
        """Return 1.0 or 0.0.

        Raises:
            ValueError: The example has no reference answer, or it is not an expression.
        """
        if example.answer is None:
            raise ValueError("the example has no reference answer")
        answer = self._library.parse(text, parsing_timeout=None)
        reference = self._library.parse(f"${example.answer}$", parsing_timeout=None)
        if not reference:
            raise ValueError(f"the reference answer {example.answer!r} is not a mathematical expression")
        return float(self._library.verify(reference, answer, float_rounding=self.config.digits, timeout_seconds=None))
