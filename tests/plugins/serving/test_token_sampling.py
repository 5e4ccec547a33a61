"""Token sampling: limits against a sorted reference, penalties, masks, bias, log-probabilities and seeds."""

import dataclasses

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axlearn_plugins_serving import token_sampling
from axlearn_plugins_serving.contracts import Row, Sampling
from axlearn_plugins_transformer.token_logprobs import scale_logits, token_logprobs
from support.serving_models import Requests, model, prompts, runner

VOCABULARY = 64


def reference_limits(logits, top_k, top_p, min_p):
    """Return the tokens that the limits keep, by sorting."""
    mask = np.zeros(logits.size, bool)
    order = np.argsort(-logits, kind="stable")[:top_k]
    p = np.exp(logits[order].astype(np.float64))
    p /= p.sum()
    needed = np.searchsorted(np.cumsum(p), top_p - 1e-9) + 1
    order = order[: min(needed, order.size)]
    mask[order] = True
    return mask & (np.exp(logits) >= min_p)


@pytest.mark.slow_cases("64-1.0-0.0")
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(VOCABULARY, 1.0, 0.0), (5, 1.0, 0.0), (VOCABULARY, 0.7, 0.0), (20, 0.9, 0.1), (1, 1.0, 0.0)],
)
def test_limits_equal_those_of_sorting(top_k, top_p, min_p):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, VOCABULARY)).astype(np.float32) * 2
    logits -= logits.max(axis=1, keepdims=True)
    many = [np.full((8,), x, t) for x, t in ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32))]
    mask = np.asarray(token_sampling.keep_within_limits(jnp.asarray(logits), *map(jnp.asarray, many)))
    for row, values in zip(mask, logits, strict=True):
        assert (row == reference_limits(values, top_k, top_p, min_p)).all()


def logits_with_weights(weights):
    """Return logits [1, n] with exactly this `exp`, found among the float32 neighbours of each logarithm."""
    result = []
    for weight in weights:
        bits = np.float32(np.log(weight)).view(np.int32) + np.arange(-8, 9, dtype=np.int32)
        near = bits.view(np.float32) if weight != 1.0 else np.zeros(1, np.float32)
        exact = np.asarray(jnp.exp(jnp.asarray(near))) == weight
        result.append(near[int(np.argmax(exact))])
    logits = jnp.asarray([result], jnp.float32)
    assert np.asarray(jnp.exp(logits)).tolist() == [list(weights)]
    return logits


