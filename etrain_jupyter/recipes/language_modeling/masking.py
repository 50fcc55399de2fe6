"""Sentence order pairs and masked n-grams, drawn by sample, and the losses of the two heads.

The collators of ``transformers`` mask no n-grams, make no sentence order pairs, and draw from a
generator whose state depends on the previous batches. Here, the draws are a function of the job's
seed, the epoch and the sample, so they are the same for any number of workers and after a resume.

Sources: Lan et al., "ALBERT: A Lite BERT for Self-supervised Learning of Language Representations",
2020, and its script ``create_pretraining_data.py``.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from etrain_jupyter.data.batch_key import BatchKey, batch_key
from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.language_modeling.corpus import NUM_SPECIAL

IGNORED = -100
"""Label of a token that is not predicted, as cross entropy ignores it."""
_MULTIPLE = 8
_ORDER_LABELS = ("sentence_order_label", "next_sentence_label")
_SPECIAL = ("cls", "sep", "mask", "pad")

Ints = NDArray[np.int64]


class Masked(NamedTuple):
    """A sequence with masked tokens."""

    ids: Ints
    """Shape ``(L,)``."""
    labels: Ints
    """The original token where it is to be predicted, otherwise ``IGNORED``; shape ``(L,)``."""


class Masking:
    """Make batches for ``AlbertForPreTraining`` and ``BertForPreTraining``; a ``data.collate``.

    Each segment is split at the end of a random sentence. With probability 0.5 its parts are
    swapped. If both parts with the special tokens are longer than ``max_length``, the longer one
    loses a token at its beginning or end, until they fit. Then n-grams of whole words are masked.

    Outside a job, samples are numbered by their position in the list, and seed and epoch are 0.

    Args:
        tokenizer: Tokenizer of the model. Only its vocabulary is sent to the workers.
        max_length: Maximum number of tokens of a sample.
        mask_probability: Fraction of the tokens to predict.
        max_predictions: Maximum number of tokens to predict in a sample; None for no limit.
            Google's scripts use 20 for 128 tokens.
        max_ngram: Maximum number of words in an n-gram; n has a weight of 1/n.
        order_label: Key of the labels of the pairs: 0 in order, 1 if swapped.
            ``next_sentence_label`` is what ``BertForPreTraining`` reads.
        pad_to_max_length: True for batches of equal shape, as ``compile`` prefers them.

    Raises:
        RecipeError: If the tokenizer lacks special tokens, or an argument is out of range.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int = 512,
        mask_probability: float = 0.15,
        max_predictions: int | None = None,
        max_ngram: int = 3,
        order_label: Literal[
            "sentence_order_label", "next_sentence_label"
        ] = "sentence_order_label",
        pad_to_max_length: bool = False,
    ) -> None:
        if max_length < NUM_SPECIAL + 2 or max_ngram < 1 or not 0 < mask_probability < 1:
            raise RecipeError(
                f"max_length={max_length}, max_ngram={max_ngram} and mask_probability="
                f"{mask_probability} must be at least {NUM_SPECIAL + 2}, at least 1, and between 0 "
                "and 1."
            )
        special = {name: getattr(tokenizer, f"{name}_token_id") for name in _SPECIAL}
        missing = [name.upper() for name, id in special.items() if id is None]
        if missing:
            raise RecipeError(
                f"{type(tokenizer).__name__} has no {' and no '.join(missing)} token, which "
                "pretraining needs. Use the tokenizer of a model such as BERT or ALBERT."
            )
        self._cls, self._sep, self._mask, self._pad = (special[name] for name in _SPECIAL)
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._continues = continuations(pieces)
        special_ids = np.array(tokenizer.all_special_ids)
        self._ordinary = np.setdiff1d(np.arange(len(pieces)), special_ids)
        self._max_length = max_length
        self._mask_probability = mask_probability
        self._max_predictions = max_predictions
        self._max_ngram = max_ngram
        self._order_label = order_label
        self._pads_to_max_length = pad_to_max_length

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a batch of segments.

        Args:
            samples: Rows of ``write_corpus``: ``tokens`` and ``ends``.

        Returns:
            ``input_ids``, ``attention_mask``, ``token_type_ids`` and ``labels`` of shape
            ``(B, L)``, and the label of each pair, shape ``(B,)``.
        """
        key = batch_key() or BatchKey(seed=0, epoch=0, samples=tuple(range(len(samples))))
        made = [
            self._make(sample, generator)
            for sample, generator in zip(samples, key.generators(), strict=True)
        ]
        longest = max(len(masked.ids) for masked, _, _ in made)
        length = (
            self._max_length
            if self._pads_to_max_length
            else min(self._max_length, -(-longest // _MULTIPLE) * _MULTIPLE)
        )
        shape = (len(made), length)
        ids, labels = np.full(shape, self._pad), np.full(shape, IGNORED)
        types, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, (masked, num_first, _) in enumerate(made):
            end = len(masked.ids)
            ids[row, :end], labels[row, :end] = masked
            types[row, num_first:end] = 1
            attention[row, :end] = 1
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attention),
            "token_type_ids": torch.from_numpy(types),
            "labels": torch.from_numpy(labels),
            self._order_label: torch.tensor([int(is_swapped) for _, _, is_swapped in made]),
        }

    def _make(
        self, sample: Mapping[str, Any], generator: np.random.Generator
    ) -> tuple[Masked, int, bool]:
        """Return the masked sequence, the size of its first part, and whether it is swapped."""
        tokens = np.asarray(sample["tokens"], dtype=np.int64)
        ends = np.asarray(sample["ends"], dtype=np.int64)
        border = int(ends[generator.integers(len(ends) - 1)])
        first, second = tokens[:border], tokens[border:]
        is_swapped = bool(generator.random() < 0.5)
        if is_swapped:
            first, second = second, first
        first, second = truncate_pair(first, second, self._max_length - NUM_SPECIAL, generator)
        ids = np.concatenate([[self._cls], first, [self._sep], second, [self._sep]])
        num_first = len(first) + 2
        words = words_of(self._continues[ids], fixed=(0, num_first - 1, len(ids) - 1))
        limit = max(1, round(len(ids) * self._mask_probability))
        masked = mask_words(
            ids,
            words,
            generator,
            num_predictions=min(limit, self._max_predictions or limit),
            mask_id=self._mask,
            replacements=self._ordinary,
            max_ngram=self._max_ngram,
        )
        return masked, num_first, is_swapped


def mask_words(
    ids: Ints,
    words: Sequence[range],
    generator: np.random.Generator,
    *,
    num_predictions: int,
    mask_id: int,
    replacements: Ints,
    max_ngram: int = 3,
) -> Masked:
    """Mask n-grams of whole words.

    Words are visited in random order. At each word, n is drawn from 1 to ``max_ngram`` with weights
    1/n, and reduced until the n-gram fits into the remaining budget. N-grams do not overlap. Of the
    chosen tokens, 80 % become the mask, 10 % are kept, and 10 % become a random token.

    Args:
        ids: Tokens, shape ``(L,)``.
        words: Tokens of each word, in order.
        generator: Source of randomness.
        num_predictions: Maximum number of tokens to predict.
        mask_id: The mask.
        replacements: Tokens that may replace another one.
        max_ngram: Maximum number of words in an n-gram.
    """
    masked, labels = ids.copy(), np.full(len(ids), IGNORED)
    is_taken = np.zeros(len(ids), dtype=np.bool_)
    weights = np.cumsum(1.0 / np.arange(1, max_ngram + 1))
    draws = generator.random(len(words))
    num_taken = 0
    for word in generator.permutation(len(words)).tolist():
        if num_taken >= num_predictions:
            break
        most = min(max_ngram, len(words) - word)
        n = int(np.searchsorted(weights[:most], draws[word] * weights[most - 1], side="right")) + 1
        while n and sum(map(len, words[word : word + n])) > num_predictions - num_taken:
            n -= 1
        if not n:
            continue
        chosen = np.concatenate([np.asarray(words[i]) for i in range(word, word + n)])
        if is_taken[chosen].any():
            continue
        is_taken[chosen] = True
        num_taken += len(chosen)
    places = np.flatnonzero(is_taken)
    labels[places] = ids[places]
    fates = generator.random(len(places))
    masked[places[fates < 0.8]] = mask_id
    others = places[fates >= 0.9]
    masked[others] = replacements[generator.integers(len(replacements), size=len(others))]
    return Masked(masked, labels)


def words_of(continues: NDArray[np.bool_], *, fixed: Sequence[int]) -> list[range]:
    """Return the tokens of each word; a ``fixed`` token is in no word, and separates two words."""
    begins_word = ~continues
    begins_word[list(fixed)] = True
    begins_word[[place + 1 for place in fixed if place + 1 < len(continues)]] = True
    begins = [*np.flatnonzero(begins_word).tolist(), len(continues)]
    return [range(begin, end) for begin, end in itertools.pairwise(begins) if begin not in fixed]


def continuations(pieces: Sequence[str]) -> NDArray[np.bool_]:
    """Return which pieces of a vocabulary continue the word of the preceding piece.

    WordPiece marks them with ``##``. SentencePiece marks the first piece of a word instead; there,
    as in ALBERT's script, only pieces of English letters and punctuation continue a word.
    """
    if any(piece.startswith("##") for piece in pieces):
        return np.array([piece.startswith("##") for piece in pieces])
    letters = frozenset(string.ascii_letters + string.punctuation)
    return np.array(
        [
            not piece.startswith(("▁", "Ġ", "<", "["))
            and piece not in string.punctuation
            and set(piece) <= letters
            for piece in pieces
        ]
    )


def truncate_pair(
    first: Ints, second: Ints, length: int, generator: np.random.Generator
) -> tuple[Ints, Ints]:
    """Remove tokens at the ends of the longer part until both have ``length`` tokens together."""
    sizes = [len(first), len(second)]
    begins = [0, 0]
    while sizes[0] + sizes[1] > length:
        longer = 0 if sizes[0] > sizes[1] else 1
        # Both ends, for more variety and less bias.
        begins[longer] += int(generator.random() < 0.5)
        sizes[longer] -= 1
    return tuple(  # type: ignore[return-value]
        part[begin : begin + size]
        for part, begin, size in zip((first, second), begins, sizes, strict=True)
    )


def step(model: Any, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the loss of a batch of ``Masking``, and that of each head.

    The sum of the heads' losses is the loss of ``AlbertForPreTraining`` and ``BertForPreTraining``.
    Use it as ``step``, to follow both heads on the dashboard.

    Returns:
        ``loss``, ``mlm_loss`` (the mean over the masked tokens), ``order_loss`` and
        ``order_accuracy`` (the means over the samples).

    Raises:
        RecipeError: If the batch has no labels of pairs, or the model lacks the second head.
    """
    found = [key for key in _ORDER_LABELS if key in batch]
    if not found:
        raise RecipeError(
            f"a batch has the keys {', '.join(batch)}, but none of {', '.join(_ORDER_LABELS)}. Use "
            "language_modeling.Masking(tokenizer) as data.collate."
        )
    inputs = {key: value for key, value in batch.items() if key not in ("labels", *_ORDER_LABELS)}
    output = model(**inputs)
    order_logits = getattr(output, "sop_logits", getattr(output, "seq_relationship_logits", None))
    if order_logits is None:
        raise RecipeError(
            f"the model returns {type(output).__name__} without logits of the sentence order. Use "
            "AlbertForPreTraining or BertForPreTraining."
        )
    is_masked = batch["labels"] != IGNORED
    mlm_loss = F.cross_entropy(
        output.prediction_logits[is_masked].float(), batch["labels"][is_masked]
    )
    target = batch[found[0]]
    order_loss = F.cross_entropy(order_logits.float(), target)
    return {
        "loss": mlm_loss + order_loss,
        "mlm_loss": mlm_loss,
        "order_loss": order_loss,
        "order_accuracy": (order_logits.argmax(dim=-1) == target).float().mean(),
    }


def num_masked(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of masked tokens, for ``weight``.

    With it, the loss of a step is the mean over all its masked tokens, however they are shared
    between workers.
    """
    return int((batch["labels"] != IGNORED).sum())
