import json
from pathlib import Path

import numpy as np
import pytest

from axlearn_plugins_transformer.text import small_data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """40 documents of 1 to 90 characters, each of one letter of its own, so that every token tells where it is from."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    rows = [{"text": chr(0x30 + i) * int(rng.integers(1, 90))} for i in range(40)]
    for i in range(4):
        (folder / f"{i}.jsonl").write_text("\n".join(json.dumps(r) for r in rows[i::4]))
    (folder / "held.txt").write_text("The quick brown fox. é\n" * 20, encoding="utf-8")
    return folder


@pytest.fixture
def as_large(monkeypatch) -> None:
    """Data of any size is read record by record."""
    monkeypatch.setattr(small_data, "LARGE_BYTES", 0)


@pytest.fixture(params=["small", "large"])
def either_size(request) -> str:
    """The data of the test is dealt by rows, and read record by record."""
    if request.param == "large":
        request.getfixturevalue("as_large")
    return request.param
