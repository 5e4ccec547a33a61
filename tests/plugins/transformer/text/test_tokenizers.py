"""Round trips on weird text, byte counts, files that are not tokenizers."""

import hashlib
import json
import sys
from importlib import resources

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from axlearn_core.config import check
from axlearn_core.errors import ConfigError, InputError
from axlearn_plugins_transformer.text import ByteTokenizer, StandardLibrary, TokenizerJson, token_bytes
from support.paths import ROOT

BUILTIN = TokenizerJson.Config(builtin="python-2k").build()
WEIRD = [
    "",
    " ",
    "\n\n\n",
    "\r\n\r",
    "\t\tdef f(x):\n\t    return  x\n",
    "  trailing   \n \n",
    "é漢字🎉\u200d\ufeff\u0301",
    "\0\x01\x7f\x85\u2028",
    "<|endoftext|>",
    "<|endoftext",
    "0x1F + 1_000\\n",
    "ÃƒÂ© Ġ Ċ ▁ <0x0A>",
    "a" * 5000,
]


@pytest.mark.parametrize("tokenizer", [BUILTIN, ByteTokenizer.Config().build()], ids=["python-2k", "bytes"])
@pytest.mark.parametrize("text", WEIRD)
def test_weird_text_round_trips_and_its_bytes_are_counted(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


@hypothesis.given(st.text())
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_text_round_trips(text):
    assert BUILTIN.decode(BUILTIN.encode(text)) == text


def test_invalid_utf8_is_replaced():
    assert ByteTokenizer.Config().build().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_the_shipped_tokenizer_is_small_and_compresses_code():
    raw = resources.files("axlearn_plugins_transformer.text").joinpath("python-2k.json").read_bytes()
    assert len(raw) < 150_000
    assert BUILTIN.vocab_size == 2048
    assert BUILTIN.eos_id == 0
    assert token_bytes(BUILTIN)[0] == 0
    (part,) = StandardLibrary.Config().build().parts("validation")
    texts = [d.text for i in range(len(part.records)) for d in part.records[i]]
    ids = [i for t in texts for i in BUILTIN.encode(t)]
    assert sum(len(t.encode()) for t in texts) / len(ids) > 3.1
    assert BUILTIN.decode(BUILTIN.encode(texts[0])) == texts[0]
    assert len(BUILTIN.encode("\n        ")) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info[:3] != (3, 11, 7) or tokenizers.__version__ != "0.23.3",
    reason="needs Python 3.11.7 and tokenizers 0.23.3, which made the shipped file",
)
def test_the_script_makes_the_shipped_tokenizer(tmp_path):
    script = ROOT / "plugins" / "transformer" / "train_tokenizer.py"
    space = {"__name__": "train_tokenizer", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), space)
    result = space["train"](2048).to_str(pretty=False) + "\n"
    assert result == space["OUT"].read_text()


def test_other_kinds_of_tokenizer_json(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "\u2581the": 3, "\u2581": 4, "é": 5}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    result = tokenizers.Tokenizer(model)
    result.add_special_tokens(["<unk>", "</s>"])
    result.enable_truncation(3)
    result.save(str(tmp_path / "t.json"))
    tokenizer = TokenizerJson.Config(path=str(tmp_path / "t.json")).build()
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 6)
    assert token_bytes(tokenizer).tolist() == [0, 0, 1, 4, 1, 2]
    assert tokenizer.encode("éééééé") == [5] * 6  # nothing is truncated
    by_name = TokenizerJson.Config(path=str(tmp_path / "t.json"), eos="<unk>").build()
    assert by_name.eos_id == 0
    assert by_name.digest == hashlib.sha256((tmp_path / "t.json").read_bytes()).hexdigest()[:16]
    with pytest.raises(InputError, match=r"no end-of-document token: expected '<nope>'"):
        TokenizerJson.Config(path=str(tmp_path / "t.json"), eos="<nope>").build()


def test_a_tokenizer_without_a_byte_table_is_measured_by_decoding():
    class Plain:
        vocab_size, eos_id = 3, 0

        def decode(self, ids):
            return ["<eos>", "a", "é"][ids[0]]

    np.testing.assert_array_equal(token_bytes(Plain()), [0, 1, 2])


def test_bad_tokenizers(tmp_path):
    with pytest.raises(InputError, match=r"nope\.json"):
        TokenizerJson.Config(path=str(tmp_path / "nope.json")).build()
    (tmp_path / "bad.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"bad\.json is not a readable tokenizer.json"):
        TokenizerJson.Config(path=str(tmp_path / "bad.json")).build()
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(InputError, match=r"binary\.json is not a readable tokenizer.json"):
        TokenizerJson.Config(path=str(tmp_path / "binary.json")).build()
    with pytest.raises(ConfigError, match="exactly one of path and builtin"):
        check(TokenizerJson.Config())
    with pytest.raises(ConfigError, match="did you mean: python-2k"):
        check(TokenizerJson.Config(builtin="python2k"))
