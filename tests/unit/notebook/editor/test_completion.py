from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from etrain_jupyter.config import parse_cell, template
from etrain_jupyter.config.describe import describe
from etrain_jupyter.config.keys import keys_at
from etrain_jupyter.errors import CellError
from etrain_jupyter.notebook.commands.subcommands import subcommands
from etrain_jupyter.notebook.editor.completion import complete
from etrain_jupyter.notebook.editor.lines import MAX_JOBS
from tests.unit.notebook.editor.notebook_facts import NAMES, NotebookFacts, offered

HEAD = "%%etrain distributed\n"
TOP_KEYS = [f"{key}: " for key in keys_at((), {}, top={})]


# --- the line of the magic ---


@pytest.mark.parametrize(
    "marked", ["|", "x|", "%%etr|", "%%etrain|", "%%time\nx|", "print(%etrain|"]
)
def test_other_text_is_not_completed(marked: str) -> None:
    assert offered(marked) is None


@pytest.mark.parametrize("marked", ["%etrain |", "x = 1\n  %etrain |\ny = 2", "x = %etrain |"])
def test_line_offers_every_subcommand(marked: str) -> None:
    assert offered(marked) == [command.name for command in subcommands()]


@pytest.mark.plugins
def test_cell_offers_the_subcommands_with_a_body() -> None:
    assert offered("%%etrain |") == ["distributed", "search", "plan"]


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("%etrain sh|", ["show"]),
        (
            "%etrain show |",
            ["digits", "faces", "digits-0a1b2c3d", "faces-4e5f6a7b", "--out", "--help"],
        ),
        ("%etrain show dig|", ["digits", "digits-0a1b2c3d"]),
        ("%etrain logs digits |", ["--number", "--follow", "--help"]),
        ("%etrain logs -n 5 |", ["digits", "faces", "digits-0a1b2c3d", "faces-4e5f6a7b"]),
        ("%etrain logs digits -f --|", ["--number", "--help"]),
        ("%etrain stop digits --n|", ["--now"]),
        ("%etrain resume f|", ["faces", "faces-4e5f6a7b"]),
        ("%etrain attach digits --out |", ["job"]),
        ("%etrain scale 2 --job f|", ["faces", "faces-4e5f6a7b"]),
        ("%etrain kill --how h|", ["hold_gil", "hang"]),
        ("%etrain chaos --mode m|", ["mix"]),
        ("%etrain compare digits f|", ["faces", "faces-4e5f6a7b"]),
        ("%etrain diagnose dig|", ["digits", "digits-0a1b2c3d"]),
        ("%etrain compare digits faces --|", ["--html", "--help"]),
        ("%etrain export w --format |", ["safetensors", "transformers"]),
        ("%etrain down |", ["c1", "c2", "--all", "--help"]),
        ("%%etrain distributed --p|", ["--pool"]),
        ("%%etrain distributed --pool |", ["local", "moon"]),
        ("%%etrain distributed --pool=m|", ["--pool=moon"]),
        ("%%etrain distributed --resume f|", ["faces", "faces-4e5f6a7b"]),
        ("%%etrain distributed -o |\nmodel: x", ["job"]),
        ("%%etrain distributed --wait --w|", []),
        ("%%etrain distributed # --|", []),
        ("%%etrain distributed --na|me x", []),
        ("%%etrain nonsense --|", []),
        ("%etrain template |", ["--help"]),
    ],
)
def test_words_of_a_line(marked: str, expected: list[str]) -> None:
    found = offered(marked)

    assert found is not None
    assert found[: len(expected)] == expected
    assert len(found) == len(expected) or expected[-1] == "faces-4e5f6a7b"


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("%etrain pools |", ["check", "init", "policy", "remove", "--help"]),
        ("%etrain pools check |", ["local", "moon", "--no-boot", "--help"]),
        ("%etrain pools init new --head |", ["notebook", "on-demand"]),
        ("%etrain pools init new --types g5.x|", ["g5.xlarge"]),
        ("%etrain plan digits --d|", ["--deadline"]),
        ("%etrain plan --types p3.|", ["p3.2xlarge", "p3.8xlarge", "p3.16xlarge"]),
        ("%etrain plan --types g5.xlarge,p3dn|", ["g5.xlarge,p3dn.24xlarge"]),
        ("%etrain plan --pool |", ["local", "moon"]),
        ("%%etrain plan --b|\nmodel: x", ["--budget"]),
    ],
)
def test_words_of_a_line_of_a_plug_in(marked: str, expected: list[str]) -> None:
    assert offered(marked) == expected


