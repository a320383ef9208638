"""What is trained on: random-access sources, and batches of them that depend on a seed and a position alone."""

from cjax.data.dataset import Dataset, Rows, hold_out
from cjax.data.images.arrays import ImageArrays
from cjax.data.images.images import ImageData, image_data
from cjax.data.sources import HuggingFace, Mixture, Source
from cjax.data.stream import batches
from cjax.data.tasks.labelled import Labelled, labelled_data, read_labelled
from cjax.data.tasks.masking import Masking, masked_data
from cjax.data.tasks.pairs import pair_data, read_pairs
from cjax.data.tasks.spans import Spans, span_data, span_lengths
from cjax.data.text.corpus import read_documents, read_token_file, standard_library
from cjax.data.text.text import TextData, text_data
from cjax.data.text.tokenizer import Tokenizer, read_tokenizer, train_tokenizer
from cjax.data.text.vocabulary import BPE, Bytes, Numbers, Vocabulary, read_bpe

__all__ = [
    "BPE",
    "Bytes",
    "Dataset",
    "HuggingFace",
    "ImageArrays",
    "ImageData",
    "Labelled",
    "Masking",
    "Mixture",
    "Numbers",
    "Rows",
    "Source",
    "Spans",
    "TextData",
    "Tokenizer",
    "Vocabulary",
    "batches",
    "hold_out",
    "image_data",
    "labelled_data",
    "masked_data",
    "pair_data",
    "read_bpe",
    "read_documents",
    "read_labelled",
    "read_pairs",
    "read_token_file",
    "read_tokenizer",
    "span_data",
    "span_lengths",
    "standard_library",
    "text_data",
    "train_tokenizer",
]
