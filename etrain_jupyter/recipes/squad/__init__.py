"""Question answering on SQuAD: read, make features, predict answers, compute official scores.

::

    questions = squad.read("train-v2.0.json")
    train = squad.Features(questions, tokenizer)                     data.train
    dev = squad.Features(squad.read("dev-v2.0.json"), tokenizer)     data.eval
    squad.collate                                                    data.collate
    squad.predict, squad.score                                       eval.predict, eval.score
"""

from etrain_jupyter.recipes.squad.answers import Answer, answer, predict, predictions, score
from etrain_jupyter.recipes.squad.features import Features, collate
from etrain_jupyter.recipes.squad.questions import Gold, Question, download, read
from etrain_jupyter.recipes.squad.scores import normalize_answer, official_scores

__all__ = [
    "Answer",
    "Features",
    "Gold",
    "Question",
    "answer",
    "collate",
    "download",
    "normalize_answer",
    "official_scores",
    "predict",
    "predictions",
    "read",
    "score",
]
