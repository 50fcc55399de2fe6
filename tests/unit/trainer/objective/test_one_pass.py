"""Losses in all accepted forms, and the errors for other forms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from etrain_jupyter.trainer.references import WorkloadError
from etrain_jupyter.wire.messages import EvalFinished
from tests.unit.trainer.loop.test_train_loop import (
    NUM_SAMPLES,
    Names,
    Plain,
    accuracy,
    make_data,
    make_loop,
    run,
)

X, Y = make_data()
DICTS = {"x": X, "labels": Y, "row": torch.arange(NUM_SAMPLES)}


class WithLoss(Plain):
    """Returns the output of a Hugging Face model; ``kind`` is its class."""

    kind = SimpleNamespace

    def forward(self, x, labels=None):
        logits = super().forward(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return self.kind(loss=loss, logits=logits)


class WithDict(WithLoss):
    kind = dict


def losses_of(*, names=None, **keys):
    names = {"model": Plain, **(names or {})}
    loop, sent = make_loop(names=Names(**names), steps=3, **keys)
    assert run(loop) == "done"
    return [
        m if isinstance(m, dict) else m.record for m in sent if isinstance(m, dict | EvalFinished)
    ]


def told(records):
    return [{k: r[k] for k in ("loss", "metrics")} for r in records]


def on(logits_of):
    return lambda output, target: accuracy(logits_of(output), target)


class Detector(Plain):
    """Returns losses in training and predictions in evaluation, as torchvision's detectors do."""

    names = ("loss_class", "loss_box")

    def forward(self, x, y=None):
        logits = super().forward(x)
        if not self.training:
            return [{"label": row.argmax()} for row in logits]
        return {name: F.cross_entropy(logits, y) for name in self.names}


def test_dict_of_losses_is_summed_and_each_is_a_metric():
    loop, sent = make_loop(
        names=Names(model=Detector), steps=2, loss=None, metrics={}, data={"train": "d"}
    )
    assert run(loop) == "done"

    plain = [r["loss"] for r in losses_of(data={"train": "d"}, metrics={})]
    records = [m for m in sent if isinstance(m, dict)]
    assert records[0]["loss"] == pytest.approx(2 * plain[0])
    for record in records:
        assert list(record["metrics"]) == ["loss_class", "loss_box"]
        assert sum(record["metrics"].values()) == pytest.approx(record["loss"])


def test_detections_without_a_score_are_refused_with_the_keys_to_add():
    loop, _ = make_loop(names=Names(model=Detector), steps=1, loss=None, metrics={})
    text = "in evaluation mode the model returned a list .*loss: false, predict: predict"
    with pytest.raises(WorkloadError, match=text):
        run(loop)


class BadlyNamed(Detector):
    names = ("lr", "loss_box")


def test_losses_with_names_of_columns_are_refused():
    with pytest.raises(WorkloadError, match="the model returned a value named 'lr'"):
        make_loop(names=Names(model=BadlyNamed), loss=None, metrics={})


def step_of(model, batch):
    """Use a part of the model, which a wrapper around it would not allow."""
    logits = model.layers(batch["x"])
    loss = F.cross_entropy(logits, batch["labels"])
    return {"loss": loss, "accuracy": accuracy(logits, batch["labels"])}


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        pytest.param({"loss": F.cross_entropy, "data": DICTS}, {}, id="dict batch and loss"),
        pytest.param(
            {"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")}, {}, id="loss a sample"
        ),
        pytest.param(
            {"model": WithLoss, "data": DICTS, "metrics.accuracy": on(lambda o: o.logits)},
            {"loss": None},
            id="output with .loss",
        ),
        pytest.param(
            {"model": WithDict, "data": DICTS, "metrics.accuracy": on(lambda o: o["logits"])},
            {"loss": None},
            id="output with a key loss",
        ),
        pytest.param(
            {"model": WithLoss, "metrics.accuracy": on(lambda o: o.logits)},
            {"loss": None},
            id="output with .loss of a tuple",
        ),
        pytest.param(
            {"step": step_of, "data": DICTS}, {"loss": None, "metrics": {}, "step": "s"}, id="step"
        ),
    ],
)
def test_all_forms_of_a_loss_train_alike(names, keys):
    names = {"model": Plain, "loss": F.cross_entropy, **names}
    if "data" in names:
        names |= {"data.train": names["data"], "data.eval": names.pop("data")}
    plain, other = told(losses_of()), told(losses_of(names=names, **keys))
    for a, b in zip(plain, other, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["metrics"] == pytest.approx(a["metrics"], rel=1e-5)


def test_step_may_return_the_loss_alone():
    def alone(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    keys = {"loss": None, "metrics": {}, "step": "s"}
    records = losses_of(names={"step": alone}, **keys)
    assert [r["loss"] for r in records] == [r["loss"] for r in losses_of()]
    assert [r["metrics"] for r in records] == [{}] * 4


def returning(values):
    def step(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {k: loss if v is None else v for k, v in values.items()}

    return step


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"loss": 3.5}, "step returned 3.5, a float"),
        ({"accuracy": 1.0}, "step returned a dict with the keys 'accuracy' but without 'loss'"),
        ({}, "step returned a dict with the keys none but without 'loss'"),
        ({"loss": None, "lr": 1.0}, "a value named 'lr', .* for example 'lr_metric'"),
        ({"loss": None, 3: 1.0}, "a value named 3, "),
        ({"loss": None, "text": "many"}, "metric 'text' returned a str, which is not a number"),
        ({"loss": None, "pair": [1, 2]}, r"metric 'pair' returned shape \(2,\) for 16 samples"),
    ],
)
def test_invalid_result_of_step_is_reported_before_training(values, text):
    with pytest.raises(WorkloadError, match=text):
        make_loop(names=Names(step=returning(values)), loss=None, metrics={}, step="s")


