"""Blocks outside the window of every layer are reused, and outputs do not change."""

import random

import attrs
import numpy as np
import pytest
from flax import nnx

from axlearn_core.config import node, patch
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.drafting import NgramDrafter
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_transformer.cache_spec import read_window
from axlearn_plugins_transformer.generate import Generator
from support import serving_models
from support.fake_runner import FakeRunner, next_token

WINDOW, SIZE = 10, 4


class WindowRunner(FakeRunner):
    """Tokens depend only on the last tokens. Reading earlier blocks is an error, because other requests may own them."""

    @node
    class Config(FakeRunner.Config):
        window: int = WINDOW

    def __init__(self, cfg):
        super().__init__(cfg)
        self.window = cfg.window

    def submit(self, rows, steps=1):
        return super().submit([self._without_lost(row) for row in rows], steps)

    def _without_lost(self, row):
        lost = max(0, row.start - self.window + 1) // self.block_size
        return attrs.evolve(row, blocks=[*range(self.num_blocks, self.num_blocks + lost), *row.blocks[lost:]])

    def _read(self, blocks, length):
        places = range(max(0, length - self.window), length)
        at = [blocks[p // self.block_size] for p in places], [p % self.block_size for p in places]
        return tuple(self.memory[at].tolist()), 0


def expected(request, vocab_size):
    tokens = list(request.prompt)
    for _ in range(request.sampling.max_tokens):
        tokens.append(next_token(tokens[-WINDOW:], request.sampling, 0, 0, vocab_size))
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize("settings", [{}, {"drafter": NgramDrafter.Config()}, {"prefix_cache": False}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"decode_steps": 3}, {"num_blocks": 20}, {"chunk": 8}], ids=str)
def test_tokens_stay_the_same(sizes, settings):
    if settings.get("drafter") and "decode_steps" in sizes:
        pytest.skip("needs `decode_steps` of 1: a drafter decodes one token per step")
    engine = patch(ServingEngine.Config(hold_seconds=9.0), settings).build(runner=WindowRunner.Config(**sizes).build())
    draw, outputs, waiting = random.Random(0), {}, []
    start = [draw.randrange(97) for _ in range(30)]
    for index in range(40):
        prompt = start[: draw.choice([5, 12, 30])] + [draw.randrange(97) for _ in range(draw.choice([1, 3, 9]))]
        sampling = Sampling(temperature=0.0, max_tokens=draw.choice([1, 8, 20]), ignore_end=True)
        waiting.append(Request(id=str(index), prompt=tuple(prompt), sampling=sampling))
    requests = list(waiting)
    while waiting or engine.busy():
        if waiting:
            engine.add(waiting.pop(0))
        for output in engine.step():
            outputs.setdefault(output.id, []).extend(output.tokens)
        engine.cache.pool.check([s.blocks[s.freed :] for s in engine.scheduler.running])
    for request in requests:
        assert outputs[request.id] == expected(request, 97)
    assert engine.statistics().used_blocks == 0


def test_a_long_output_holds_the_blocks_of_its_window():
    engine = ServingEngine.Config(prefix_cache=False).build(runner=WindowRunner.Config(block_size=SIZE).build())
    engine.add(Request(id="long", prompt=(1,), sampling=Sampling(temperature=0.0, max_tokens=60, ignore_end=True)))
    most = 0
    while engine.busy():
        engine.step()
        most = max(most, engine.statistics().used_blocks)
    assert most <= -(-WINDOW // SIZE) + 2


@pytest.mark.slow
def test_a_model_of_windows_gives_its_tokens_from_fewer_blocks():
    config = patch(serving_models.config(), {"decoder.layer.attention.window": 12})
    model = config.build(rngs=nnx.Rngs(0))
    sizes = {"runner.block_size": SIZE, "runner.max_context": 48, "runner.max_rows": 4, "runner.num_blocks": 28}
    sizes |= {"runner.max_step_tokens": 24, "runner.chunk": 8, "runner.row_buckets": (), "runner.chunk_buckets": ()}
    prompts = [np.random.default_rng(i).integers(0, 64, 3 + i).tolist() for i in range(4)]
    with serve(model, set=sizes, warm_up=False) as engine:
        assert engine.engine.cache.window == 12
        results = engine.generate(prompts, max_tokens=36, temperature=0)
        assert engine.statistics().preemptions == 0, "four whole contexts would need 48 blocks"
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == tuple(Generator(model)(prompt, max_tokens=36))


def test_a_layer_that_sees_everything_keeps_all_blocks():
    everywhere = patch(serving_models.config(), {"decoder.layer.attention.window": 8})
    configs = serving_models.config(), serving_models.config("interleave:window=8"), everywhere
    specs = [cfg.build(rngs=nnx.Rngs(0)).cache_spec() for cfg in configs]
    assert [read_window(spec) for spec in specs] == [None, None, 8]
