"""Separate prefill and decode processes give the tokens of a single engine, even if a worker dies."""

import json
import os
import signal
import time

import attrs
import numpy as np
import pytest

import axlearn_core as ax
from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_core.run import open_weights
from axlearn_plugins_serving.contracts import QueueFullError, Request, Sampling
from axlearn_plugins_serving.disaggregated.open_router import open_router
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.open_engine import open_engine
from axlearn_plugins_serving.server.constraints import Grammars

SIZES = {
    "runner.max_rows": 4, "runner.max_context": 96, "runner.block_size": 8, "runner.chunk": 16,
    "runner.row_buckets": (), "runner.chunk_buckets": (), "runner.max_step_tokens": 32, "max_waiting": 64,
}  # fmt: skip
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_end=True)


@pytest.fixture(scope="module")
def config():
    return patch(ServingEngine.Config(), SIZES)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    settings = {"model.decoder.num_layers": 2, "model.decoder.hidden_dim": 64, "evaluators": {}}
    settings |= {"input.sequence_length": 32, "input.batch_size": 8}
    ax.train("quickstart", run_dir=directory, steps=1, set=settings)
    return directory


@pytest.fixture(scope="module")
def router(run_dir, config):
    before = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS_OF_ONE_DEVICE"]
    try:
        opened = open_router(run_dir, config=config, prefill=1, decode=2)
    finally:
        os.environ["XLA_FLAGS"] = before
    yield opened.engine
    folder = opened.engine._folder.name
    opened.engine.close()
    assert not os.path.exists(folder)
    assert all(w.process.poll() is not None for w in opened.engine.workers)


def requests(count, seed, sampling=GREEDY):
    rng = np.random.default_rng(seed)
    shared = tuple(rng.integers(0, 2000, 20).tolist())
    lengths = rng.integers(1, 60, count)
    prompts = [tuple(rng.integers(0, 2000, n).tolist()) for n in lengths]
    prompts = [shared + p if i % 4 == 0 else p for i, p in enumerate(prompts)]
    return [Request(id=f"{seed}-{i}", prompt=p, sampling=sampling) for i, p in enumerate(prompts)]


def run(engine, batch, on_step=lambda step, outputs: None):
    """Run requests, added when there is room, and return id -> (tokens, finish)."""
    waiting, tokens, finish = list(batch), {r.id: [] for r in batch}, {}
    deadline, step = time.monotonic() + 300, 0
    while waiting or engine.busy():
        assert time.monotonic() < deadline
        while waiting:
            try:
                engine.add(waiting[0])
            except QueueFullError:
                break
            waiting.pop(0)
        outputs = engine.step()
        for output in outputs:
            tokens[output.id] += output.tokens
            finish[output.id] = output.finish or finish.get(output.id)
        on_step(step, outputs)
        step += 1
    return {id: (tokens[id], finish[id]) for id in tokens}


@pytest.fixture(scope="module")
def expected(run_dir, config):
    engine = open_engine(run_dir, config=config).engine
    yield lambda batch: run(engine, batch)
    engine.close()


@pytest.mark.slow
def test_token_for_token_what_one_engine_gives(router, expected):
    batch = requests(100, 1) + requests(40, 2, Sampling(max_tokens=9, seed=3, temperature=0.8, top_k=20))
    batch += requests(10, 4, Sampling(max_tokens=9, temperature=0.0, repetition_penalty=1.5, min_tokens=9))
    assert run(router, batch) == expected(batch)
    statistics = router.statistics()
    assert statistics.compilations == 0
    assert sum(w.statistics.cached_prompt_tokens for w in router.workers if w.kind == "decode") > 1000, (
        "blocks were sent"
    )
    assert not os.listdir(router._folder.name), "all transfers were read"
    # Idle workers hold no blocks.
    run(router, requests(1, 3))
    assert router.statistics().running == 0


