from __future__ import annotations

import json
from pathlib import Path

import pytest

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes import squad
from etrain_jupyter.recipes.squad import Gold, Question

CONTEXT = "The cat sat on the mat."


def article(**question: object) -> dict[str, object]:
    found = {"id": "q", "question": "Who sat?", "answers": [{"text": "cat", "answer_start": 4}]}
    return {"title": "Cats", "paragraphs": [{"context": CONTEXT, "qas": [{**found, **question}]}]}


EXPECTED = Question(
    id="q",
    text="Who sat?",
    context=CONTEXT,
    golds=(Gold(text="cat", start=4),),
    may_be_unanswerable=False,
    title="Cats",
)


def test_file_its_content_its_articles_and_rows_of_the_hub_are_the_same(tmp_path: Path) -> None:
    content = {"version": "1.1", "data": [article()]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(content))
    row = {
        **{"id": "q", "title": "Cats", "context": CONTEXT, "question": "Who sat?"},
        "answers": {"text": ["cat"], "answer_start": [4]},
    }

    for source in (path, str(path), content, content["data"], [row], [EXPECTED]):
        assert squad.read(source) == [EXPECTED]


def test_version_2_is_found_by_its_name_its_marks_or_a_question_without_answer() -> None:
    by_name = {"version": "v2.0", "data": [article()]}
    by_mark = [article(is_impossible=False)]
    by_question = [article(answers=[])]

    for source in (by_name, by_mark, by_question):
        assert [q.may_be_unanswerable for q in squad.read(source)] == [True]


def test_hugging_face_data_set_is_read() -> None:
    datasets = pytest.importorskip("datasets", reason="platform: datasets is not installed")
    answers = [{"text": ["cat"], "answer_start": [4]}, {"text": [], "answer_start": []}]
    rows = datasets.Dataset.from_dict(
        {
            "id": ["a", "b"],
            "title": ["Cats"] * 2,
            "context": [CONTEXT] * 2,
            "question": ["Who?", "Why?"],
            "answers": answers,
        }
    )

    questions = squad.read(rows)

    assert [q.golds for q in questions] == [(Gold(text="cat", start=4),), ()]
    assert all(q.may_be_unanswerable for q in questions)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"articles": []}, r"found a dict with the keys 'articles'"),
        ([{"context": "x"}], r"found an item without 'answers'"),
        ([], r"contains no questions"),
        ([article(), article()], r"two questions with the id 'q'"),
    ],
)
def test_source_in_another_format_is_refused(source: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        squad.read(source)  # type: ignore[arg-type]


def test_missing_and_truncated_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"missing\.json cannot be read: No such file.*download"):
        squad.read(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"data": [')
    with pytest.raises(RecipeError, match=r"half\.json is not valid JSON: .*download is complete"):
        squad.read(tmp_path / "half.json")


def test_hub_that_cannot_be_reached_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets", reason="platform: datasets is not installed")

    def no_network(name: str, split: str) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)

    with pytest.raises(RecipeError, match=r"rajpurkar/squad_v2.*squad\.read\('dev-v2\.0\.json'\)"):
        squad.download("dev")
    with pytest.raises(RecipeError, match=r"no split 'test'"):
        squad.download("test")
