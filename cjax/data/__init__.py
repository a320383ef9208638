"""What is trained on: random-access sources, and batches of them that depend on a seed and a position alone."""

from cjax.data.corpus import read_documents, read_token_file, standard_library
from cjax.data.stream import batches
from cjax.data.text import TextData, text_data
from cjax.data.vocabulary import BPE, Bytes, Numbers, Vocabulary, read_bpe

__all__ = [
    "BPE",
    "Bytes",
    "Numbers",
    "TextData",
    "Vocabulary",
    "batches",
    "read_bpe",
    "read_documents",
    "read_token_file",
    "standard_library",
    "text_data",
]