@pytest.mark.slow_cases("0.5-1")
@pytest.mark.parametrize(
    ("top_p", "count"),
    [
        (0.5, 1),  # exactly the first token's probability
        (np.nextafter(np.float32(0.5), np.float32(1)), 2),  # slightly more than the first token's probability
        (np.nextafter(np.float32(0.5), np.float32(0)), 1),
        (0.75, 2),  # exactly that of the first two
        (np.nextafter(np.float32(0.75), np.float32(1)), 4),  # ties are kept
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it_exactly(top_p, count):
    logits = logits_with_weights([1.0, 0.5, 0.25, 0.25])
    one = jnp.ones((1,), jnp.float32)
    mask = token_sampling.keep_within_limits(logits, jnp.asarray([4]), top_p * one, 0 * one)
    assert np.asarray(mask)[0].tolist() == [place < count for place in range(4)]


def test_presence_counts_a_token_once_and_frequency_each_time():
    counts = np.array([[0, 1, 2, 7]], np.int32)
    rows = token_sampling.Tables.init(1, 4)
    logits, never = jnp.asarray([[3.0, 2.0, 1.0, 0.5]]), jnp.zeros((1,), bool)
    for presence, frequency in ((1.5, 0.0), (-1.5, 0.0), (0.0, 0.25), (1.5, 0.25)):
        row = dataclasses.replace(
            rows, counts=jnp.asarray(counts), presence=jnp.asarray([presence]), frequency=jnp.asarray([frequency])
        )
        taken = np.asarray(logits - token_sampling.adjust_logits(logits, row, never))
        np.testing.assert_allclose(taken, presence * (counts > 0) + frequency * counts, atol=1e-6)


def first_logprobs(prompt):
    hidden = jax.jit(lambda t: model()(t))(np.asarray([prompt], np.int32))
    return np.asarray(jax.nn.log_softmax(hidden[0].astype(jnp.float32), axis=-1))


@pytest.mark.parametrize("special", [[], [np.inf, np.inf], [-np.inf] * 7, [np.nan, np.inf, np.nan]], ids=str)
def test_the_likeliest_token_is_that_of_argmax(special):
    logits = np.random.default_rng(0).integers(0, 4, (16, 7)).astype(np.float32)  # many are equal
    logits[3, 7 - len(special) :] = special
    assert (np.asarray(token_sampling.likeliest(jnp.asarray(logits))) == np.asarray(jnp.argmax(logits, axis=-1))).all()


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_model():
    prompt = prompts(np.random.default_rng(0), VOCABULARY)[1]
    requests = Requests(runner(), [prompt], [Sampling(temperature=0.7, logprobs=5, prompt_logprobs=True)])
    targets = [*prompt[1:], 0]
    result = requests.runner.submit([requests.row(0, 13, targets=targets)]).wait()[0]
    expected = first_logprobs(prompt)
    assert [t.token for t in result.target_logprobs] == targets
    for at, place in enumerate(result.target_logprobs):
        assert place.logprob == pytest.approx(expected[at, targets[at]], abs=1e-4)
        assert [t for t, _ in place.top] == np.argsort(-expected[at])[:5].tolist()
    place_of_token = result.logprobs[0]
    assert place_of_token.token == result.tokens[0]
    assert place_of_token.logprob == pytest.approx(expected[-1, place_of_token.token], abs=1e-4)
    assert place_of_token.top[0][1] == pytest.approx(expected[-1].max(), abs=1e-4)


def draws(samplings, seeds, count, beside):
    """Return the outputs of the first request, run together with others."""
    some = prompts(np.random.default_rng(7), VOCABULARY)[: 1 + beside]
    requests = Requests(runner(), some, samplings, seeds, np.random.default_rng(beside))
    requests.random_steps(count)
    return requests.outputs[0][:count]


def test_equal_seeds_draw_equal_tokens_in_any_batch():
    hot = Sampling(temperature=1.5, top_p=0.95)
    alone = draws([hot], [11], 12, beside=0)
    together = draws([hot, Sampling(temperature=2.0), Sampling(temperature=0.0)], [11, 12, 13], 12, beside=2)
    assert alone == together
    assert alone != draws([hot], [12], 12, beside=0)
    assert len(set(alone)) > 3


@pytest.mark.slow
def test_draws_have_the_probabilities_of_the_model():
    rows, vocab = 4096, 8
    logits = jnp.asarray(np.log([[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02]]), jnp.float32)
    tables = token_sampling.Tables.init(rows, vocab)
    tables = dataclasses.replace(
        tables, seed=jnp.arange(rows, dtype=jnp.uint32), temperature=jnp.ones((rows,), jnp.float32)
    )
    tokens = np.asarray(token_sampling.draw(jnp.broadcast_to(logits, (rows, vocab)), tables, jnp.bool(False))[0])
    actual = np.bincount(tokens, minlength=vocab) / rows
    np.testing.assert_allclose(actual, np.exp(logits[0]), atol=4 * np.sqrt(0.25 / rows))


def test_penalties_bias_and_masks_change_what_is_likeliest():
    prompt = prompts(np.random.default_rng(3), VOCABULARY)[0]
    plain = draws_of(prompt, Sampling(temperature=0.0), 6)
    assert draws_of(prompt, Sampling(temperature=0.0, logit_bias={plain[0]: -100.0}), 1)[0] != plain[0]
    assert draws_of(prompt, Sampling(temperature=0.0, logit_bias={9: 100.0}), 3) == [9, 9, 9]
    once = draws_of(prompt, Sampling(temperature=0.0, presence_penalty=100.0), 6)
    assert len(set(once)) == 6
    often = draws_of(prompt, Sampling(temperature=0.0, frequency_penalty=100.0), 6)
    assert len(set(often)) == 6


def draws_of(prompt, options, count):
    requests = Requests(runner(), [prompt], [options])
    requests.random_steps(count)
    return requests.outputs[0][:count]


def test_a_preempted_request_goes_on_with_its_penalties_and_its_draws():
    prompt = prompts(np.random.default_rng(3), VOCABULARY)[0]
    options = Sampling(temperature=1.2, presence_penalty=3.0)
    whole = draws_of(prompt, options, 8)
    requests = Requests(runner(), [prompt + whole[:4]], [options])
    requests.runner.assign(requests.slots[0], options, 0, whole[:4])
    requests.random_steps(4)
    assert requests.outputs[0][:4] == whole[4:]


def test_a_mask_holds_for_its_step_alone():
    prompt = prompts(np.random.default_rng(3), VOCABULARY)[0]
    plain = draws_of(prompt, Sampling(temperature=0.0), 2)
    mask = np.zeros((2,), np.uint32)
    mask[40 // 32] |= np.uint32(1 << (40 % 32))
    requests = Requests(runner(), [prompt])
    result = requests.runner
    assert result.submit([requests.row(0, 5, mask=mask)]).wait()[0].tokens == [40]
    again = Row(slot=requests.slots[0], start=4, tokens=prompt[4:], blocks=requests.blocks[0])
    assert result.submit([again]).wait()[0].tokens == plain[:1]
    assert result.compilations == 0


@pytest.mark.slow  # importing PyTorch takes seconds
@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, output = [3, 5, 5], [7, 7, 9]
    logits = np.random.default_rng(0).standard_normal((1, VOCABULARY)).astype(np.float32)
    row = token_sampling.table_row(Sampling(repetition_penalty=penalty), 0, output, VOCABULARY, prompt=prompt)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    adjusted = token_sampling.adjust_logits(jnp.asarray(logits), rows, jnp.zeros((1,), bool))
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), torch.tensor(logits))
    np.testing.assert_allclose(np.asarray(adjusted), want.numpy(), rtol=1e-6)


def test_a_preempted_request_goes_on_with_its_repetition_penalty():
    prompt = prompts(np.random.default_rng(3), VOCABULARY)[0]
    options = Sampling(temperature=0.0, repetition_penalty=1e30)  # also checks that logits stay finite
    requests = Requests(runner(), [prompt])
    requests.runner.assign(requests.slots[0], options, 0, [], prompt=prompt)
    requests.random_steps(8)
    whole = requests.outputs[0][:8]
    assert len({*prompt, *whole}) == len(set(prompt)) + 8
    requests = Requests(runner(), [prompt + whole[:4]])
    requests.runner.assign(requests.slots[0], options, 0, whole[:4], prompt=prompt)
    requests.random_steps(4)
    assert requests.outputs[0][:4] == whole[4:]


def test_top_p_zero_takes_the_most_likely_token():
    prompt = prompts(np.random.default_rng(3), VOCABULARY)[0]
    greedy = draws_of(prompt, Sampling(temperature=0.0), 6)
    assert draws_of(prompt, Sampling(temperature=5.0, top_p=0.0), 6) == greedy


@jax.jit
def chosen_tokens(logits, tables, masked):
    """Return the tokens and log-probabilities of a step of the kind `FULL`, whose rows are the slots in order."""
    slots, needed = jnp.arange(logits.shape[0]), jnp.bool(True)
    drawn = token_sampling.choose(logits, tables, slots, masked, jnp.int32(2), needed)
    level = jnp.int32(token_sampling.TOP_LOGPROBS)
    return token_sampling.report(logits, drawn.token, level)._replace(sampling_logprob=drawn.logprob)


@pytest.mark.parametrize("width", [1, 3, 5, 8])
def test_kept_tokens_are_those_of_the_mask(width):
    logits, mask = jnp.float32([[0, 3, 1, 2, 5], [4, 1, 1, 0, 2]]), np.bool_([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]])
    candidates = np.asarray(token_sampling.list_kept(logits, jnp.asarray(mask), width))
    assert candidates.shape == (2, width)
    for row, tokens in zip(candidates, mask, strict=True):
        expected = set(np.flatnonzero(tokens)) if tokens.sum() <= width else set()
        assert set(row[row >= 0]) == expected


