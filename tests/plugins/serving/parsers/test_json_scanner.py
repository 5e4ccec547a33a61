"""`JsonScanner` accepts what `json` accepts, in pieces of any size."""

import json
import random

import pytest

from axlearn_plugins_serving.parsers.json_scanner import MAX_DEPTH, JsonScanner, is_json

VALID = ['{"a": [1, -2.5e+3, true, null], "b": {}}', "[]", '"\\u00e9\\n\\"/😀"', "0", '[[], {"": ""}]', " \n{}"]
INVALID = [
    "{a: 1}",
    '{"a" 1}',
    "[1,]",
    "[,1]",
    "{,}",
    '{"a": 1,}',
    "01",
    "1.",
    "+1",
    "NaN",
    "tru",
    '"\\x"',
    '"\n"',
    "]",
    "'a'",
    "[1 2]",
    "--1",
]


def scan(text, sizes):
    """Return the accepted text, and the scanner."""
    scanner, waiting, accepted = JsonScanner(), "", ""
    rest = text
    while rest and not scanner.complete and not scanner.failed:
        size = next(sizes)
        waiting, rest = waiting + rest[:size], rest[size:]
        end = scanner.scan(waiting, final=not rest)
        accepted, waiting = accepted + waiting[:end], waiting[end:]
    return accepted, scanner


def sizes(size):
    while True:
        yield size


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("text", VALID)
def test_json_is_accepted(text, size):
    accepted, scanner = scan(text, sizes(size))
    assert (accepted, scanner.complete) == (text, True)


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("text", INVALID)
def test_other_text_is_not_accepted(text, size):
    accepted, scanner = scan(text, sizes(size))
    assert not scanner.complete
    assert text.startswith(accepted)


def test_it_stops_at_the_end_of_the_value():
    assert scan('{"a": "}"} and more', sizes(3))[0] == '{"a": "}"}'


def test_it_agrees_with_json_about_random_text():
    rng = random.Random(0)
    tokens = ["{", "}", "[", "]", ",", ":", '"a"', '"', "1", "-", ".5", "e1", "true", "null", " ", "\\", "\\u12", "\n"]
    valid = 0
    for _ in range(20_000):
        text = "".join(rng.choice(tokens) for _ in range(rng.randint(1, 7)))
        try:
            json.loads(text)
            expected = text.strip() == text
        except ValueError:
            expected = False
        valid += expected
        assert is_json(text) == expected, text
    assert valid > 500


def test_the_nesting_is_limited():
    assert is_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not is_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
    assert not is_json("[" * 100_000)


def test_numbers_that_are_too_long_are_not_accepted():
    assert not is_json("1" * 5000)
