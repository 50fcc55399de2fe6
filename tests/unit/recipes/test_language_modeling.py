from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.data.batch_key import EVALUATION, fetching
from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes import language_modeling as lm
from etrain_jupyter.recipes.language_modeling import masking
from tests.unit.recipes.vocabularies import albert_tokenizer, bert_tokenizer

pytest.importorskip("transformers", reason="platform: transformers is not installed")

TOKENIZERS = {"bert": bert_tokenizer(), "albert": albert_tokenizer()}
WORDS = ("the", "cats", "dog", "sat", "on", "mat", "barked", "1987", "zebra")


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def documents(num: int = 6, *, seed: int = 0) -> list[list[str]]:
    generator = np.random.default_rng(seed)
    return [
        [
            " ".join(generator.choice(WORDS, size=generator.integers(2, 9))) + "."
            for _ in range(generator.integers(2, 12))
        ]
        for _ in range(num)
    ]


# ------------------------------------------------------------------------------------------ corpus


def test_text_file_is_read_by_paragraphs_and_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("One here. Two?\nThree.\n\n\nFour! Five.\n")

    assert list(lm.read_documents(path)) == [["One here.", "Two?", "Three."], ["Four!", "Five."]]
    assert list(lm.read_documents(path, one_per_line=True)) == [
        ["One here.", "Two?"],
        ["Three."],
        ["Four!", "Five."],
    ]
    with pytest.raises(RecipeError, match=r"absent\.txt cannot be read: No such file"):
        list(lm.read_documents(tmp_path / "absent.txt"))
    path.write_bytes(b"caf\xe9. \n" * 3)
    with pytest.raises(RecipeError, match="is not UTF-8"):
        list(lm.read_documents(path))


def test_sentences_end_before_an_upper_case_letter() -> None:
    assert lm.split_sentences("It costs 3.50 e.g. today. (Yes.) No!  1987 came.") == [
        "It costs 3.50 e.g. today.",
        "(Yes.) No!",
        "1987 came.",
    ]


@given(st.integers(5, 60), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_segments_are_all_sentences_of_each_document_in_order(
    max_length: int, short: float, seed: int
) -> None:
    tokenizer = TOKENIZERS["bert"]
    texts = documents(4, seed=seed)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]

        rows = list(lm.segments([text], tokenizer, max_length=max_length, short_probability=short))

        joined = [token for row in rows for token in row["tokens"]]
        whole = [token for sentence in ids for token in sentence]
        assert joined in (whole, whole[: len(whole) - len(ids[-1])])  # one sentence may be left
        for row in rows:
            assert len(row["ends"]) >= 2
            assert row["ends"] == sorted(row["ends"])
            assert row["ends"][-1] == len(row["tokens"])
            if len(row["ends"]) > 2:
                assert row["ends"][-2] < max_length - 3


def test_some_segments_are_short() -> None:
    texts = [" ".join(["The cat sat."] * 2000)]
    sizes = {
        share: [
            len(row["tokens"])
            for row in lm.segments(
                texts, TOKENIZERS["bert"], max_length=103, short_probability=share
            )
        ]
        for share in (0.0, 0.1, 1.0)
    }
    long_share = {share: np.mean(np.array(found[:-1]) >= 100) for share, found in sizes.items()}

    assert long_share[0.0] == 1.0
    assert 0.75 < long_share[0.1] < 0.98
    assert long_share[1.0] < 0.1
    with pytest.raises(RecipeError, match="max_length=4 leaves 1 tokens"):
        list(lm.segments(texts, TOKENIZERS["bert"], max_length=4))


def test_corpus_is_written_as_shards_and_gives_batches(tmp_path: Path, tokenizer: Any) -> None:
    pytest.importorskip("pyarrow", reason="platform: pyarrow is not installed")
    corpus = lm.write_corpus(
        documents(), tokenizer, tmp_path / "corpus", max_length=32, progress=False
    )
    batch = lm.Masking(tokenizer, max_length=32)([corpus[i] for i in range(len(corpus))])

    assert sorted(corpus[0]) == ["ends", "tokens"]
    assert batch["input_ids"].shape[0] == len(corpus)


# ------------------------------------------------------------------------------------------ masks


def rows(num: int = 8, tokenizer: Any = TOKENIZERS["bert"], **options: Any) -> list[dict[str, Any]]:
    return list(lm.segments(documents(num), tokenizer, **{"max_length": 48, **options}))


