"""Losses of the two pretraining heads, for ``step`` and ``weight``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.language_modeling.masking import IGNORED

_ORDER_LABELS = ("sentence_order_label", "next_sentence_label")


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
