"""A second model drafts tokens: it changes the number of steps of an output, but not the output."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest

from axlearn_core.config import patch
from axlearn_core.errors import RequestError
from axlearn_plugins_serving import draft_model
from axlearn_plugins_serving.contracts import Request, Sampling
from axlearn_plugins_serving.draft_model import DraftModel
from axlearn_plugins_serving.engine import ServingEngine
from axlearn_plugins_serving.local_engine import serve
from axlearn_plugins_serving.request_state import RequestState
from support.engine_runs import END, VOCABULARY, engine, requests_at_random, run, tokens
from support.fake_runner import FakeRunner, expected
from support.model_directories import edit_config, model_copy

LENGTH = 3
DRAFTS = {"drafter": DraftModel.Config(path="small", length=LENGTH), "adapt_drafting": False}


@pytest.fixture
def drafters(monkeypatch):
    """Make draft models of fake runners. Their `version` decides whether they have the tokens of the served model."""
    opened = []

    def open_fake(cfg, runner, **sizes):
        default = {"chunk": 4, "num_blocks": 16 * runner.max_rows, "max_rows": runner.max_rows, "max_step_tokens": 12}
        config = FakeRunner.Config(**{**default, "decode_steps": cfg.length, **sizes})
        small = config.build()
        small.version = 1 if cfg.path == "other" else 0
        built = ServingEngine.Config(prefix_cache=False).build(runner=small)
        opened.append(built)
        return SimpleNamespace(engine=built, text=None)

    monkeypatch.setattr(draft_model, "_open", open_fake)
    return opened


@pytest.mark.parametrize("path", ["small", "other"])
@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 17}, {"chunk": 8, "max_step_tokens": 30}], ids=str)
def test_random_requests_get_what_they_get_alone(sizes, path, drafters):
    rng = random.Random(0)
    one = engine(settings={**DRAFTS, "drafter.path": path}, **sizes)
    requests = requests_at_random(rng, 80)
    outputs = run(one, requests, aborted={"5", "17", "40"}, rng=rng)
    for request in requests:
        results = outputs.get(request.id, [])
        want, reason = expected(
            request.prompt, request.sampling, max_context=64, vocab_size=97, end_tokens=END, seed=request.sampling.seed
        )
        if request.id not in {"5", "17", "40"}:
            assert (tokens(results), results[-1].finish) == (want, reason)
    statistics = one.statistics()
    assert statistics.drafted_tokens > 40
    assert statistics.acceptance_rate > 0.9 if path == "small" else statistics.acceptance_rate < 0.1
    assert statistics.drafter == "DraftModel"
    assert statistics.preemptions > 0 or "num_blocks" not in sizes


def test_a_perfect_drafter_saves_steps_and_computes_each_token_once(drafters):
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_end=True, logprobs=2)
    request = Request(id="a", prompt=tuple(range(20)), sampling=sampling)
    plain, drafting = engine(), engine(settings=DRAFTS)
    want, drafted = run(plain, [request])["a"], run(drafting, [request])["a"]
    assert tokens(want) == tokens(drafted)
    assert [p.top for o in want for p in o.logprobs] == [p.top for o in drafted for p in o.logprobs]
    assert drafting.statistics().steps < plain.statistics().steps / 2.5
    (small,) = drafters
    assert small.runner.computed < 20 + 40 + LENGTH + 3


def test_requests_with_a_temperature_are_not_drafted(drafters):
    one = engine(settings=DRAFTS)
    sampling = Sampling(temperature=1.0, seed=7, max_tokens=20, ignore_end=True)
    want, _ = expected((1, 2), sampling, max_context=64, vocab_size=97, seed=7)
    assert tokens(run(one, [Request(id="a", prompt=(1, 2), sampling=sampling)])["a"]) == want
    assert one.statistics().drafted_tokens == drafters[0].runner.computed == 0


def test_drafting_stops_while_the_draft_model_is_slow(drafters):
    one = engine(settings={**DRAFTS, "adapt_drafting": True, "drafter.path": "other"}, latency=0.001)
    drafters[0].runner.latency = 0.002
    sampling = Sampling(temperature=0.0, max_tokens=50, ignore_end=True)
    run(one, [Request(id="a", prompt=(1, 2), sampling=sampling)], check=False)
    drafted = one.statistics().drafted_tokens
    assert drafted > 0
    run(one, [Request(id="b", prompt=(1, 2), sampling=sampling)], check=False)
    assert one.statistics().drafted_tokens - drafted < 50  # at most one probe


def test_a_failed_draft_forgets_the_cache(drafters):
    one = engine(settings=DRAFTS)
    sampling = Sampling(temperature=0.0, max_tokens=20, ignore_end=True)
    one.add(Request(id="a", prompt=(1, 2, 3), sampling=sampling))
    for _ in range(4):
        one.step()
    drafters[0].runner.fail = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        one.step()
    drafters[0].runner.fail = None
    drafters[0].runner.memory[:] = -1
    want, _ = expected((1, 2, 3), sampling, max_context=64, vocab_size=97)
    assert tokens(run(one, [Request(id="b", prompt=(1, 2, 3), sampling=sampling)])["b"]) == want
    assert one.statistics().acceptance_rate > 0.9


def test_tokens_that_one_of_the_models_lacks_are_not_used(drafters, monkeypatch):
    one = engine(settings=DRAFTS)
    drafter, state = one.drafter, RequestState(Request(id="a", prompt=(1, 2, 3)), seed=0, arrival=0, limit=9)
    state.slot = 0
    draft = drafter.draft(state, 3)
    assert len(draft) == 3
    drafter.vocab_size = max(draft)
    assert list(drafter.draft(state, 3)) == list(draft[: draft.index(max(draft))])
    drafter._runner.vocab_size = 3
    other = RequestState(Request(id="b", prompt=(3, 1)), seed=0, arrival=1, limit=9)
    other.slot = 1
    assert drafter.draft(other, 3) == ()


def test_the_engine_closes_the_draft_model(drafters):
    one = engine(settings=DRAFTS)
    one.close()
    with pytest.raises(RequestError, match="closed"):
        drafters[0].step()


def test_a_model_with_another_vocabulary_is_an_error(monkeypatch):
    def open_larger(cfg, runner):
        return SimpleNamespace(
            engine=ServingEngine.Config().build(runner=FakeRunner.Config(vocab_size=98).build()), text=None
        )

    monkeypatch.setattr(draft_model, "_open", open_larger)
    with pytest.raises(
        RequestError, match=rf"vocabulary.*\n *got: small: 98 tokens\n *expected: {VOCABULARY} tokens\n *fix: "
    ):
        engine(settings=DRAFTS)


SIZES = {
    "runner.block_size": 8, "runner.max_context": 96, "runner.max_rows": 3, "runner.max_step_tokens": 16, "runner.chunk": 8,
    "runner.row_buckets": (), "runner.chunk_buckets": (),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    copy = model_copy("llama3", tmp_path_factory.mktemp("draft"))
    edit_config(copy, dtype="float32", torch_dtype="float32")
    return copy


def generate(directory, prompts, **settings):
    with serve(str(directory), set={**SIZES, **settings}, warm_up=False) as local:
        greedy = local.generate(prompts, max_tokens=16, temperature=0, ignore_end=True, logprobs=1)
        drawn = local.generate(prompts, max_tokens=8, temperature=1.0, seed=3, ignore_end=True)
        return [(g.tokens, g.logprobs) for g in greedy], [g.tokens for g in drawn], local.statistics()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "parity"])
def test_a_model_drafts_for_itself(directory, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(90) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    plain, drawn, _ = generate(directory, prompts, **{"runner.mode": mode})
    drafter = {"drafter": DraftModel.Config(path=str(directory), length=3, max_step_tokens=24), "adapt_drafting": False}
    drafted, drawn_too, statistics = generate(directory, prompts, **{"runner.mode": mode}, **drafter)
    assert [t for t, _ in drafted] == [t for t, _ in plain]
    assert drawn == drawn_too
    if mode == "parity":
        assert drafted == plain
    assert statistics.accepted_tokens > 0.95 * statistics.drafted_tokens > 0


@pytest.mark.slow
def test_a_tokenizer_with_other_tokens_is_an_error(directory, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    data = json.loads((other / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    first, second = [t for t, i in sorted(vocabulary.items(), key=lambda item: item[1]) if i in (20, 21)]
    vocabulary[first], vocabulary[second] = 21, 20
    (other / "tokenizer.json").write_text(json.dumps(data))
    config = patch(ServingEngine.Config(), {"drafter": DraftModel.Config(path=str(other))})
    with pytest.raises(
        RequestError, match=r"vocabulary of the served model\n *got: .*token 20 is .*\n *expected: .*\n *fix: "
    ):
        serve(str(directory), config=config, set=SIZES, warm_up=False)


@pytest.mark.slow
def test_a_missing_draft_model_is_an_error(directory, tmp_path):
    config = patch(ServingEngine.Config(), {"drafter": DraftModel.Config(path=str(tmp_path / "none"))})
    with pytest.raises(RequestError, match=r"serving\.drafter\.path=.*none cannot draft"):
        serve(str(directory), config=config, set=SIZES, warm_up=False)
