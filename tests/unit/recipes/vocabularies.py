"""Small tokenizers and texts for the tests of the recipes."""

from __future__ import annotations

import string
from typing import Any

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "dog", "sat", "on", "mat", "barked", "##s", "who", "where", "in", "1987"]


def bert_tokenizer(**options: Any) -> Any:
    """Return a WordPiece tokenizer of a few words and all ASCII characters."""
    from transformers import BertTokenizer

    characters = [c for c in string.ascii_lowercase + string.digits + string.punctuation]
    pieces = [*SPECIAL, *WORDS, *characters, *(f"##{c}" for c in characters)]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocab, **options)


def albert_tokenizer(**options: Any) -> Any:
    """Return a Unigram tokenizer of a few words and all ASCII characters."""
    from transformers import AlbertTokenizer

    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    words = ["▁", *(f"▁{word}" for word in WORDS if not word.startswith("#")), "s"]
    characters = [c for c in string.ascii_lowercase + string.digits + string.punctuation]
    pieces = list(dict.fromkeys([*special, *words, *characters]))
    return AlbertTokenizer(
        vocab=[(piece, -float(number)) for number, piece in enumerate(pieces)], **options
    )