def batch_of(
    collate: lm.Masking, samples: list[dict[str, Any]], numbers: list[int], epoch: int = 0
) -> dict[str, torch.Tensor]:
    with fetching(seed=7, epoch=epoch, samples=numbers):
        return collate([samples[i] for i in numbers])


def sample_of(batch: dict[str, torch.Tensor], row: int) -> dict[str, list[int]]:
    length = int(batch["attention_mask"][row].sum())
    tokens = {k: v[row, :length].tolist() for k, v in batch.items() if v.ndim == 2}
    return {**tokens, "order": [int(batch["sentence_order_label"][row])]}


@given(st.permutations(range(8)), st.integers(1, 8), st.sampled_from([0, 3, EVALUATION]))
@settings(max_examples=30, deadline=None)
def test_masks_depend_on_seed_epoch_and_sample_only(
    order: list[int], size: int, epoch: int
) -> None:
    samples = rows()[:8]
    collate = lm.Masking(TOKENIZERS["bert"], max_length=48)
    whole = batch_of(collate, samples, list(range(8)), epoch)

    copy = cloudpickle.loads(cloudpickle.dumps(collate))
    for first in range(0, 8, size):
        numbers = list(order[first : first + size])
        batch = batch_of(copy, samples, numbers, epoch)
        for row, number in enumerate(numbers):
            assert sample_of(batch, row) == sample_of(whole, number)


def test_each_epoch_has_its_own_masks_and_all_evaluations_the_same() -> None:
    samples = rows()[:8]
    collate = lm.Masking(TOKENIZERS["bert"], max_length=48)
    found = [
        batch_of(collate, samples, list(range(8)), epoch)
        for epoch in (0, 1, EVALUATION, EVALUATION)
    ]

    labels = [batch["labels"] for batch in found]
    assert labels[0].shape != labels[1].shape or not torch.equal(labels[0], labels[1])
    assert labels[0].shape != labels[2].shape or not torch.equal(labels[0], labels[2])
    assert torch.equal(labels[2], labels[3])
    outside_a_job = collate(samples[:2])
    assert torch.equal(outside_a_job["labels"], collate(samples[:2])["labels"])


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 64), st.integers(0, 50), st.sampled_from(sorted(TOKENIZERS)))
def test_batch_is_two_segments_of_the_text_with_masked_words(
    max_length: int, epoch: int, name: str
) -> None:
    tokenizer = TOKENIZERS[name]
    samples = rows(3, tokenizer, max_length=48)
    collate = lm.Masking(tokenizer, max_length=max_length)

    batch = batch_of(collate, samples, list(range(len(samples))), epoch)

    assert batch["input_ids"].shape[1] <= max_length
    for row, source in enumerate(samples):
        sample = sample_of(batch, row)
        ids = [
            label if label != -100 else id
            for id, label in zip(sample["input_ids"], sample["labels"], strict=True)
        ]
        border = sample["token_type_ids"].index(1)
        first, second = ids[1 : border - 1], ids[border:-1]
        assert (ids[0], ids[border - 1], ids[-1]) == (
            tokenizer.cls_token_id,
            tokenizer.sep_token_id,
            tokenizer.sep_token_id,
        )
        earlier, later = (second, first) if sample["order"] == [1] else (first, second)
        # Each part ends or begins at the border of two sentences unless it was truncated.
        text = source["tokens"]
        assert any(
            is_part(earlier, text[:end]) and is_part(later, text[end:])
            for end in source["ends"][:-1]
        )
        num_masked = sum(label != -100 for label in sample["labels"])
        assert num_masked <= max(1, round(len(ids) * 0.15))