def test_old_job_among_many_is_found_by_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [f"run-{number}" for number in range(1_000)]
    monkeypatch.setattr(NotebookFacts, "jobs", lambda self: jobs)

    assert offered("%etrain show run-99|") == ["run-99", *(f"run-99{n}" for n in range(10))]
    assert offered("%etrain show r|") == jobs[:MAX_JOBS]


def test_flags_of_a_line_are_those_of_its_parser() -> None:
    assert offered("%%etrain distributed --|") == [
        *("--name", "--out", "--pool", "--wait", "--dry-run", "--quiet", "--resume", "--force"),
        *("--trust", "--help"),
    ]


def test_variable_that_holds_a_job_is_offered_first() -> None:
    class TrainingJob: ...

    facts = NotebookFacts(names={"old": TrainingJob(), "x": 1, "new": TrainingJob()})

    assert offered("%%etrain distributed -o |", facts) == ["new", "old", "job"]


# --- keys ---


@pytest.mark.parametrize("marked", ["|", "\n|", "|\n", "# a comment\n|"])
def test_empty_body_offers_every_key(marked: str) -> None:
    found = offered(HEAD + marked)

    assert found == TOP_KEYS
    assert found[:3] == ["model: ", "data: ", "loss: "]


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("mo|", ["model: "]),
        ("model: Net\nda|", ["data: "]),
        ("epochs: 1\nda|\nmodel: Net", ["data: "]),
        ("model: Net\nmo|", []),
        ("mo|: Net", ["model"]),
        ("data:\n  |", ["train: ", "eval: ", "collate: ", "num_workers: "]),
        ("data:\n  |\n  eval: x", ["train: ", "collate: ", "num_workers: "]),
        ("data:\n  train: x\n  e|", ["eval: "]),
        ("data:\n    train: x\n    e|", ["eval: "]),
        ("data:\n  train: x\n|", None),
        ("data: {|", ["{train: ", "{eval: ", "{collate: ", "{num_workers: "]),
        ("data: {|}", ["{train: ", "{eval: ", "{collate: ", "{num_workers: "]),
        ("data: {train: x, e|", ["eval: "]),
        ("data: {train: x, e|}", ["eval: "]),
        ("data: {e|, train: x}", ["{eval: "]),
        ("data: {e|\nepochs: 3", ["{eval: "]),
        ("data: {train: x,\n       e|}\nepochs: 3", ["eval: "]),
        ("data: {\n  train: x,\n  e|\n}\nepochs: 3", ["eval: "]),
        ("checkpoint: {best: {|}}", ["{metric: ", "{mode: "]),
        ("checkpoint: {best: {metric: loss, |}}", ["mode: "]),
        ("checkpoint: {best: {metric: loss}, |}", ["to: ", "every: ", "keep: "]),
        ("checkpoint:\n  best:\n    m|", ["metric: ", "mode: "]),
        ("checkpoint:\n  best:\n    metric: loss\n  k|", ["keep: "]),
        ("eval:\n  |", ["every: ", "predict: ", "score: ", "loss: "]),
        ("{model: Net, da|", ["data: "]),
        ("{model: Net}\nda|", []),
        ("reproducible: {|", ["{shards: "]),
        ("batch: {global: 8, |}", ["micro: ", "aggregation_frequency: ", "split: "]),
        ("batch: {per_worker: 8, |}", ["micro: ", "aggregation_frequency: ", "split: "]),
        ("epochs: 3\nste|", ["step: "]),
        ("steps: 3\nepo|", []),
        ("loss: f\nste|", ["steps: "]),
        ("step: f\nlo|", ["log: "]),
        ("step: f\nmet|", []),
        ("metrics: {a: b}\nste|", ["steps: "]),
        ("batch: {per_worker: 8}\nsca|", ["scaling: "]),
        ("sca|", ["scaling: "]),
        ("batch: {global: 8}\nsca|", []),
        ("optimizer: {name: SGD, mo|", ["momentum: "]),
        ("optimizer: {name: adam, mo|", []),
        ("optimizer: {b|, name: adam}", ["{betas: "]),
        ("optimizer:\n  am|", ["amsgrad: "]),
        ("optimizer: {reference: f, |", []),
        ("metrics:\n  a|", ["accuracy: accuracy"]),
        ("metrics: {accuracy: f, a|", []),
        ("metrics: {a|: accuracy}", ["{accuracy"]),
        ("nonsense:\n  |", []),
        ("nonsense: {|", []),
        ("model:\n  hidden:\n    |", []),
        ("data: {train: f(a, |", []),
        ("# mo|", []),
        ("epochs: 3 # mo|", []),
        ("epochs: 3 |", []),
        ("data: {train: x} |", []),
        ("epochs: 3\n  mo|", []),
        ("m|odel: Net", []),
        ("|model: Net", []),
        ("[|", []),
        ("{{|", []),
        ("- mo|", []),
        ("'mo|", []),
    ],
)
def test_keys(marked: str, expected: list[str] | None) -> None:
    found = offered(HEAD + marked)

    if expected is None:
        expected = [key for key in TOP_KEYS if key != "data: "]
    assert found == expected


