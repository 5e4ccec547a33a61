"""Optional abilities of tokenizers, and the behavior of readers without them."""

from axlearn_core.config import Configurable
from axlearn_plugins_transformer.text.protocols import bos_id_of, bos_token_of, first_token, folder_of


class Plain(Configurable):
    eos_id = 9


class Rich(Plain):
    bos_id, bos_token, folder = 4, "<s>", "/somewhere"


def test_what_a_tokenizer_may_have():
    assert [f(Plain()) for f in (bos_id_of, bos_token_of, folder_of)] == [None, None, None]
    assert [f(Rich()) for f in (bos_id_of, bos_token_of, folder_of)] == [4, "<s>", "/somewhere"]
    assert (first_token(Plain()), first_token(Rich())) == (9, 4)  # type: ignore[arg-type]