def is_part(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def test_words_are_masked_whole(tokenizer: Any) -> None:
    starts = ~masking.continuations(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    samples = rows(40, tokenizer, max_length=64)
    batch = batch_of(lm.Masking(tokenizer, max_length=64), samples, list(range(len(samples))))
    splits = 0
    for row in range(len(samples)):
        sample = sample_of(batch, row)
        labels = sample["labels"]
        for place in range(1, len(labels)):
            ids = [
                label if label != -100 else id
                for label, id in zip(labels, sample["input_ids"], strict=True)
            ]
            is_special = ids[place] in tokenizer.all_special_ids
            if not starts[ids[place]] and ids[place - 1] not in tokenizer.all_special_ids:
                splits += 1
                assert (labels[place] == -100) == (labels[place - 1] == -100)
            assert not (is_special and labels[place] != -100)
    assert splits > 50


def test_ngrams_fates_and_orders_have_the_published_shares() -> None:
    """Long texts of one-token words, and a budget that is never reached by one n-gram."""
    generator = np.random.default_rng(3)
    lengths: Counter[int] = Counter()
    fates: Counter[str] = Counter()
    ids = np.arange(2000) + 10
    words = [range(i, i + 1) for i in range(2000)]
    for _ in range(60):
        found = masking.mask_words(
            ids,
            words,
            generator,
            num_predictions=40,
            mask_id=1,
            replacements=np.array([5]),
        )
        places = np.flatnonzero(found.labels != -100)
        assert len(places) <= 40
        assert (found.labels[places] == ids[places]).all()
        assert (np.delete(found.ids, places) == np.delete(ids, places)).all()
        # 40 of 2,000 words: two n-grams are rarely neighbors.
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        lengths.update(len(run) for run in runs if len(run) <= 3)
        for place in places:
            kept = found.ids[place] == ids[place]
            fates["mask" if found.ids[place] == 1 else "kept" if kept else "other"] += 1
    total = sum(lengths.values())
    assert [lengths[n] / total for n in (1, 2, 3)] == pytest.approx(
        [6 / 11, 3 / 11, 2 / 11], abs=0.04
    )
    total = sum(fates.values())
    assert [fates[fate] / total for fate in ("mask", "kept", "other")] == pytest.approx(
        [0.8, 0.1, 0.1], abs=0.03
    )
    samples = rows(60)
    collate = lm.Masking(TOKENIZERS["bert"], max_length=48)
    orders = batch_of(collate, samples, list(range(len(samples))))["sentence_order_label"]
    assert 0.35 < orders.float().mean() < 0.65


def test_budget_is_limited_and_used(tokenizer: Any) -> None:
    samples = rows(30, tokenizer, max_length=64, short_probability=0.0)
    collate = lm.Masking(tokenizer, max_length=64, max_predictions=3)

    counts = (batch_of(collate, samples, list(range(len(samples))))["labels"] != -100).sum(1)

    assert counts.max() == 3
    assert counts.float().mean() > 2


def test_continuations_of_each_kind_of_vocabulary() -> None:
    assert masking.continuations(["[CLS]", "cat", "##s", "a"]).tolist() == [0, 0, 1, 0]
    pieces = ["<pad>", "[CLS]", "▁cat", "s", "'s", "1987", ".", "é", "▁"]
    assert masking.continuations(pieces).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_equal_shapes_and_labels_for_bert() -> None:
    collate = lm.Masking(
        TOKENIZERS["bert"],
        max_length=48,
        pad_to_max_length=True,
        order_label="next_sentence_label",
    )

    batch = collate(rows()[:2])

    assert batch["input_ids"].shape == (2, 48)
    assert batch["next_sentence_label"].shape == (2,)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"max_ngram=0"):
        lm.Masking(TOKENIZERS["bert"], max_ngram=0)
    tokenizer = bert_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(RecipeError, match=r"BertTokenizer has no MASK token"):
        lm.Masking(tokenizer)


# ------------------------------------------------------------------------------------------ heads


def model_of(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=200,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        **({"embedding_size": 8} if kind == "Albert" else {}),
    )
    return getattr(transformers, f"{kind}ForPreTraining")(config).eval()


@pytest.mark.parametrize(
    ("kind", "label"),
    [("Albert", "sentence_order_label"), ("Bert", "next_sentence_label")],
)
def test_models_take_the_batch_and_their_loss_is_the_sum_of_the_heads(
    kind: str, label: Any
) -> None:
    collate = lm.Masking(TOKENIZERS["bert"], max_length=48, order_label=label)
    batch = collate(rows()[:6])
    model = model_of(kind)

    with torch.no_grad():
        output = model(**batch)
        heads = lm.step(model, batch)

    assert float(heads["loss"]) == pytest.approx(float(output.loss), rel=1e-5)
    assert float(heads["mlm_loss"] + heads["order_loss"]) == pytest.approx(float(output.loss))
    assert 0 <= float(heads["order_accuracy"]) <= 1
    assert lm.num_masked(batch) == int((batch["labels"] != -100).sum())
    with pytest.raises(RecipeError, match=r"none of sentence_order_label, next_sentence_label"):
        lm.step(model, {"input_ids": batch["input_ids"]})
