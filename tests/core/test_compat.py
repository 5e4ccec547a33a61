"""Patches of libraries that last as long as they are needed."""

import os
import types

import pytest

from axlearn_core import compat


def test_what_was_replaced_comes_back_also_after_an_error():
    owner, records = types.SimpleNamespace(answer=1), []

    def fail():
        with compat.override_attribute(owner, "answer", 2):
            records.append(owner.answer)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert (records, owner.answer) == ([2], 1)


def test_the_original_comes_back_in_whatever_order_replacements_end():
    owner = types.SimpleNamespace(answer=1)
    first, second = (compat.override_attribute(owner, "answer", value) for value in (2, 3))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert owner.answer == 3
    second.__exit__(None, None, None)
    assert owner.answer == 1


def test_what_a_library_no_longer_has_is_an_error():
    with pytest.raises(AttributeError, match="gone"), compat.override_attribute(types.SimpleNamespace(), "gone", 1):
        pass


def test_the_environment_of_the_user_stays(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    compat.use_cpu()
    assert os.environ["JAX_PLATFORMS"] == "cuda"
    compat.use_cpu(override=True)
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_only_the_number_of_devices_is_forgotten(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2")
    compat.forget_device_count()
    assert os.environ["XLA_FLAGS"].split() == ["--xla_a=1", "--xla_b=2"]


@pytest.mark.parametrize(
    ("users", "all_of_them"),
    [
        (None, "glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=8388608"),
        ("", "glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=8388608"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0:glibc.cpu.x86_non_temporal_threshold=8388608"),
        ("glibc.malloc.check=3:", "glibc.malloc.check=3:" + ":".join(compat.TUNABLES)),
    ],
)
def test_tunables_of_the_user_stay(users, all_of_them):
    environment = {} if users is None else {"GLIBC_TUNABLES": users}
    assert compat.glibc_tunables(environment) == all_of_them
    assert compat.glibc_tunables({"GLIBC_TUNABLES": all_of_them}) == all_of_them


def test_tokenizers_take_one_core_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    compat.disable_tokenizer_threads()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    compat.disable_tokenizer_threads()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
