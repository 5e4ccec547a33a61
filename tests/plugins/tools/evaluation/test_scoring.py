"""Log-likelihoods against the model's own logits, regardless of the batches and windows; and the metrics made of them."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import axlearn_core as ax
from axlearn_core.errors import InputError, RequestError
from axlearn_plugins_tools.evaluation.data import Data, Question
from axlearn_plugins_tools.evaluation.evaluate import choices, evaluate
from axlearn_plugins_tools.evaluation.scoring import Scorer, windows
from axlearn_plugins_tools.evaluation.subjects import make_subject, subject
from axlearn_plugins_transformer.text import ByteTokenizer
from axlearn_plugins_transformer.text.processor import TextProcessor

SIZES = {
    "model.vocab_size": 257,
    "model.decoder.num_layers": 1,
    "model.decoder.hidden_dim": 32,
    "model.decoder.layer.attention.num_heads": 2,
    "model.decoder.layer.feed_forward.hidden_dim": 32,
}
TOKENIZER = ByteTokenizer.Config().build()
TEXT = TextProcessor.Config().build(tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def model():
    instance = ax.resolve("quickstart", set=SIZES).config.model.build(rngs=nnx.Rngs(0))
    instance.decoder.head.weight[...] = instance.decoder.head.weight[...] * 20  # some tokens much likelier than others
    return instance


@pytest.fixture(scope="module")
def log_probabilities(model):
    """Token ids -> float64 [S, V], of the token after each."""
    logits = jax.jit(lambda tokens: model(tokens))

    def of(ids):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        actual = np.asarray(logits(padded), np.float64)[0, : len(ids)]
        return (
            actual
            - np.log(np.exp(actual - actual.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - actual.max(-1, keepdims=True)
        )

    return of


@pytest.mark.fast_cases("64-before1")
@pytest.mark.parametrize(("context_length", "before"), [(None, [TOKENIZER.eos_id, *b"ab"]), (64, [*b"ab"])])
def test_a_context_of_an_imported_model_begins_as_its_tokenizer_says(model, context_length, before):
    text = TextProcessor.Config(context_length=context_length)
    config = SimpleNamespace(text=text, input=SimpleNamespace(sequence_length=32))
    loaded = SimpleNamespace(tokenizer=TOKENIZER, config=config, model=model, program=None)
    assert make_subject(loaded).pair("ab", "c") == (before, [*b"c"])
    assert make_subject(loaded).pair("", "c") == ([TOKENIZER.eos_id], [*b"c"])


def reference(log_probabilities, context, continuation):
    ids = [*context, *continuation]
    actual = log_probabilities(ids[:-1])
    return sum(actual[i - 1, ids[i]] for i in range(len(context), len(ids)))


@pytest.mark.parametrize(("length", "stride"), [(8, None), (8, 3), (8, 8), (5, 1), (100, None), (100, 7)])
def test_windows_predict_each_token_once_with_as_much_context_as_fits(length, stride):
    ids, counted = list(range(100, 123)), [i % 5 != 0 for i in range(23)]
    positions = []
    for window in windows(ids, counted, length=length, stride=stride):
        assert len(window.inputs) == len(window.targets) <= length
        assert list(window.targets[:-1]) == list(window.inputs[1:])
        new = [t for t, c in zip(window.targets, window.counted, strict=True) if c]
        assert len(new) <= (stride or length)
        assert window.targets[-1] - 100 < length or len(window.inputs) == length
        positions += new
    assert positions == [100 + i for i in range(1, 23) if counted[i]]


def test_scores_match_the_logits_in_any_batch(model, log_probabilities):
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 256, m).tolist(), rng.integers(0, 256, n).tolist())
             for m, n in [(1, 1), (3, 9), (20, 40), (40, 20), (7, 1)]]  # fmt: skip
    expected = [reference(log_probabilities, *pair) for pair in pairs]
    for tokens in (1, 128):
        actual = Scorer(model, length=60, batch_tokens=tokens).continuations(pairs)
        np.testing.assert_allclose([s.log_likelihood for s in actual], expected, rtol=2e-5)
        assert [s.tokens for s in actual] == [1, 9, 40, 20, 1]


def test_greedy_says_whether_each_token_is_the_likeliest(model, log_probabilities):
    start = [5, 6]
    best = list(start)
    for _ in range(4):
        best.append(int(log_probabilities(best)[-1].argmax()))
    scores = Scorer(model, length=32).continuations([(start, best[2:]), (start, [*best[2:5], (best[5] + 1) % 257])])
    assert [s.greedy for s in scores] == [True, False]


def test_a_long_text_is_scored_in_windows_and_a_long_context_is_cut(model, log_probabilities):
    ids = np.random.default_rng(1).integers(0, 256, 50).tolist()
    scorer = Scorer(model, length=16)
    (whole,) = scorer([(ids, [True] * 50)])
    parts = [
        (ids[max(0, stop - 17) : start], ids[start:stop]) for start, stop in ((1, 17), (17, 33), (33, 49), (49, 50))
    ]
    assert math.isclose(whole.log_likelihood, sum(reference(log_probabilities, *p) for p in parts), rel_tol=2e-5)
    (cut,) = scorer.continuations([(ids[:40], ids[40:45])])
    assert math.isclose(cut.log_likelihood, reference(log_probabilities, ids[28:40], ids[40:45]), rel_tol=2e-5)
    with pytest.raises(RequestError, match="continuation of 17 tokens after 1 cannot be scored"):
        scorer.continuations([([1], [2] * 17)])
    with pytest.raises(RequestError, match="cannot compute likelihoods"):
        Scorer(object(), length=1)


def test_perplexity_and_bits_are_of_all_tokens_and_bytes(model, log_probabilities):
    texts = ("näh", "abc def")
    result = evaluate(subject(model, TEXT, length=32), Data("text", texts, ("", "")))
    total = -sum(reference(log_probabilities, [256], TOKENIZER.encode(t)) for t in texts)
    assert (result["rows"], result["tokens"], result["bytes"]) == (2, 11, 11)
    assert math.isclose(result["loss"], total / 11, rel_tol=2e-5)
    assert math.isclose(result["perplexity"], math.exp(total / 11), rel_tol=2e-4)
    assert math.isclose(result["bits_per_byte"], total / 11 / math.log(2), rel_tol=2e-5)


def test_of_conversations_the_answers_count(model, log_probabilities):
    row = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "é"}]}
    result = evaluate(subject(model, TEXT, length=64), Data("chat", (row,), ("",)))
    answer = [*"é".encode(), 256]
    expected = -reference(log_probabilities, b"User:\na?\n\nAssistant:\n", answer)
    assert (result["tokens"], result["bytes"]) == (3, 2)
    assert math.isclose(result["loss"], expected / 3, rel_tol=2e-5)
    assert math.isclose(result["bits_per_byte"], expected / 2 / math.log(2), rel_tol=2e-5)


def test_accuracy_is_of_the_likeliest_choice_and_per_character(model, log_probabilities):
    rng = np.random.default_rng(3)
    words = ["a", "bb", "ccc ddd", "e" * 12, "f g"]
    questions = tuple(
        Question("Is it? " * int(rng.integers(0, 2)), tuple(rng.permutation(words)[:3].tolist()), int(rng.integers(3)))
        for _ in range(12)
    )
    result = evaluate(subject(model, TEXT, length=48), Data("choices", questions, ("",) * 12))
    right, normalized = [], []
    for q in questions:
        prompt = q.prompt.rstrip()  # its last space belongs to the choice
        rest = q.prompt[len(prompt) :] + " "
        values = [reference(log_probabilities, [256, *prompt.encode()], (rest + c).encode()) for c in q.choices]
        right.append(int(np.argmax(values)) == q.answer)
        normalized.append(int(np.argmax([v / len(c) for v, c in zip(values, q.choices, strict=True)])) == q.answer)
    assert right != normalized
    assert result["accuracy"] == np.mean(right)
    assert result["accuracy_normalized"] == np.mean(normalized)
    assert math.isclose(result["accuracy_stderr"], np.std(right, ddof=1) / math.sqrt(12))
    with pytest.raises(InputError, match=r"q\.jsonl, line 3: a choice has 13 tokens"):
        evaluate(
            subject(model, TEXT, length=12),
            Data("choices", (Question("", ("e" * 12, "b"), 0),), ("q.jsonl, line 3",)),
        )


def test_a_choice_is_normalized_by_its_characters_and_not_by_its_bytes():
    scores = {"éééé": -4.4, "aaaaa": -5.0}  # per character -1.1 and -1.0, per byte -0.55 and -1.0
    scorer = SimpleNamespace(
        length=9, continuations=lambda pairs: [SimpleNamespace(log_likelihood=scores[text]) for _, text in pairs]
    )
    fake = SimpleNamespace(scorer=scorer, pair=lambda prompt, choice: (prompt, choice))
    result = choices(fake, Data("choices", (Question("", tuple(scores), 1, ""),), ("",)))
    assert (result["accuracy"], result["accuracy_normalized"]) == (0.0, 1.0)


def test_a_text_is_greedy_only_if_all_of_its_rows_are(monkeypatch):
    monkeypatch.setattr(Scorer, "__init__", lambda self: None)
    scorer = Scorer()
    scorer.length, scorer.batch_tokens = 4, 8
    rows = iter([True, False])
    monkeypatch.setattr(scorer, "_run", lambda batch, *_: ([-1.0] * len(batch), [next(rows) for _ in batch]))
    [score] = scorer([(range(9), [True] * 9)])
    assert (score.log_likelihood, score.tokens, score.greedy) == (-2.0, 8, False)
