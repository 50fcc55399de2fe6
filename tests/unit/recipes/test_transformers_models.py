"""Use of ``transformers`` models in a job: what is sent, how they train, and the loaded model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from etrain_jupyter.bundle.capture import capture_bundle
from etrain_jupyter.bundle.restore import open_bundle
from etrain_jupyter.config.schema import TrainConfig
from etrain_jupyter.errors import BundleError
from etrain_jupyter.notebook.job.run_store import RunStore
from etrain_jupyter.notebook.job.training_job import TrainingJob
from etrain_jupyter.recipes import language_modeling as lm
from etrain_jupyter.recipes import squad
from etrain_jupyter.recipes.squad import Gold, Question
from etrain_jupyter.storage.checkpoints import LocalStore, Manifest
from etrain_jupyter.trainer.workload import Workload, build_workload
from tests.unit.recipes.vocabularies import albert_tokenizer, bert_tokenizer

transformers: Any = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CONTEXT = "The cat sat on the mat."
QUESTION = Question(
    id="a",
    text="who sat",
    context=CONTEXT,
    golds=(Gold(text="cat", start=CONTEXT.index("cat")),),
    may_be_unanswerable=True,
)


def small_bert(kind: str = "QuestionAnswering") -> Any:
    config = transformers.BertConfig(vocab_size=len(bert_tokenizer()), **SMALL)
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{kind}")(config)


def small_albert() -> Any:
    config = transformers.AlbertConfig(
        vocab_size=len(albert_tokenizer()), embedding_size=8, **SMALL
    )
    return transformers.AlbertForQuestionAnswering(config)


def features(tokenizer: Any) -> squad.Features:
    return squad.Features([QUESTION], tokenizer, is_training=True, max_length=32)


# --- what is sent ---


def test_cell_with_from_pretrained_sends_the_name_and_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    config = transformers.BertConfig(**{**SMALL, "vocab_size": 50_000, "hidden_size": 32})
    transformers.BertForQuestionAnswering(config).save_pretrained(folder)
    assert (folder / "model.safetensors").stat().st_size > 6_000_000
    names = {
        "AutoModelForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
        "NAME": str(folder),
    }

    bundle = capture_bundle({"model": "AutoModelForQuestionAnswering.from_pretrained(NAME)"}, names)

    assert len(bundle.data) < 10_000
    opened = open_bundle(bundle.data).evaluate("model")
    assert opened.bert.embeddings.word_embeddings.weight.shape == (50_000, 32)


class LockedTokenizer(transformers.BertTokenizer):  # type: ignore[misc, name-defined]
    """A tokenizer that cannot be pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'tokenizers.CustomNormalizer' object")


def locked_tokenizer() -> Any:
    return LockedTokenizer(vocab=bert_tokenizer().get_vocab())


def test_features_and_masking_are_sent_without_their_tokenizer() -> None:
    names = {
        "train": features(locked_tokenizer()),
        "masking": lm.Masking(locked_tokenizer(), max_length=32),
    }

    opened = open_bundle(
        capture_bundle({"data.train": "train", "data.collate": "masking"}, names).data
    )

    expected = features(bert_tokenizer())[0]
    sample = opened.evaluate("data.train")[0]
    assert {key: value.tolist() for key, value in sample.items()} == {
        key: value.tolist() for key, value in expected.items()
    }
    rows = [{"tokens": [7, 8, 9, 10], "ends": [2, 4]}]
    assert opened.evaluate("data.collate")(rows)["input_ids"].shape == (1, 8)


def test_error_names_a_tokenizer_that_cannot_be_pickled() -> None:
    names = {"collate": functools.partial(max, locked_tokenizer())}

    with pytest.raises(
        BundleError, match=r"'collate'(.|\n)*LockedTokenizer(.|\n)*CustomNormalizer"
    ):
        capture_bundle({"data.collate": "collate"}, names)


# --- training ---


class References:
    """Expressions of a cell, already evaluated."""

    def __init__(self, **values: Any) -> None:
        self._values = values

    def evaluate(self, key: str) -> Any:
        return self._values[key]


def workload(model: Any, tokenizer: Any, **optimizer: Any) -> Workload:
    config = TrainConfig.model_validate(
        {
            "model": "model",
            "data": {"train": "train", "collate": "collate"},
            "optimizer": {"name": "AdamW", "lr": 0.1, **optimizer},
            "batch": {"global": 2},
            "steps": 1,
        }
    )
    values = {
        "model": model,
        "data.train": features(tokenizer),
        "data.collate": squad.collate,
    }
    return build_workload(config, References(**values), torch.device("cpu"))