def tables_of(samplings, vocab, output=(), prompt=()):
    rows = [
        token_sampling.table_row(sampling, seed, list(output), vocab, prompt=list(prompt))
        for seed, sampling in enumerate(samplings)
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


def random_logits(rows, vocab):
    return jnp.asarray(3 * np.random.default_rng(vocab).standard_normal((rows, vocab)).astype(np.float32))


@pytest.mark.slow_cases("33", "4001")
@pytest.mark.parametrize("vocab", [33, VOCABULARY, 4001])
def test_sampling_logprobs_have_the_bits_of_a_training_program(vocab):
    @jax.jit
    def train(logits, targets, temperature):
        return token_logprobs(scale_logits(logits, temperature), targets)[0]

    temperatures = [1.0, 0.7, 1.3, 0.31, 2.0, 1.0, 0.9, 0.0]
    logits, tables = random_logits(8, vocab), tables_of([Sampling(temperature=t) for t in temperatures], vocab)
    chosen = chosen_tokens(logits, tables, jnp.zeros((8,), bool))
    want = np.array(train(logits, chosen.token, jnp.asarray([t or 1.0 for t in temperatures])))
    want[7] = 0.0  # greedy
    assert np.asarray(chosen.sampling_logprob).tobytes() == want.tobytes()
    exact = [0, 5]
    assert np.asarray(chosen.sampling_logprob)[exact].tobytes() == np.asarray(chosen.logprob)[exact].tobytes()


def reference_logprob(logits, token, sampling, counts, in_prompt, allowed):
    """Return the log-probability of a token in the distribution that a request draws from, in float64."""
    x = logits.astype(np.float64)
    for place, value in sampling.logit_bias.items():
        x[place] += value
    penalized = in_prompt | (counts > 0)
    x = np.where(penalized, np.where(x > 0, x / sampling.repetition_penalty, x * sampling.repetition_penalty), x)
    x = x - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    x = np.where(allowed, x, -np.inf) / sampling.temperature
    x -= x.max()
    allowed_tokens = reference_limits(x, sampling.top_k or x.size, sampling.top_p, sampling.min_p) & allowed
    assert allowed_tokens[token]
    return x[token] - np.log(np.exp(x[allowed_tokens]).sum())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_sampling_logprobs_equal_a_reference_for_random_parameters(seed):
    rng, vocab = np.random.default_rng(seed), VOCABULARY
    samplings = [
        Sampling(
            temperature=float(rng.choice([1.0, 0.5, 1.7])),
            top_k=rng.choice([None, 1, 5, 30]),
            top_p=float(rng.choice([1.0, 0.9, 0.4])),
            min_p=float(rng.choice([0.0, 0.02, 0.3])),
            presence_penalty=float(rng.choice([0.0, 0.8])),
            frequency_penalty=float(rng.choice([0.0, -0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
            logit_bias={int(t): float(rng.normal()) for t in rng.integers(0, vocab, rng.integers(0, 4))},
        )
        for _ in range(32)
    ]
    output, prompt = rng.integers(0, vocab, 9), rng.integers(0, vocab, 7)
    logits, masked = random_logits(32, vocab), rng.random(32) < 0.5
    allowed = rng.random((32, vocab)) < 0.7
    allowed[~masked] = True
    mask = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    tables = dataclasses.replace(tables_of(samplings, vocab, output, prompt), mask=jnp.asarray(mask))
    chosen = chosen_tokens(logits, tables, jnp.asarray(masked))
    counts, in_prompt = np.bincount(output, minlength=vocab), np.isin(np.arange(vocab), prompt)
    for row, sampling in enumerate(samplings):
        want = reference_logprob(
            np.asarray(logits[row]), int(chosen.token[row]), sampling, counts, in_prompt, allowed[row]
        )
        assert float(chosen.sampling_logprob[row]) == pytest.approx(want, abs=2e-5)


def test_limits_of_one_row_do_not_change_another():
    logits = random_logits(2, VOCABULARY)
    plain, limited = Sampling(temperature=0.8), Sampling(temperature=0.8, top_k=3)
    never = jnp.zeros((2,), bool)
    alone = chosen_tokens(logits, tables_of([plain, plain], VOCABULARY), never)
    beside = chosen_tokens(logits, tables_of([plain, limited], VOCABULARY), never)
    assert int(alone.token[0]) == int(beside.token[0])
    assert float(alone.sampling_logprob[0]) == float(beside.sampling_logprob[0])
    top = np.sort(np.asarray(logits[1], np.float64) / 0.8)[-3:]
    drawn = float(logits[1, int(beside.token[1])]) / 0.8
    assert float(beside.sampling_logprob[1]) == pytest.approx(drawn - np.log(np.exp(top).sum()), abs=1e-5)


def test_sampling_logprobs_of_a_runner_need_no_compilation():
    prompt = prompts(np.random.default_rng(3), VOCABULARY)[0]
    plain = Sampling(temperature=0.7, top_k=4, logprobs=0)
    runs = []
    for sampling in (plain, attrs.evolve(plain, sampling_logprobs=True)):
        requests = Requests(runner(), [prompt], [sampling])
        requests.random_steps(5)
        runs.append([place for result in requests.results[0] for place in result.logprobs or ()])
        assert requests.runner.compilations == 0
    without, scored = runs
    assert [place.sampling_logprob for place in without] == [None] * len(without)
    assert [attrs.evolve(place, sampling_logprob=None) for place in scored] == without
    assert all(0 >= place.sampling_logprob > place.logprob for place in scored)
