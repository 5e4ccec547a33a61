import jax.numpy as jnp
import pytest

from axlearn_core.errors import RequestError
from axlearn_plugins_transformer.cache_spec import (
    CacheEntry,
    check_prefix,
    check_returned,
    empty_cache,
    has_states,
    read_prefix,
    read_window,
    spec_of,
)


def entry(per, **options):
    return CacheEntry(per=per, shape=(2, 3), dtype="bfloat16", **options)


def test_arrays_have_an_item_for_each_token_page_or_row():
    spec = {"token": entry("token"), "page": (entry("page", page_size=4),), "request": entry("request")}
    cache = empty_cache(spec, 2, 10)
    assert cache["token"].shape == (2, 10, 2, 3)
    assert cache["page"][0].shape == (6, 2, 3)
    assert cache["request"].shape == (2, 2, 3)
    assert cache["request"].dtype == jnp.bfloat16


def test_a_window_is_known_only_if_every_cache_of_tokens_has_one():
    assert read_window((entry("page", window=8), entry("page", window=12), entry("request"))) == 12
    assert read_window((entry("page", window=8), entry("page"))) is None
    assert read_window((entry("request"),)) is None


def test_a_prompt_contains_the_longest_prefix():
    spec = (entry("page", prefix=4), entry("page", prefix=9), entry("request"))
    assert read_prefix(spec) == 9
    assert read_prefix((entry("request"),)) == read_prefix(()) == 0
    check_prefix(9, read_prefix(spec))
    with pytest.raises(RequestError, match=r"the prompt has 8 tokens, but the first 9 tokens.*\n.*at least 9\n.*fix:"):
        check_prefix(8, read_prefix(spec))


def test_a_layer_without_a_cache_is_named():
    with pytest.raises(
        RequestError, match=r"object cannot generate text: it has no method `cache_spec`\n(.*\n)+.*KeepsCache"
    ):
        spec_of(object())


def test_states_belong_to_requests():
    assert has_states({"a": entry("token"), "b": entry("request")})
    assert not has_states({"a": entry("page")})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("per", "tokens", "token, page, request"),
        ("shape", (2, 0), "positive sizes"),
        ("dtype", "float33", "the name of a dtype"),
        ("axes", ("kv",), r"a name for each size of \(2, 3\)"),
        ("page_size", 0, "a positive number"),
        ("window", 0, "a positive number"),
        ("prefix", -1, "a number of tokens"),
        ("layers", 0, "a positive number"),
    ],
)
def test_an_impossible_entry_is_refused(name, value, expected):
    with pytest.raises(RequestError, match=rf"CacheEntry\.{name}: not possible\n.*got: .*\n.*expected: .*{expected}"):
        CacheEntry(**{"per": "request", "shape": (2, 3), "dtype": "bfloat16", name: value})


@pytest.mark.parametrize(
    "returned", [None, {"state": jnp.zeros((2, 4))}, jnp.zeros((2, 3)), jnp.zeros((2, 4), jnp.bfloat16)]
)
def test_a_layer_that_returns_another_cache_is_named(returned):
    cache = jnp.zeros((2, 4))
    check_returned(object(), cache, cache + 1)
    with pytest.raises(RequestError, match=r"object returned a cache .*\n *got: .*\n *expected: float32\[2, 4\]"):
        check_returned(object(), cache, returned)
