"""Buttons and interrupts in kernels of three ipykernel versions, driven over the protocol."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import pytest

from tests.integration.notebook import Notebook

REPOSITORY = Path(__file__).parents[2]
# 6.31 is the last version without subshells. In 7.3 the front end chooses the subshell of a
# message; from 7.4 on the kernel does.
VERSIONS = ("6.31.0", "7.3.0", "7.4.0")

SET_UP = """
import time
from pathlib import Path
from threading import Event
%load_ext etrain_jupyter
from etrain_jupyter.notebook.display import show
from etrain_jupyter.wire.requests import ControlJob, Outcome
from tests.unit.notebook.dashboard.scripted_job import Script
from tests.unit.notebook.job.fakes import FakeLink, new_job, status

class Loud(Event):
    def wait(self, timeout=None):
        print("a slice of the wait")
        return super().wait(timeout)
    def is_set(self):
        print("a slice of the wait")
        return super().is_set()

def answer(request):
    if isinstance(request, ControlJob) and (request.args or {}).get("now"):
        link.tell(status("stopped", seq=3))
    return Outcome(message="done")

def make(name):
    global link
    link = FakeLink(answer)
    job = new_job(Path(name), link, status("running"))
    assert job.status == "running"
    job._feed.ended = Loud()
    return job, link

idle_job, idle_link = make("idle")
shown_job, shown_link = make("shown")
show(shown_job)
"""
ANSWER_ON_SCREEN = {"kind": "notice", "request": "stop", "level": "info", "text": "done"}


class FrontEnd(Notebook):
    """A notebook with job views, as in JupyterLab with our extension."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._comms: dict[str, str] = {}
        self._said: list[dict[str, Any]] = []
        super().__init__(folder, environment)

    def open_subshell(self) -> str:
        """Return the id of a new subshell; empty if the kernel does not support them."""
        info = self._client.kernel_info(reply=True, timeout=30)["content"]
        if "kernel subshells" not in info.get("supported_features", []):
            return ""
        self._client.control_channel.send(self._client.session.msg("create_subshell_request", {}))
        return str(self._client.get_control_msg(timeout=30)["content"]["subshell_id"])

    def send_message(self, subshell: str, **data: Any) -> None:
        """Send a message from a view to the kernel."""
        content = {"comm_id": self._comms["etrain.jobs"], "data": {"view": "me", **data}}
        message = self._client.session.msg("comm_msg", content)
        if subshell:
            message["header"]["subshell_id"] = subshell
        self._client.shell_channel.send(message)

    def receive(self, kind: str) -> dict[str, Any]:
        """Wait for the next message of this kind from the kernel to the view."""
        while True:
            while self._said:
                if (said := self._said.pop(0))["kind"] == kind:
                    return said
            self._take(self._next_message(timeout=60))

    def _next_message(self, timeout: float) -> dict[str, Any]:
        message = super()._next_message(timeout)
        content = message["content"]
        if message["msg_type"] == "comm_open":
            self._comms[content["target_name"]] = content["comm_id"]
        elif message["msg_type"] == "comm_msg" and "kind" in content["data"]:
            self._said.append(content["data"])
        return message


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def notebook(version: str, tmp_path: Path) -> Iterator[FrontEnd]:
    """Provide a kernel of this ipykernel version; install it if it is not the current one."""
    paths = [str(REPOSITORY)]
    if version_of("ipykernel") != version:
        paths.insert(0, str(tmp_path / "packages"))
        # 6.31 needs nest-asyncio; newer versions replaced it by another package.
        wanted = [f"ipykernel=={version}", "nest-asyncio"]
        install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", paths[0]]
        done = subprocess.run([*install, *wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(
                f"network: pip cannot install ipykernel {version}: {done.stderr.strip()[-300:]}"
            )
    notebook = FrontEnd(tmp_path, {"PYTHONPATH": ":".join(paths)})
    yield notebook
    notebook.close()


def test_buttons_and_interrupts_work_in_every_kernel_version(
    notebook: FrontEnd, version: str
) -> None:
    assert notebook.run("import ipykernel; print(ipykernel.__version__)").text == version
    shown = notebook.run(SET_UP)
    assert shown.status == "ok", shown.text
    subshell = notebook.open_subshell()
    assert bool(subshell) == (version >= "7")

    # A button is clicked while another cell computes and the dashboard keeps publishing.
    notebook.send_message(subshell, kind="hello", job_id="digits-1")
    notebook.receive("update")
    busy = notebook.send(
        "shown_job.screen.add_events(Script(20).events())\n"
        "while not Path('door').exists(): time.sleep(0.01)\n"
        "print('asked in time:', shown_link.requests)"
    )
    notebook.receive("update")
    notebook.send_message(subshell, kind="request", job_id="digits-1", request="stop", args={})
    if subshell:
        assert ANSWER_ON_SCREEN.items() <= notebook.receive("notice").items()
    (notebook.folder / "door").touch()
    stop = "[('stop', {})]"
    in_time = stop if subshell else "[]"  # documented: without subshells it waits for the cell
    assert f"asked in time: {in_time}" in notebook.finish(busy).text
    assert notebook.run("print(shown_link.requests)").text == stop

    # An interrupt of a cell that waits for no job reaches no job.
    sleeping = notebook.send("print('a slice'); time.sleep(600)")
    notebook.read_until(sleeping, "a slice")
    notebook.interrupt()
    assert "KeyboardInterrupt" in notebook.finish(sleeping).text

    # In a waiting cell, the first interrupt stops the job with a checkpoint, the second at once.
    for number, wait in enumerate(("print('then', await job)", "print('then', job.wait())")):
        assert notebook.run(f"job, link = make('waited-{number}')").status == "ok"
        waiting = notebook.send(wait)
        notebook.read_until(waiting, "a slice of the wait")
        notebook.interrupt()
        notebook.read_until(waiting, "stopping digits-1 after this step, with a checkpoint. Interr")
        notebook.interrupt()
        shown = notebook.finish(waiting)
        assert (shown.status, "at once, without a checkpoint" in shown.text) == ("ok", True)
        assert shown.text.endswith("then stopped")
        asked = notebook.run("print(link.requests, job.was_interrupted)").text
        assert asked == "[('stop', {'now': False}), ('stop', {'now': True})] True"

    assert notebook.run("print(idle_link.requests, idle_job.status)").text == "[] running"