def gradients_of(work: Workload) -> dict[str, torch.Tensor]:
    train = features(bert_tokenizer())
    work.forward(work.module, squad.collate([train[0], train[0]]), 2, 2).loss.backward()
    return {
        name: parameter.grad
        for name, parameter in work.model.named_parameters()
        if parameter.grad is not None
    }


def test_gradient_checkpointing_computes_layers_twice_and_the_same_gradients() -> None:
    plain, saving = small_bert(), small_bert()
    saving.activation_checkpointing_enable()
    calls: list[int] = []
    for number, layer in enumerate(saving.bert.encoder.layer):
        layer.attention.register_forward_hook(lambda *_, number=number: calls.append(number))

    expected = gradients_of(workload(plain, bert_tokenizer()))
    found = gradients_of(workload(saving, bert_tokenizer()))

    assert calls == [0, 1, 1, 0], "the forward pass, then each layer again in the backward pass"
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_albert_refuses_gradient_checkpointing_as_documented() -> None:
    with pytest.raises(ValueError, match="AlbertForQuestionAnswering does not support"):
        small_albert().activation_checkpointing_enable()


@pytest.mark.parametrize(
    ("make_model", "make_tokenizer"),
    [(small_bert, bert_tokenizer), (small_albert, albert_tokenizer)],
    ids=["bert", "albert"],
)
def test_no_decay_exempts_in_every_layer_what_the_trainer_of_transformers_exempts(
    make_model: Any, make_tokenizer: Any
) -> None:
    model = make_model()

    work = workload(model, make_tokenizer(), weight_decay=0.01, no_decay="auto")

    decayed = {
        id(parameter)
        for group in work.optimizer.param_groups
        if group["weight_decay"] > 0
        for parameter in group["params"]
    }
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    trainer = transformers.Trainer
    assert names == set(trainer.get_decay_parameter_names(None, model))
    assert any("attention" in name for name in names)
    assert not any("bias" in name or "LayerNorm" in name for name in names)


# --- the loaded model ---


@pytest.fixture
def saved_job(tmp_path: Path) -> Callable[[Any], TrainingJob]:
    """Return a function that returns a job with the checkpoint of a model."""

    def save_job(model: Any) -> TrainingJob:
        record = RunStore(tmp_path / "runs").create(
            {"name": "lm", "created": 1.0, "config": {"model": "model"}}, job_id="lm-1"
        )
        store = LocalStore(record.folder)
        folder = store.begin(10)
        tensors = {name: value.clone() for name, value in model.state_dict().items()}
        contents = {"model.safetensors": save(tensors, {"format": "pt"}), "state.json": b"{}"}
        parts = {name: store.put_part(folder, name, data) for name, data in contents.items()}
        manifest = Manifest(
            step=10,
            parts=parts,
            job_id="lm-1",
            generation=1,
            config_digest="",
            created=1.0,
        )
        assert store.commit(manifest)
        return TrainingJob(record, None)

    return save_job


def test_loaded_model_generates_text(saved_job: Any) -> None:
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    trained = transformers.GPT2LMHeadModel(config)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = torch.tensor([[3, 1, 4]])
    torch.manual_seed(1)
    other = transformers.GPT2LMHeadModel(config)
    assert not torch.equal(
        other.generate(prompt, **options), trained.eval().generate(prompt, **options)
    )

    loaded = saved_job(trained).load_into(other)

    assert torch.equal(
        loaded.eval().generate(prompt, **options), trained.generate(prompt, **options)
    )


def test_loaded_model_works_in_a_pipeline(saved_job: Any) -> None:
    tokenizer = bert_tokenizer(model_max_length=32)
    trained = small_bert("MaskedLM")
    torch.manual_seed(1)
    fresh = transformers.BertForMaskedLM(trained.config)
    text = "the [MASK] sat"

    loaded = saved_job(trained).load_into(fresh)

    found = transformers.pipeline("fill-mask", model=loaded, tokenizer=tokenizer)(text)
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = trained.eval()(**inputs).logits[0, 2]
    assert [row["token"] for row in found] == logits.topk(5).indices.tolist()
