"""Pretraining of a small BERT, and what it contributes to fine-tuning.

One job on two workers pretrains for a given time with masked words and sentence order, from shards.
Its export is then fine-tuned on questions with several seeds, next to the same model with random
weights, and both are scored on held-out questions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import ours, report
from benchmarks.models.squad import spread
from benchmarks.models.squad_work import load_encoder, select
from etrain_jupyter import TrainingJob
from etrain_jupyter.data import Shards
from etrain_jupyter.recipes import language_modeling as lm
from etrain_jupyter.recipes import squad

WORLD_SIZE = 2
BATCH, MAX_LENGTH = 32, 128
"""Segments per step, and their maximum number of tokens: up to 4,096 tokens."""
MAX_CHARACTERS = 700
"""Longest context of a question."""
VOCABULARY = 4000
PROBE_STEPS = 12
"""Steps that measure the rate."""
NUM_POINTS = 10
"""Points of the loss curves."""
KINDS = ("pretrained", "random weights")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument(
        "--minutes", type=float, help="time of the pretraining (default 30, quick 3)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        help="text files; documents are separated by blank lines or, in files without, by lines",
    )
    parser.add_argument(
        "--pretrained", type=Path, help="export of an earlier run, which is only fine-tuned"
    )
    parser.add_argument("--keep", type=Path, help="new folder for the export of the pretraining")
    parser.add_argument("--train", type=Path, help="SQuAD file; by default from the hub")
    parser.add_argument("--dev", type=Path, help="SQuAD file; by default from the hub")
    parser.add_argument("--questions", type=int, default=4000, help="questions for fine-tuning")
    parser.add_argument("--dev-questions", type=int, default=500, help="questions to score")
    parser.add_argument(
        "--tune-steps", type=int, help="steps of 32 windows (default 300, quick 40)"
    )
    parser.add_argument("--seeds", type=int, help="runs of each kind (default 3, quick 2)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Pretrain, and fine-tune from both starts."""
    minutes = options.minutes or (3 if options.quick else 30)
    num_seeds = options.seeds or (2 if options.quick else 3)
    num_steps = options.tune_steps or (40 if options.quick else 300)
    with tempfile.TemporaryDirectory(prefix="etrain-bench-") as folder, ours.cluster():
        tokenizer, corpus = prepare_corpus(options.text, Path(folder))
        config = config_of(len(tokenizer))
        curve: list[dict[str, float]] = []
        if options.pretrained:
            checkpoint = str(options.pretrained)
        else:
            job = pretrain(config, tokenizer, corpus, minutes)
            curve = curve_of(job.history())
            for row in curve:
                print(f"pretraining: {row}", flush=True)
            kept = options.keep or Path(folder) / "bert"
            checkpoint = str(job.export(kept, format="transformers"))
        starts: dict[str, Callable[[], Any]] = {
            KINDS[0]: lambda: load_encoder(checkpoint),
            KINDS[1]: lambda: random_model(config),
        }
        questions, held_out = map(always_answered, select(options, MAX_CHARACTERS))
        train = squad.Features(questions, tokenizer, is_training=True, max_length=MAX_LENGTH)
        dev = squad.Features(held_out, tokenizer, max_length=MAX_LENGTH)
        scores: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for seed in range(num_seeds):
            for kind, start in starts.items():
                scores[kind].append(tune(start, train, dev, num_steps, seed))
                print(f"fine-tuning, seed {seed}, {kind}: {scores[kind][-1]}", flush=True)
    f1 = {kind: [row["f1"] for row in rows] for kind, rows in scores.items()}
    return {
        "benchmark": "pretraining",
        "minutes": minutes,
        "tokens_per_step": BATCH * MAX_LENGTH,
        "curve": curve,
        "scores": scores,
        "margin_f1": statistics.mean(f1[KINDS[0]]) - statistics.mean(f1[KINDS[1]]),
        "noise_f1": max(
            statistics.stdev(values) if len(values) > 1 else 0.0 for values in f1.values()
        ),
    }


def always_answered(questions: Sequence[squad.Question]) -> list[squad.Question]:
    """Return the questions, which all have an answer, so that no other prediction is scored.

    In files of SQuAD 2.0, any question may lack an answer. After so few steps, "no answer" is the
    best prediction for almost all of them.
    """
    return [replace(question, may_be_unanswerable=False) for question in questions]


def prepare_corpus(texts: Sequence[Path], folder: Path) -> tuple[Any, Shards]:
    """Train a vocabulary on the texts, and write them as shards."""
    from transformers import BertTokenizer

    documents = [document for text in texts for document in documents_of(text)]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(special)})
    tokenizer = tokenizer.train_new_from_iterator(  # type: ignore[no-untyped-call]
        (" ".join(document) for document in documents),
        vocab_size=VOCABULARY,
        show_progress=False,
    )
    corpus = lm.write_corpus(
        documents, tokenizer, folder / "corpus", max_length=MAX_LENGTH, progress=False
    )
    return tokenizer, corpus


