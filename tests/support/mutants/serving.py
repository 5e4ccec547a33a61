"""Wrong caches, schedulers, drafters and parsers."""

import json
import random

import attrs
import jax.numpy as jnp

from axlearn_core.config import node
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.parsers.answer_formats import CallStart, Function, Text
from axlearn_plugins_serving.parsers.json_calls import Hermes
from axlearn_plugins_serving.parsers.think import Think
from axlearn_plugins_serving.scheduler import PriorityScheduler
from axlearn_plugins_serving.testing import DrafterSuite, ReasoningFormatSuite, SchedulerSuite, ToolFormatSuite
from axlearn_plugins_transformer.attention_variants.latent_cache import ContiguousLatentCache
from axlearn_plugins_transformer.attention_variants.testing import LatentCacheSuite
from axlearn_plugins_transformer.kv_cache import ContiguousCache
from axlearn_plugins_transformer.testing import KVCacheSuite
from support.mutants.harness import mutants, suite


class Cache(ContiguousCache):
    @node
    class Config(ContiguousCache.Config):
        wrong: str = ""

    def attend(self, cache, op, slots, kernel):
        wrong = self.cfg.wrong
        if wrong == "slots":
            slots = jnp.broadcast_to(slots[:1], slots.shape)
        result, new = super().attend(cache, op, slots, None if wrong == "kernel" else kernel)
        if wrong == "rounds":
            result = result.astype("bfloat16").astype("float32")
        return result, cache if wrong == "forgets" else new


class Latents(ContiguousLatentCache):
    @node
    class Config(ContiguousLatentCache.Config):
        wrong: str = ""

    def attend(self, cache, latents, slots, attention, kernel):
        wrong = self.cfg.wrong
        if wrong == "slots":
            slots = jnp.broadcast_to(slots[:1], slots.shape)
        if wrong == "rounds":
            latents = latents.astype("bfloat16").astype("float32")
        result, new = super().attend(cache, latents, slots, attention, None if wrong == "kernel" else kernel)
        return result, cache if wrong == "forgets" else new


def _caches(base, part):
    suites = {wrong: suite(base, part.Config(wrong=wrong)) for wrong in ("", "rounds", "slots", "kernel", "forgets")}
    wrong = {
        "rounds to bfloat16": (suites["rounds"], "test_chunks_are_the_whole"),
        "loses written entries": (suites["forgets"], "test_chunks_are_the_whole"),
        "writes all rows to one slot": (suites["slots"], "test_rows_may_be_at_different_slots"),
        "accepts any kernel": (suites["kernel"], "test_an_unknown_kernel_is_refused"),
    }
    return mutants(suites[""], wrong)


class Scheduler(PriorityScheduler):
    @node
    class Config(PriorityScheduler.Config):
        wrong: str = ""

    def __init__(self, cfg: Config, *, cache, limits):
        super().__init__(cfg, cache=cache, limits=limits)
        self.wrong = cfg.wrong

    def add(self, state):
        self.added = getattr(self, "added", 0) + 1
        if self.wrong != "forgets" or self.added % 7:
            super().add(state)

    def remove(self, state):
        if self.wrong == "leaks" and state.slot is not None:
            self._running.remove(state)
        else:
            super().remove(state)

    def plan(self, max_steps):
        plan = super().plan(max_steps)
        if self.wrong == "repeats":
            plan.parts = [attrs.evolve(part, start=max(0, part.start - 1)) for part in plan.parts]
        if self.wrong == "doubles":
            plan.parts = [*plan.parts, *plan.parts[:1]]
        return plan


def _scheduler(wrong=""):
    return suite(SchedulerSuite, Scheduler.Config(wrong=wrong), steps=100)


EACH = "test_every_request_is_computed_within_the_limits"
SCHEDULERS = mutants(
    _scheduler(),
    {
        "drops a request": (_scheduler("forgets"), EACH),
        "does not free the blocks of a finished request": (_scheduler("leaks"), EACH),
        "computes a token twice": (_scheduler("repeats"), EACH),
        "schedules a request twice in a step": (_scheduler("doubles"), EACH),
    },
)


