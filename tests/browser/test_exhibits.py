"""The panel of exhibits: figures, texts and tables of the evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from etrain_jupyter.log import events as t
from etrain_jupyter.log.exhibits import Content, Table
from etrain_jupyter.notebook.dashboard.saved_exhibits import SavedExhibit
from tests.browser.lab import Notebook
from tests.browser.test_dashboard import shoot
from tests.browser.test_training import cluster
from tests.browser.view import View
from tests.capabilities import long
from tests.unit.log.pictures import png
from tests.unit.notebook.dashboard.scripted_job import Script

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

__all__ = ["cluster"]

EVIL = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
WORST = Table(("name", "loss"), (("a", 0.123456), (EVIL, float("nan")), (None, 3)))


@pytest.fixture
def script() -> Script:
    return Script(num_steps=60)


@pytest.fixture
def view(page: Page, script: Script) -> View:
    view = View(page)
    view.add(list(script.begin()))
    return view


def evaluate(view: View, script: Script, step: int, *names: str) -> None:
    """Add the events of an evaluation with exhibits."""
    common: dict[str, Any] = {"format": "text", "size_bytes": 4, "digest": "0" * 64}
    view.add([script.make(t.ExhibitStored, step=step, name=name, **common) for name in names])


def requested(view: View) -> list[tuple[str, int]]:
    return [(message["name"], message["step"]) for message in view.sent("exhibit")]


def slide(view: View, index: int) -> None:
    view.root.get_by_role("slider", name="step of the exhibit").fill(str(index))
    view.settle()


def test_panel_is_hidden_until_there_is_an_exhibit(view: View, script: Script) -> None:
    panel = view.root.locator(".etrain-exhibits")
    expect(panel).to_be_hidden()

    evaluate(view, script, 20, "report")

    expect(panel).to_be_visible()
    assert requested(view) == [("report", 20)]
    view.answer_exhibit({("report", 20): "line 1\nline 2"})
    expect(panel.locator("pre")).to_have_text("line 1\nline 2")
    expect(panel.locator("output")).to_have_text("step 20 (1 of 1)")
    assert view.errors == []


def test_slider_follows_the_newest_step_until_it_is_moved(view: View, script: Script) -> None:
    contents: dict[tuple[str, int], Content] = {
        ("report", step): f"report of {step}" for step in (10, 20, 30, 40)
    }
    shown = view.root.locator(".etrain-exhibit pre")
    for step in (10, 20):
        evaluate(view, script, step, "report")
        view.answer_exhibit(contents)
        expect(shown).to_have_text(f"report of {step}")

    slide(view, 0)
    expect(shown).to_have_text("report of 10")
    evaluate(view, script, 30, "report")
    expect(shown).to_have_text("report of 10")
    assert requested(view) == [("report", 10), ("report", 20)], "10 was kept, 30 is not displayed"

    slide(view, 2)
    view.answer_exhibit(contents)
    expect(shown).to_have_text("report of 30")
    evaluate(view, script, 40, "report")
    view.answer_exhibit(contents)
    expect(shown).to_have_text("report of 40")


def test_picture_text_and_table_are_chosen_by_name(view: View, script: Script) -> None:
    contents: dict[tuple[str, int], Content] = {
        ("curve", 20): png(60, 40, shade=128),
        ("report", 20): EVIL,
        ("worst", 20): WORST,
    }
    evaluate(view, script, 20, "curve", "report", "worst")
    choice = view.root.get_by_role("combobox", name="exhibit")
    box = view.root.locator(".etrain-exhibit")

    view.answer_exhibit(contents)
    picture = box.get_by_role("img", name="curve at step 20")
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [60, 40]
    assert str(picture.get_attribute("src")).startswith("data:image/png;base64,")

    choice.select_option("report")
    view.answer_exhibit(contents)
    expect(box).to_have_text(EVIL)

    choice.select_option("worst")
    view.answer_exhibit(contents)
    assert box.locator("th").all_inner_texts() == ["name", "loss"]
    assert box.locator("td").all_inner_texts() == ["a", "0.1235", EVIL, "NaN", "", "3"]
    assert box.locator("td").nth(1).get_attribute("title") == "0.123456"
    assert view.page.evaluate("() => window.hacked === undefined")
    assert view.root.locator("script").count() == 0


def test_hostile_picture_is_not_displayed(view: View, script: Script) -> None:
    evaluate(view, script, 20, "curve")
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked = 1'/>"

    view.answer_exhibit({("curve", 20): svg})

    box = view.root.locator(".etrain-exhibit")
    expect(box).to_have_text("The picture is not a valid PNG.")
    expect(box.locator("img")).to_have_count(0)


def test_one_exhibit_is_requested_at_a_time(view: View, script: Script) -> None:
    contents: dict[tuple[str, int], Content] = {
        ("report", step): str(step) for step in range(10, 60, 10)
    }
    for step in range(10, 60, 10):
        evaluate(view, script, step, "report")
    for index in (3, 2, 1):
        slide(view, index)
    assert requested(view) == [("report", 10)]

    view.answer_exhibit(contents)
    assert requested(view) == [("report", 10), ("report", 20)]
    view.answer_exhibit(contents)
    expect(view.root.locator(".etrain-exhibit pre")).to_have_text("20")


def test_error_is_shown_in_place_of_the_content(view: View, script: Script) -> None:
    evaluate(view, script, 20, "report")

    view.answer_exhibit({})

    expect(view.root.locator(".etrain-exhibit")).to_have_text("report of step 20 does not exist")


def test_saved_notebook_without_a_kernel_has_the_newest_exhibits(page: Page) -> None:
    snapshot = {"job_id": "digits-1", "status": "finished", "step": 30}
    series = [{"name": "curve", "steps": [10, 20, 30]}]
    saved = [
        SavedExhibit(name="curve", step=step, content=png(width, 40)).to_json()
        for step, width in ((30, 60), (20, 50))
    ]
    view = View(page, {"snapshot": {**snapshot, "exhibits": series}, "exhibits": saved})

    panel = view.root.locator(".etrain-exhibits")
    expect(panel.locator("output")).to_have_text("step 30 (3 of 3)")
    expect(panel.get_by_role("img", name="curve at step 30")).to_be_visible()
    slide(view, 1)
    picture = panel.get_by_role("img", name="curve at step 20")
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [50, 40]
    expect(panel.locator(".etrain-more")).to_be_hidden()
    slide(view, 0)
    expect(panel.locator(".etrain-more")).to_contain_text("%etrain attach", timeout=10_000)
    expect(panel.locator(".etrain-exhibit")).to_be_hidden()
    assert requested(view) == []


SET_UP = """
import os
os.environ.update(ETRAIN_STATE={state!r}, ETRAIN_RUNS={runs!r}, CUDA_VISIBLE_DEVICES="")
%load_ext etrain_jupyter
import torch, torch.nn.functional as F
from torch import nn
train_set = (torch.randn(64, 4), torch.randint(0, 2, (64,)))
def predict(model, batch):
    return model(batch[0]).argmax(-1)