# --- values ---


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("precision: |", ["fp32", "bf16", "fp16"]),
        ("precision: B|", ["bf16"]),
        ("precision:|", ["precision: fp32", "precision: bf16", "precision: fp16"]),
        ("precision: 'f|'", ["'fp32", "'fp16"]),
        ("compression: p|", ["powersgd"]),
        ("compile: |", ["true", "false"]),
        ("reproducible: |", ["true", "false", "{shards: "]),
        ("schedule: {decay: |", ["none", "linear", "cosine"]),
        ("scaling: {rule: a|}", ["adascale", "auto"]),
        ("scaling:\n  ramp: a|", ["auto"]),
        ("on_nan_loss: |", ["fail", "pause"]),
        ("optimizer: {name: ad|}", ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"]),
        ("optimizer: {nesterov: |, name: SGD}", ["true", "false"]),
        ("optimizer: {nesterov: |, name: Adam}", []),
        ("optimizer: {no_decay: |}", ["auto"]),
        ("optimizer: la|", ["LAMB", "LARS"]),
        (
            "eval: |",
            ["1 epoch", "200 steps", "5 min", "{every: ", "{predict: ", "{score: ", "{loss: "],
        ),
        ("eval: {every: 200|}", ["200 steps", "200 epochs", "200 s", "200 min", "200 h"]),
        ("eval: {every: 200 |}", ["steps", "epochs", "s", "min", "h"]),
        ("eval: 200 s|", ["steps", "s"]),
        ("eval: 1 |", ["step", "epoch", "s", "min", "h"]),
        ("eval: 0 |", []),
        ("schedule: {warmup: 5 |", ["steps", "epochs"]),
        ("schedule: {warmup: 0.5 |", ["epochs"]),
        ("log: {every: 10 |}", ["steps"]),
        ("checkpoint: {every: a|}", ["auto"]),
        ("checkpoint: {best: {mode: |}}", ["min", "max"]),
        ("metrics: {top5: f}\nearly_stopping: {metric: |}", ["loss", "top5"]),
        ("metrics:\n  top5: f\ncheckpoint:\n  best:\n    metric: t|", ["top5"]),
        ("pool: |", ["local", "moon"]),
        (
            "batch: |",
            ["{global: ", "{micro: ", "{per_worker: ", "{aggregation_frequency: ", "{split: "],
        ),
        ("workers: |", ["{min: ", "{max: ", "{target: "]),
        ("metrics: |", ["{accuracy: accuracy"]),
        ("seed: |", []),
        ("seed: !|", ["!py "]),
        ("name: 10 |", []),
        ("name: |", []),
        ("epochs: 10 |", []),
        ("nonsense: |", []),
        ("precision: fp32|", ["fp32"]),
        ("precision: |fp32", []),
        ("precision: f|p32", []),
        ("precision: 'fp32'|", []),
        ("precision: | # so far", ["fp32", "bf16", "fp16"]),
    ],
)
def test_values(marked: str, expected: list[str]) -> None:
    assert offered(HEAD + marked) == expected


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("model: |", ["Wide(", "Net", "make_data(", "make_optimizer(", "num_tokens(", "accuracy("]),
        ("model: N|", ["Net"]),
        ("model: n|", ["num_tokens("]),
        ("model:\n  N|", ["Net"]),
        ("data: {train: |}", ["train_set", "make_data(", "make_optimizer("]),
        ("loss: |", ["accuracy", "Wide(", "Net"]),
        ("weight: |", ["make_data", "make_optimizer", "num_tokens", "Wide("]),
        ("metrics: {a: |}", ["accuracy", "Wide(", "Net"]),
        ("optimizer: make|", ["make_data", "make_optimizer"]),
        ("data:\n  collate: |", ["make_data", "make_optimizer", "num_tokens"]),
    ],
)
def test_fitting_names_of_the_notebook_come_first(marked: str, expected: list[str]) -> None:
    found = offered(HEAD + marked)

    assert found is not None
    assert found[: len(expected)] == expected
    assert not {"base_seed", "title", "_hidden", "greedy"} & set(found)