class Drafter(NgramDrafter):
    @node
    class Config(NgramDrafter.Config):
        wrong: str = ""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.wrong = cfg.wrong

    def draft(self, state, most):
        wrong = self.wrong
        if wrong == "moody":
            return [random.randrange(5)]
        if wrong == "changes":
            state.tokens.append(0)
        return () if wrong == "nothing" else super().draft(state, most + (wrong == "long"))


def _drafter(wrong=""):
    return suite(DrafterSuite, Drafter.Config(wrong=wrong, ngram=1))


DRAFTERS = mutants(
    _drafter(),
    {
        "drafts more tokens than requested": (_drafter("long"), "test_drafts_are_tokens_and_no_more_than_asked_for"),
        "returns random drafts": (_drafter("moody"), "test_equal_requests_have_equal_drafts"),
        "changes the request": (_drafter("changes"), "test_drafts_are_tokens_and_no_more_than_asked_for"),
        "drafts nothing": (_drafter("nothing"), "test_something_is_drafted"),
    },
)


class Splitting:
    """Parses each piece by itself."""

    def __init__(self, new):
        self._new = new

    def push(self, text):
        parser = self._new()
        return [*parser.push(text), *parser.end()]

    def end(self):
        return []


class Late:
    """Returns everything at the end."""

    def __init__(self, parser):
        self._parser, self._pieces = parser, []

    def push(self, text):
        self._pieces += self._parser.push(text)
        return []

    def end(self):
        return self._pieces + self._parser.end()


class Silent(Late):
    """Drops text that follows a call."""

    def end(self):
        pieces = super().end()
        last = max((i for i, piece in enumerate(pieces) if isinstance(piece, CallStart)), default=len(pieces))
        return [piece for i, piece in enumerate(pieces) if i < last or not isinstance(piece, Text)]


@attrs.frozen
class Calls(Hermes):
    wrong: str = ""

    def new(self, functions, *, stream):
        if self.wrong == "generous":
            functions = [
                *functions,
                *(Function(f"{name}_{i}") for name in ("f", "get_weather", "search-web") for i in range(3)),
            ]
        parser = super().new(functions, stream=stream)
        if self.wrong == "splits":
            return Splitting(lambda: super(Calls, self).new(functions, stream=stream))
        wrappers = {"late": Late, "silent": Silent}
        return wrappers[self.wrong](parser) if self.wrong in wrappers else parser


def _calls(wrong=""):
    def write(self, calls, rng):
        members = ({"name": call.name, "arguments": call.arguments} for call in calls)
        return "".join(f"<tool_call>{json.dumps(member)}</tool_call>" for member in members)

    return suite(ToolFormatSuite, format=Calls(wrong), write=write, cases=10)


PARSED = "test_calls_and_text_are_parsed_exactly"
TOOL_FORMATS = mutants(
    _calls(),
    {
        "holds nothing back": (_calls("splits"), PARSED),
        "calls functions that were not offered": (_calls("generous"), "test_calls_of_other_functions_stay_text"),
        "returns the arguments at the end": (_calls("late"), "test_arguments_are_returned_while_they_are_written"),
        "drops the text after a call": (_calls("silent"), PARSED),
    },
)


@attrs.frozen
class Thoughts(Think):
    wrong: str = ""

    def new(self, prompt):
        if self.wrong == "splits":
            return Splitting(lambda: super(Thoughts, self).new(prompt))
        return super().new({"forgets": "", "always": "<think>"}.get(self.wrong, prompt))


def _thoughts(wrong=""):
    def write(self, reasoning, text, *, inside):
        return f"{'' if inside else '<think>'}{reasoning}</think>{text}"

    return suite(ReasoningFormatSuite, format=Thoughts(wrong), write=write, prompt_inside="<think>")


SEPARATED = "test_reasoning_and_answer_are_separated"
REASONING_FORMATS = mutants(
    _thoughts(),
    {
        "holds nothing back": (_thoughts("splits"), SEPARATED),
        "ignores the prompt": (_thoughts("forgets"), SEPARATED),
        "reasons without a marker": (_thoughts("always"), "test_an_answer_without_reasoning_is_text"),
    },
)

MUTANTS = [*_caches(KVCacheSuite, Cache), *_caches(LatentCacheSuite, Latents), *SCHEDULERS, *DRAFTERS]
MUTANTS += [*TOOL_FORMATS, *REASONING_FORMATS]