@pytest.mark.slow
def test_tokens_of_a_prompt_are_counted_once(router):
    prompt = tuple(np.random.default_rng(7).integers(0, 2000, 60).tolist())
    cached, before = [], router.statistics()
    for number in range(2):
        router.add(Request(id=f"counted-{number}", prompt=prompt, sampling=GREEDY))
        while router.busy():
            cached += [output.cached_tokens for output in router.step() if output.finish is not None]
    after = router.statistics()
    assert cached == [0, 56], "the first prompt was computed, and the second one came from the cache"
    assert after.prompt_tokens - before.prompt_tokens == 2 * 60
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 56
    assert after.output_tokens - before.output_tokens == 2 * GREEDY.max_tokens


@pytest.mark.slow
def test_outputs_meet_their_schema_where_prefill_and_decode_are_apart(router, run_dir, expected):
    grammars = Grammars(open_weights(run_dir).tokenizer, router.vocab_size)
    schema = {"enum": ["yes", "no"]}

    def constrained(seed):
        request_list = requests(8, seed, Sampling(max_tokens=40, seed=1, temperature=1.0))
        return [attrs.evolve(request, constraint=grammars.new(schema)) for request in request_list]

    results = run(router, constrained(50))
    assert results == expected(constrained(50))
    tokenizer = open_weights(run_dir).tokenizer
    for tokens, finish in results.values():
        assert finish == "stop"
        assert json.loads(tokenizer.decode(tokens)) in schema["enum"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_worker_that_is_killed(router, expected, kind, capfd):
    batch = requests(40, 10 + len(kind))
    restarts, killed = router.restarts, []

    def kill(step, outputs):
        victims = [w for w in router.workers if w.kind == kind and w.requests]
        if victims and not killed and (outputs or kind == "prefill"):
            killed.append(victims[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    results, right = run(router, batch, kill), expected(batch)
    assert killed
    assert router.restarts == restarts + 1
    failed = [id for id, (_, finish) in results.items() if finish == "error"]
    assert len(failed) <= (8 if kind == "decode" else 0)
    assert all(results[id] == right[id] for id in results if id not in failed)
    assert f"the {kind} worker" in capfd.readouterr().err
    # The router continues with the new worker.
    deadline = time.monotonic() + 200
    while any(w.ready is None for w in router.workers):
        assert time.monotonic() < deadline
        router.step()
    more = requests(20, 30 + len(kind))
    assert run(router, more) == expected(more)


@pytest.mark.slow
def test_an_idle_router_counts_no_blocks(router):
    run(router, requests(4, 11))
    assert router.statistics().used_blocks == 0
    reports = [worker.statistics for worker in router.workers]
    assert all(report is not None and report.used_blocks == 0 for report in reports), reports
    (request,) = requests(1, 12)
    router.add(request)
    while not router.step():
        pass
    router.abort(request.id)
    assert router.statistics().used_blocks == 0
    assert router.start_compilations > 0


@pytest.mark.slow
def test_requests_that_the_router_refuses(router):
    with pytest.raises(RequestError, match="the context is 96"):
        router.add(Request(id="long", prompt=(1,) * 200))
    with pytest.raises(RequestError, match=r"an? object cannot be sent to the decode process"):
        router.add(Request(id="schema", prompt=(1,), constraint=object()))
    with pytest.raises(RequestError, match="fix: serve with a single engine"):
        router.update_weights({})
    for i in range(64):
        router.add(Request(id=f"fill-{i}", prompt=(1,), sampling=GREEDY))
    with pytest.raises(QueueFullError, match="64 requests are already waiting"):
        router.add(Request(id="more", prompt=(1,)))
    for i in range(64):
        router.abort(f"fill-{i}")
    assert not router.busy()


@pytest.mark.slow
def test_what_cannot_be_apart(run_dir, tmp_path):
    without = patch(ServingEngine.Config(), {"prefix_cache": False})
    with pytest.raises(RequestError, match="need the prefix cache"):
        open_router(run_dir, config=without)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(run_dir, config, tmp_path):
    with pytest.raises(RequestError, match="is not an export"):
        open_router(run_dir, config=config, programs=tmp_path)
