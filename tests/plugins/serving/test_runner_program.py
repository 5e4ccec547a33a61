"""The functions of a runner, without a runner."""

import jax
import numpy as np

from axlearn_plugins_serving.runner_program import RunnerProgram
from support.serving_models import config, runner


def test_a_program_without_a_runner_declares_the_functions_of_the_runner():
    instance = runner(chunk_buckets=(1,))
    program = RunnerProgram.with_steps(instance.cfg, config(), jax.devices()[:1])
    assert program.functions.keys() == instance.program.functions.keys()
    assert program.shapes().keys() <= program.functions.keys()
    cache, blocks, _ = program.arguments("serve_write", None)
    assert jax.tree.map(np.shape, cache) == jax.tree.map(np.shape, instance.cache)
    assert [x.shape[0] for x in jax.tree.leaves(cache)] == [instance.num_blocks] * len(jax.tree.leaves(instance.cache))
    assert blocks.shape == (16,)