def documents_of(text: Path) -> list[list[str]]:
    """Return the sentences of each document of a file."""
    has_blank_lines = "\n\n" in text.read_text(encoding="utf-8")
    return list(lm.read_documents(text, one_per_line=not has_blank_lines))


def config_of(num_tokens: int) -> Any:
    """Return the configuration of a BERT with 1.4 million parameters or fewer."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=num_tokens,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def pretrain(config: Any, tokenizer: Any, corpus: Shards, minutes: float) -> TrainingJob:
    """Pretrain for about this time; the decay of the rate needs the number of steps in advance."""
    probe = submit_pretraining(config, tokenizer, corpus, PROBE_STEPS)
    probe.result()
    times = probe.history()["time"]
    step_s = (times[-1] - times[len(times) // 2]) / (len(times) - 1 - len(times) // 2)
    job = submit_pretraining(config, tokenizer, corpus, max(20, round(60 * minutes / step_s)))
    job.result()
    return job


def submit_pretraining(config: Any, tokenizer: Any, corpus: Shards, num_steps: int) -> TrainingJob:
    """Start a job with AdamW and bf16."""
    from transformers import BertForPreTraining

    masking = lm.Masking(tokenizer, max_length=MAX_LENGTH, order_label="next_sentence_label")

    return ours.submit(
        "bert",
        name="bench-pretraining",
        num_steps=num_steps,
        world_size=WORLD_SIZE,
        workers={"min": WORLD_SIZE, "max": WORLD_SIZE},
        model=lambda: BertForPreTraining(config),
        data={"train": corpus, "collate": masking},
        loss=None,
        step=lm.step,
        weight=lm.num_masked,
        optimizer={"name": "AdamW", "lr": 2e-3, "weight_decay": 0.01, "no_decay": "auto"},
        schedule={"warmup": f"{max(1, num_steps // 10)} steps", "decay": "linear"},
        clip_grad_norm=1.0,
        batch={"global": BATCH},
        precision="bf16",
    )


def curve_of(history: Mapping[str, Sequence[Any]]) -> list[dict[str, float]]:
    """Return the means of both losses over tenths of the job.

    >>> columns = ("mlm_loss", "order_loss", "order_accuracy")
    >>> rows = curve_of({"step": range(1, 21), **{name: [3.0] * 20 for name in columns}})
    >>> rows[-1]
    {'step': 20, 'mlm_loss': 3.0, 'order_loss': 3.0, 'order_accuracy': 3.0}
    """
    size = -(-len(history["step"]) // NUM_POINTS)
    names = ("mlm_loss", "order_loss", "order_accuracy")
    return [
        {
            "step": history["step"][min(first + size, len(history["step"])) - 1],
            **{name: statistics.mean(history[name][first : first + size]) for name in names},
        }
        for first in range(0, len(history["step"]), size)
    ]


def random_model(config: Any) -> Any:
    """Return the same model with random weights."""
    from transformers import AutoModelForQuestionAnswering

    return AutoModelForQuestionAnswering.from_config(config)  # type: ignore[no-untyped-call]


def tune(
    start: Callable[[], Any], train: squad.Features, dev: squad.Features, num_steps: int, seed: int
) -> dict[str, float]:
    """Fine-tune; return the scores of the last evaluation."""
    job = ours.submit(
        "bert",
        name="bench-tuning",
        num_steps=num_steps,
        world_size=WORLD_SIZE,
        workers={"min": WORLD_SIZE, "max": WORLD_SIZE},
        model=start,
        data={"train": train, "eval": dev, "collate": squad.collate},
        loss=None,
        eval={
            "every": f"{num_steps} steps",
            "predict": squad.predict,
            "score": squad.score,
        },
        optimizer={"name": "AdamW", "lr": 5e-4, "weight_decay": 0.01, "no_decay": "auto"},
        schedule={"warmup": f"{max(1, num_steps // 10)} steps", "decay": "linear"},
        clip_grad_norm=1.0,
        batch={"global": 32},
        seed=seed,
    )
    job.result()
    exact = "eval_exact_match" if "eval_exact_match" in job.metrics else "eval_exact"
    return {"exact": job.metrics[exact], "f1": job.metrics["eval_f1"]}


def table_of(result: dict[str, Any]) -> str:
    """Format the figures as Markdown tables."""
    head = ("steps", "masked words", "order", "order accuracy")
    rows = [
        (
            str(row["step"]),
            f"{row['mlm_loss']:.2f}",
            f"{row['order_loss']:.3f}",
            f"{row['order_accuracy']:.2f}",
        )
        for row in result["curve"]
    ]
    scores = [
        (kind, *(spread([run[name] for run in runs]) for name in ("exact", "f1")))
        for kind, runs in result["scores"].items()
    ]
    tuned = report.table(("start", "EM (std)", "F1 (std)"), scores)
    margin = f"Margin: {result['margin_f1']:.1f} F1; noise (std): {result['noise_f1']:.1f}."
    return f"{report.table(head, rows)}\n\n{tuned}\n\n{margin}"