def test_modules_come_last_with_a_dot() -> None:
    found = offered(HEAD + "loss: |")

    assert found is not None
    assert found[-2:] == ["operator.", "functools."]


@pytest.mark.parametrize(
    ("marked", "asked"),
    [
        ("seed: !py base|", "base"),
        ("seed: !py base_seed + b|", "base_seed + b"),
        ("optimizer: {lr: !py  b|}", "b"),
        ("name: !py \"f('|", "f('"),
        ("model: Net(hidden=b|", "Net(hidden=b"),
        ('data: {train: "make_data(b|"}', "make_data(b"),
        ("model: >\n  Net(b|\nepochs: 3", "Net(b"),
        ("loss: operator.|", "operator."),
    ],
)
def test_expressions_are_completed_by_python(marked: str, asked: str) -> None:
    facts = NotebookFacts()

    found = offered(HEAD + marked, facts)

    assert facts.asked == [asked]
    assert found is not None


def test_computed_value_gets_python_completions() -> None:
    assert offered(HEAD + "seed: !py base|") == ["base_seed"]


def test_unfitting_attributes_are_not_offered() -> None:
    found = offered(HEAD + "loss: operator.|")

    assert found is not None
    assert "operator.add" in found
    assert not {"operator.__name__", "operator.neg"} & set(found)  # a text; takes one argument


def test_attributes_of_a_loaded_module_are_offered_for_an_import_path() -> None:
    assert offered(HEAD + "loss: operator:is_|") == ["operator:is_", "operator:is_not"]
    assert offered(HEAD + "loss: not_loaded_anywhere:a|") == []


# --- whatever the text ---

CELL = """\
model: Net(hidden=8)
data:
  train: train_set
  eval: train_set
loss: accuracy  # a comment
metrics: {accuracy: accuracy}
optimizer: {name: SGD, lr: 3e-4, momentum: 0.9, nesterov: true}
schedule: {warmup: 500 steps, decay: cosine}
batch:
  per_worker: 32
  micro: auto
scaling: {rule: linear, ramp: auto}
precision: bf16
epochs: 3
eval: {every: 200 steps}
early_stopping: {metric: accuracy, mode: max}
checkpoint:
  to: "folder"
  every: 5 min
  best: {metric: accuracy, mode: max}
workers: {min: 1, max: 4}
seed: !py base_seed + 1
log:
  every: 10 steps
name: 'digits'
"""
FLOW = """\
{model: Net, data: {train: train_set, eval: "make_data(8)"},
 loss: accuracy, optimizer: {name: AdamW, betas: [0.9, 0.99]}, batch: {global: 8},
 checkpoint: {every: auto, keep: 2}, reproducible: {shards: 4}, steps: 10}
"""
TEMPLATE = "\n".join(
    line.removeprefix("# ") for line in template().splitlines() if not line.startswith("# or")
)
CELLS = {"block and flow": CELL, "flow": FLOW, "template": TEMPLATE}


