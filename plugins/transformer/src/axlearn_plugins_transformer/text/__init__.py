"""Text input: sources, tokenizers, packing, conversations, batch iterators."""

from axlearn_plugins_transformer.text.batch_iterator import Batches
from axlearn_plugins_transformer.text.chat_input import ChatInput
from axlearn_plugins_transformer.text.chat_template import ChatTemplate
from axlearn_plugins_transformer.text.conversations import ChatFiles, Conversation
from axlearn_plugins_transformer.text.examples import Example, example
from axlearn_plugins_transformer.text.fingerprint import DataFile
from axlearn_plugins_transformer.text.language_model import LanguageModelInput
from axlearn_plugins_transformer.text.records import Document, Records
from axlearn_plugins_transformer.text.sources import Files, Mixture, Part, Source, StandardLibrary
from axlearn_plugins_transformer.text.tokenizers import ByteTokenizer, TokenizerJson, token_bytes

__all__ = [
    "Batches", "ByteTokenizer", "ChatFiles", "ChatInput", "ChatTemplate", "Conversation", "DataFile", "Document", "Example",
    "Files", "LanguageModelInput", "Mixture", "Part", "Records", "Source", "StandardLibrary", "TokenizerJson", "example",
    "token_bytes",
]  # fmt: skip
