"""The mode `parity`: log-probabilities of steps are, bit for bit in float32, those of the training program's `score`."""

import attrs
import jax
import numpy as np
import pytest
from serving_models import SIZES, Requests, config, model, prompts

from axlearn_core.compose import Functional
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.config import map as map_nodes
from axlearn_core.errors import RequestError
from axlearn_plugins_serving.contracts import Sampling
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.functions import ScoreBucket


def invariant(cfg):
    """The model with the kernel of attention that does not depend on the batch."""

    def place(part):
        caches = {"kv_cache", "latent_cache"} & {a.name for a in attrs.fields(type(part))}
        return attrs.evolve(part, kernel="invariant") if caches else part

    return map_nodes(cfg, place)


class Scores:
    """`score` of the training program, one target at a time."""

    def __init__(self, cfg, of, rows=2, length=48):
        self.program = ModelProgram(Functional.of(invariant(cfg)), jax.local_devices()[:1])
        self.weights = self.program.place(self.program.functional.weights_of(of))
        self.shape = rows, length
        self.score = self.program.compile("score", ScoreBucket(rows, length, 32))

    def __call__(self, tokens, first):
        """The log-probability of each of tokens[first:]."""
        values = []
        for at in range(first, len(tokens)):
            given, targets, counted = (np.zeros(self.shape, t) for t in (np.int32, np.int32, bool))
            given[0, : len(tokens)] = tokens
            targets[0, at - 1], counted[0, at - 1] = tokens[at], True
            values.append(np.asarray(self.score(self.weights, given, targets, counted)[0])[0])
        return np.asarray(values, np.float32)


def check(cfg, of, seeds=2, **sizes):
    made = ModelRunner.Config(**{**SIZES, **sizes}, mode="parity").build(model=of)
    scores = Scores(cfg, of)
    compared = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        some = prompts(rng, of.vocab_size)
        requests = Requests(made, some, [Sampling(temperature=1.0, logprobs=0)] * len(some), rng=rng)
        requests.random_steps(8)
        for prompt, output, results in zip(some, requests.outputs, requests.results, strict=True):
            found = [x.logprob for result in results for x in result.logprobs or ()]
            expected = scores(prompt + output, len(prompt))
            assert np.asarray(found, np.float32).tobytes() == expected.tobytes()
            compared += len(found)
    assert compared >= 32 * seeds


@pytest.mark.parametrize("features", [(), ("alibi",), ("interleave",)], ids=str)
def test_log_probabilities_are_bitwise_those_of_training(features):
    check(config(*features), model(*features))


@pytest.mark.slow
def test_bitwise_with_other_chunks_and_pages():
    check(config(), model(), chunk=5, block_size=16)
    check(config(), model(), chunk=20, block_size=8, max_step_tokens=40)


@pytest.mark.parametrize(
    ("features", "reason"),
    [(("moe",), "experts"), (("mla",), "latent"), (("precision:dtype=bfloat16",), "bfloat16")],
    ids=str,
)
def test_what_cannot_be_bitwise_is_refused(features, reason):
    with pytest.raises(RequestError, match=reason):
        ModelRunner.Config(**SIZES, mode="parity").build(model=model(*features))


def test_scores_do_not_depend_on_the_shape_of_the_batch():
    tokens = prompts(np.random.default_rng(0), 64)[3]
    one, other = (Scores(config(), model(), *shape)(tokens, 1) for shape in ((2, 48), (3, 64)))
    assert one.tobytes() == other.tobytes()


def test_pages_that_make_up_no_block_are_refused():
    made = ModelRunner.Config(**{**SIZES, "block_size": 3, "mode": "parity"}).build(model=model())
    with pytest.raises(RequestError, match="pages of 3 slots"):
        made.warm_up()
