"""A ``transformers`` model from the cell to ``from_pretrained``, with typical user code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.integration.conftest import PATIENCE_S

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(400)

NUM_SAMPLES, LENGTH, VOCABULARY = 24, 12, 50


class Tokens(Dataset):
    """Random tokens as dicts, half of them masked for the loss."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        labels = torch.where(torch.arange(LENGTH) % 2 == 0, ids, -100)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def small_albert() -> Any:
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=LENGTH,
    )
    return transformers.AlbertForMaskedLM(config)


def test_trained_albert_is_exported_and_loaded_by_from_pretrained(
    submit: Any, tmp_path: Path
) -> None:
    """The output layer shares the embedding's weight, which is saved under both names."""
    job = submit(
        model=small_albert,
        data={"train": Tokens()},
        optimizer={"name": "AdamW", "lr": 0.01},
        batch={"global": 8},
        steps=6,
        workers={"min": 2, "max": 2},
    )
    assert job.wait(PATIENCE_S) == "finished"
    trained = job.load_into(small_albert()).eval()
    ids = Tokens().ids
    with torch.no_grad():
        expected = trained(input_ids=ids).logits

    folder = job.export(tmp_path / "albert", format="transformers")
    opened, report = transformers.AlbertForMaskedLM.from_pretrained(
        folder, output_loading_info=True
    )

    assert not any(report.values()), report
    assert opened.config.to_dict()["hidden_size"] == 16
    assert opened.config.architectures == ["AlbertForMaskedLM"]
    with torch.no_grad():
        assert torch.equal(opened.eval()(input_ids=ids).logits, expected)
    words = opened.albert.embeddings.word_embeddings.weight
    assert opened.predictions.decoder.weight is words
    assert not torch.equal(words, small_albert().albert.embeddings.word_embeddings.weight)
    body = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    assert torch.equal(body.embeddings.word_embeddings.weight, words)
    # The checkpoint itself is also such a folder.
    again = transformers.AlbertForMaskedLM.from_pretrained(job.checkpoints()[0]["where"])
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, expected)
    # A single file can be loaded into the model class.
    path = job.export(tmp_path / "albert.safetensors")
    weights = transformers.AlbertForMaskedLM(opened.config)
    from safetensors.torch import load_file

    weights.load_state_dict(load_file(path))
    with torch.no_grad():
        assert torch.equal(weights.eval()(input_ids=ids).logits, expected)