def score(records):
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(3, 2))
    axes.hist([int(record) for record in records])
    rows = [{{"sample": n, "class": int(record)}} for n, record in enumerate(records[:5])]
    return {{"ones": sum(map(int, records)), "classes": figure, "rows": rows, "report": "fine"}}
"""
TRAIN = """%%etrain distributed --name shown -o job
model: nn.Linear(4, 2)
data: {train: train_set, eval: train_set}
loss: F.cross_entropy
eval: {every: 2 steps, predict: predict, score: score}
batch: {global: 16}
epochs: 2
workers: {min: 1, max: 1}
"""


@long
def test_exhibits_of_a_real_job_are_displayed_and_again_after_reopening(
    open_notebook: Callable[..., Notebook], page: Page, cluster: dict[str, str]
) -> None:
    pytest.importorskip("matplotlib", reason="platform: matplotlib is not installed")
    set_up, picture = SET_UP.format(**cluster), "job.exhibits('classes')[-1]"
    cells = [set_up, TRAIN, "%etrain wait", picture, set_up, "%etrain attach shown"]
    notebook = open_notebook("exhibits.ipynb", *cells)
    for cell in range(4):
        notebook.run(cell)

    panel = notebook.job(1).locator(".etrain-exhibits")
    expect(panel.get_by_role("img", name="classes at step 8")).to_be_visible(timeout=30_000)
    panel.get_by_role("combobox", name="exhibit").select_option("rows")
    expect(panel.locator("tbody tr")).to_have_count(5)
    panel.get_by_role("combobox", name="exhibit").select_option("classes")
    panel.get_by_role("slider", name="step of the exhibit").fill("0")
    expect(panel.get_by_role("img", name="classes at step 2")).to_be_visible()
    expect(notebook.output(3).locator("img")).to_be_visible()
    panel.scroll_into_view_if_needed()
    shoot(page, "exhibits")
    assert 'alt="classes at step 8"' in str(notebook.save()["cells"][1]["outputs"])

    notebook.restart_kernel()
    expect(notebook.job(1)).to_have_attribute("data-phase", "gone")
    notebook.run(4)
    notebook.run(5)
    again = notebook.job(5).locator(".etrain-exhibits")
    expect(again.get_by_role("img", name="classes at step 8")).to_be_visible(timeout=30_000)
