"""The error of a worker that cannot reach the Hugging Face hub names the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.trainer.control.hub_errors import is_hub_unreachable
from etrain_jupyter.wire import messages as m
from tests.unit.trainer.trainer_rig import CELL, TrainerRig

constants: Any = pytest.importorskip("huggingface_hub.constants")
errors: Any = pytest.importorskip("huggingface_hub.errors")

pytest.importorskip("transformers")

FROM_HUB = """
from transformers import AutoModelForQuestionAnswering

class Net:
    def __new__(cls):
        return AutoModelForQuestionAnswering.from_pretrained("someone/small-albert")
"""


def test_unreachable_hub_fails_the_job_with_the_commands_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a network, the library raises the same error, but only after several retries.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    rig = TrainerRig(tmp_path, cell=CELL + FROM_HUB).start()

    told = rig.wait_for(m.UserCodeFailed)

    rig.close()
    assert told.error.startswith("OSError: We couldn't connect to 'https://huggingface.co'")
    assert "This worker has no access to the hub" in told.error
    assert "save_pretrained('FOLDER')" in told.error
    assert "Cell In[3], line" in told.traceback
    assert ".from_pretrained(" in told.traceback


def test_unreachable_hub_is_recognized_by_the_cause_and_a_misspelled_name_is_not() -> None:
    def caused_by(cause: Exception) -> OSError:
        try:
            raise OSError("no such model") from cause
        except OSError as exc:
            return exc

    assert is_hub_unreachable(caused_by(errors.LocalEntryNotFoundError("not in the cache")))
    assert is_hub_unreachable(errors.OfflineModeIsEnabled("offline"))
    assert not is_hub_unreachable(caused_by(FileNotFoundError("someone/misspelled")))
    assert not is_hub_unreachable(OSError("We couldn't connect to the data base"))