@st.composite
def torn_cells(draw: st.DrawFn) -> tuple[str, int]:
    """A cell with missing, duplicated or random parts, and a cursor in it."""
    text = draw(st.sampled_from([*CELLS.values(), ""]))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 30)))
        wild = st.text("{}[]:,'\"#-|> \n\tab!py&*?%é", max_size=8)
        text = text[:begin] + draw(wild) + text[end:]
    head = draw(
        st.sampled_from(["%%etrain distributed\n", "%%etrain\n", "%etrain ", "  %%etrain "])
    )
    text = head + text
    return text, draw(st.integers(0, len(text)))


@settings(max_examples=400)
@given(torn_cells())
def test_no_text_raises(cell: tuple[str, int]) -> None:
    text, cursor = cell

    found = complete(text, cursor, NotebookFacts())

    assert found is None or found.start <= cursor


@pytest.mark.parametrize("opener", ["{", "[", "a: {", "a:\n ", "'", "- "])
def test_deep_nesting_does_not_raise(opener: str) -> None:
    text = HEAD + opener * 5_000

    assert complete(text, len(text), NotebookFacts()) is not None


LONG = 100_000


@pytest.mark.parametrize(
    "text",
    [
        *(mark * LONG for mark in ("a", "a ", "a: ", "- ", "{}", "[],", "'", "#", "a=", "\n")),
        "a" + " " * LONG + "a",
        " " * LONG + "a",
        "{a: b" + " " * LONG + "c",
    ],
    ids=lambda text: f"{text[:6]!r}...{text[-1]!r}",
)
def test_long_text_is_fast(text: str) -> None:
    """Each part is read once; backtracking in such a text would take minutes."""
    offered_in_lines = complete(text, len(text), NotebookFacts())
    offered_in_cells = complete(HEAD + text, len(HEAD + text), NotebookFacts())

    assert offered_in_lines is None
    assert offered_in_cells is not None


@pytest.mark.parametrize("name", sorted(CELLS))
def test_every_completion_is_valid(name: str) -> None:
    """Accepting any completion at the end of any valid prefix keeps the cell valid."""
    checked: dict[str, str | None] = {}
    for end in range(len(CELLS[name]) + 1):
        text = CELLS[name][:end]
        found = complete(HEAD + text, len(HEAD + text), NotebookFacts())
        assert found is not None
        for offer in found.items:
            body = text[: found.start - len(HEAD)] + offer.text
            # The kind of value that !py computes is unknown.
            if offer.kind == "variable" or body in checked:
                continue
            checked[body] = fault = fault_of(body)

            if fault and "with batch.micro: auto" in fault:
                continue  # each of the keys may have its value, and an offer is for one key
            assert fault is None, f"{text[-80:]!r} + {offer}: {fault}"
    assert checked


def fault_of(body: str) -> str | None:
    """Return the error of a completed body, ignoring errors about missing parts."""
    body = closed(body)
    try:
        parse_cell(body, namespace=NAMES)
    except CellError as exc:
        missing_parts = (
            "is missing",
            " empty",
            "mode is missing",
            "data.eval is not set",
            "needs eval.",
            "leaves nothing to evaluate",
            "needs a batch that grows",
            "not evaluated",
            "without an expression",
        )
        return None if any(text in str(exc) for text in missing_parts) else str(exc)
    return None


def closed(body: str) -> str:
    """Close quotes and brackets, and add a value to a key at the end."""
    stack: list[str] = []
    quote = ""
    for place, mark in enumerate(body):
        before = body[place - 1 : place]
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"" and before in (" ", "{", "[", "\n", ""):
            quote = mark
        elif mark in "{[" and before in (" ", "{", "[", "\n", ""):
            stack.append("}" if mark == "{" else "]")
        elif mark in "}]" and stack:
            stack.pop()
    return body + quote + "".join(reversed(stack))


def test_every_key_is_offered_somewhere_and_described() -> None:
    shown = yaml.safe_load(TEMPLATE)
    for key in shown:
        assert describe((key,)) is not None
        assert f"{key}: " in TOP_KEYS