@pytest.mark.parametrize("key", ["loss", "step", "weight", "metrics.accuracy", "eval.predict"])
def test_function_that_cannot_be_called_is_reported_with_its_key(key):
    def f(one, two, three, four=1):
        raise AssertionError

    keys = {
        "eval.predict": {"eval": {"predict": "p", "score": "s"}},
        "step": {"step": "s", "loss": None, "metrics": {}},
    }
    names = {"eval.score": len, key: f}
    with pytest.raises(WorkloadError, match=rf"^{key}: the job calls 'f' with .*four=1\). To fix"):
        make_loop(names=Names(**names), **keys.get(key, {"weight": "w"} if key == "weight" else {}))


def test_step_that_returns_other_names_later_is_refused():
    def moody(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "first" if len(batch[1]) == 16 else "last": 0.5}

    loop, _ = make_loop(names=Names(step=moody), loss=None, metrics={}, step="s")
    text = "returned 'last' in addition to the loss, but the first call returned 'first'"
    with pytest.raises(WorkloadError, match=text):
        run(loop)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({}, "key 'loss' is missing, and the model's output, a Tensor, has no .loss. Add a line"),
        (
            {"data.train": {"x": X, "label": Y}, "model": WithLoss},
            r"model returned no loss. .*rename_column\('label', 'labels'\)",
        ),
        (
            {"data.train": {"x": X}, "model": WithLoss},
            "SimpleNamespace, has no .loss. .*keys 'x': a Hugging Face",
        ),
        (
            {"model": Plain},
            r"key 'loss' is missing, .*0: Tensor \(16, 4\), 1: Tensor .* its forward takes x. A",
        ),
        ({"model": WithDict, "data.train": {"x": X}}, "a dict, has no key 'loss'"),
    ],
)
def test_error_for_a_model_without_a_loss_says_what_to_add(names, text):
    names = {"model": Joined, **names}
    with pytest.raises(WorkloadError, match=text):
        make_loop(names=Names(**names), loss=None)


def test_error_for_extra_inputs_names_the_parts_of_the_batch():
    data = (X, X, Y)
    text = r"forward takes x, but a batch has .*: 0: Tensor \(16, 4\), 1: Tensor"
    with pytest.raises(WorkloadError, match=text):
        make_loop(names=Names(**{"model": Plain, "data.train": data}))


class Keywords(WithLoss):
    """Passes keywords on, as the models of peft do."""

    def forward(self, x, labels=None, **kwargs):
        return super().forward(x, labels, **kwargs)


def notes_of(**names):
    with pytest.raises((TypeError, AttributeError)) as caught:
        make_loop(names=Names(**names), loss="f" if "loss" in names else None)
    return "\n".join(caught.value.__notes__)


def test_error_for_label_in_place_of_labels_suggests_to_rename_it():
    notes = notes_of(model=Keywords, **{"data.train": {"x": X, "label": Y}})
    assert "x: Tensor (16, 4), label: Tensor (16,)" in notes
    assert "rename_column('label', 'labels')" in notes


def test_error_for_text_suggests_collate():
    rows = [{"x": row, "text": "a", "labels": y} for row, y in zip(X, Y, strict=True)]
    notes = notes_of(model=Keywords, **{"data.train": rows})
    assert "text: list of 16 str" in notes
    assert "'text': text, and rows of different lengths, reach the model as lists." in notes
    assert "collate: DataCollatorWithPadding(tokenizer)" in notes


def test_error_for_a_loss_of_a_hugging_face_output_suggests_its_logits():
    notes = notes_of(loss=F.cross_entropy, model=WithLoss)
    assert "returned a SimpleNamespace with loss, logits." in notes
    assert 'loss: "lambda output, target: F.cross_entropy(output.logits, target)"' in notes


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, y):
        return self.layer(x)


def test_parameters_keep_their_order_within_the_wrapped_module():
    loop, _ = make_loop()
    ours = list(loop.workload.module.parameters())
    theirs = list(loop.workload.model.parameters())
    assert [id(p) for p in ours] == [id(p) for p in theirs]


@pytest.mark.parametrize("keys", [(), ("labels", "targets")])
def test_metric_of_a_dict_without_a_single_target_gets_the_batch(keys):
    class Own(Plain):
        def forward(self, x, answer):
            logits = super().forward(x)
            return {"loss": F.cross_entropy(logits, answer), "logits": logits}

    def from_batch(output, batch):
        assert set(batch) == {"x", "answer", *keys}
        return accuracy(output["logits"], batch["answer"])

    data = {"x": X, "answer": Y, **dict.fromkeys(keys, Y)}
    both = {"data.train": data, "data.eval": data}
    found = losses_of(names={"model": Own, "metrics.accuracy": from_batch, **both}, loss=None)
    assert told(found) == told(losses_of(names={"metrics.accuracy": accuracy}))
