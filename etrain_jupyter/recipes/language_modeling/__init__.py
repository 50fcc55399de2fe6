"""Pretrain ALBERT and BERT: masked words and sentence order.

::

    corpus = lm.write_corpus(lm.read_documents("wiki.txt"), tokenizer, to="s3://bucket/corpus")
    corpus                                                 data.train
    lm.Masking(tokenizer)                                  data.collate
    lm.step, lm.num_masked                                 step, weight
"""

from etrain_jupyter.recipes.language_modeling.corpus import (
    read_documents,
    segments,
    split_sentences,
    write_corpus,
)
from etrain_jupyter.recipes.language_modeling.masking import Masking, mask_words, num_masked, step

__all__ = [
    "Masking",
    "mask_words",
    "num_masked",
    "read_documents",
    "segments",
    "split_sentences",
    "step",
    "write_corpus",
]
