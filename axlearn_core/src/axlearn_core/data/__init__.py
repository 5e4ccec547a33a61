"""Input pipelines: sources, tokenizers, packing, and the iterator whose position a checkpoint keeps."""

from axlearn_core.data.batches import Batches
from axlearn_core.data.language_model import LanguageModelInput
from axlearn_core.data.pipeline import Example, example
from axlearn_core.data.records import Document, Records
from axlearn_core.data.sources import Files, Mixture, Part, Source, StandardLibrary
from axlearn_core.data.storage import DataFile
from axlearn_core.data.tokenizers import ByteTokenizer, TokenizerJson, token_bytes

__all__ = [
    "Batches", "ByteTokenizer", "DataFile", "Document", "Example", "Files", "LanguageModelInput", "Mixture", "Part",
    "Records", "Source", "StandardLibrary", "TokenizerJson", "example", "token_bytes",
]  # fmt: skip
