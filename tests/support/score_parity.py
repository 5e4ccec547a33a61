"""Compare log-probabilities of steps with a training program's `score`, bit for bit."""

import jax
import numpy as np

from axlearn_core.compose import Functional
from axlearn_core.compose.model_program import ModelProgram
from axlearn_core.contracts.mesh import Mesh
from axlearn_plugins_serving.contracts import Sampling
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.engine_devices import serving_program
from axlearn_plugins_serving.runner import ModelRunner
from axlearn_plugins_transformer.batch_invariant import with_invariant_kernels
from axlearn_plugins_transformer.functions import ScoreBucket
from support.serving_models import SIZES, Requests, prompts


class Scores:
    """Return `score` of the training program, one target at a time."""

    def __init__(self, cfg, of, rows=2, length=48):
        self.program = ModelProgram(Functional.from_config(with_invariant_kernels(cfg)), jax.local_devices()[:1])
        self.weights = self.program.place(self.program.functional.extract_weights(of))
        self.shape = rows, length
        self.score = self.program.compile("score", ScoreBucket(rows, length, 32))

    def __call__(self, tokens, first):
        """Return the log-probability of each of tokens[first:]."""
        values = []
        for at in range(first, len(tokens)):
            inputs, targets, counted = (np.zeros(self.shape, t) for t in (np.int32, np.int32, bool))
            inputs[0, : len(tokens)] = tokens
            targets[0, at - 1], counted[0, at - 1] = tokens[at], True
            values.append(np.asarray(self.score(self.weights, inputs, targets, counted)[0])[0])
        return np.asarray(values, np.float32)


def check_parity_scores(cfg, of, seeds=2, devices=1, **sizes):
    program = serving_program(cfg, Mesh(), ServingEngine.Config(tensor_parallel=devices))
    runner = ModelRunner.Config(**{**SIZES, **sizes}, mode="parity").build(model=of, program=program)
    assert runner.program.layout.mesh.size == devices
    scores = Scores(cfg, of)
    compared = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        some = prompts(rng, of.vocab_size)
        requests = Requests(runner, some, [Sampling(temperature=1.0, logprobs=0)] * len(some), rng=rng)
        requests.random_steps(8)
        for prompt, output, results in zip(some, requests.outputs, requests.results, strict=True):
            logprobs = [x.logprob for result in results for x in result.logprobs or ()]
            expected = scores(prompt + output, len(prompt))
            assert np.asarray(logprobs, np.float32).tobytes() == expected.tobytes()
            compared += len(logprobs)
        check_prompts(runner, some, scores, rng)
    assert compared >= 32 * seeds
    # Large steps need these options to match; small ones do not.
    assert runner.program.options("serve") == scores.program.options("score") != {}


def check_prompts(runner, some, scores, rng):
    """Check the log-probabilities of prompts, which a step computes one chunk at a time."""
    requests = Requests(runner, some, [Sampling(temperature=0.0, logprobs=0)] * len(some), rng=rng)
    for i, prompt in enumerate(some):
        values = []
        while requests.done[i] < len(prompt):
            size = int(rng.integers(1, 14))
            following = [*prompt, 0][requests.done[i] + 1 :][: min(size, len(prompt) - requests.done[i])]
            [result] = requests.step({i: size}, **{str(i): {"targets": following}})
            values += [x.logprob for x in result.target_logprobs]
        got = np.asarray(values[:-1], np.float32)
        assert got.tobytes() == scores(prompt, 1).tobytes()
