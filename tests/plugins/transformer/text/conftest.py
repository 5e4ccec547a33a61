import json
from pathlib import Path

import numpy as np
import pytest

from axlearn_plugins_transformer.text import small_data


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Write 40 documents of 1 to 90 characters. Each repeats a different letter, which identifies its tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    rows = [{"text": chr(0x30 + i) * int(rng.integers(1, 90))} for i in range(40)]
    for i in range(4):
        (folder / f"{i}.jsonl").write_text("\n".join(json.dumps(r) for r in rows[i::4]))
    (folder / "held.txt").write_text("The quick brown fox. é\n" * 20, encoding="utf-8")
    return folder


@pytest.fixture
def as_large(monkeypatch) -> None:
    """Read data of any size record by record."""
    monkeypatch.setattr(small_data, "LARGE_BYTES", 0)


@pytest.fixture(params=["small", "large"])
def either_size(request) -> str:
    """Run the test with row-by-row and record-by-record reading."""
    if request.param == "large":
        request.getfixturevalue("as_large")
    return request.param
