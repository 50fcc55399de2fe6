"""Test error output: the calling line, the message and the hint, without internal frames."""

from __future__ import annotations

import traceback

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from etrain_jupyter.errors import ConfigError, JobFailedError


def test_python_traceback_includes_the_hint_and_the_users_traceback() -> None:
    for error, last in (
        (ConfigError("unknown key 'modle'", hint="did you mean 'model'?"), "did you mean 'model'?"),
        (JobFailedError("job x failed", traceback="Cell In[1], line 2"), "Cell In[1], line 2"),
    ):
        assert traceback.format_exception_only(error)[-1] == f"{last}\n"


def test_error_of_a_python_call_shows_the_calling_line_and_no_internal_frames(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: str
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)

    shell.run_cell("import etrain_jupyter\n\netrain_jupyter.distributed(modle='x')")

    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("line 3: etrain_jupyter.distributed(modle='x')")
    assert shown[1:] == ["etrain: unknown key 'modle'", "  did you mean 'model'?"]
    shell.restore_sys_module_state()
