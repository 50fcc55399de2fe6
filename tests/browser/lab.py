"""A real JupyterLab or Notebook 7 server in its own folder, and a page of headless Chromium."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Error, Locator, Page

REPOSITORY = Path(__file__).parents[2]
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# No token, therefore on the loopback interface only. The application is exposed to scripts of the
# page, which is more reliable than clicking through menus.
SERVER_CONFIG = """
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = {port}
c.ServerApp.port_retries = 0
c.ServerApp.root_dir = {root!r}
c.ServerApp.open_browser = False
c.ServerApp.allow_root = True
c.ServerApp.disable_check_xsrf = True
c.IdentityProvider.token = ""
c.PasswordIdentityProvider.hashed_password = ""
c.LabApp.expose_app_in_browser = True
c.JupyterNotebookApp.expose_app_in_browser = True
c.LabApp.extension_manager = "readonly"
"""
QUIET_SETTINGS = '{"fetchNews": "false", "checkForUpdates": false}'
START_LIMIT_S = 60


class Lab:
    """A Jupyter server with its files, settings and runtime in ``folder``.

    Args:
        folder: Folder of the server; created if it does not exist.
        with_extension: True to enable our extension; otherwise anywidget renders the jobs.
        app: The application: ``jupyterlab``, or ``notebook`` for Notebook 7.
    """

    def __init__(
        self,
        folder: Path,
        *,
        with_extension: bool = True,
        app: Literal["jupyterlab", "notebook"] = "jupyterlab",
    ) -> None:
        self.path = "lab/tree" if app == "jupyterlab" else "notebooks"
        """URL path under which the application opens a file."""
        self.root = folder / "notebooks"
        self.root.mkdir(parents=True)
        self._log = (folder / "server.log").open("w")
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = folder / "lab_config.py"
        config.write_text(SERVER_CONFIG.format(port=self.port, root=str(self.root)))
        places = {
            name: str(folder / name.lower())
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        }
        # Use the front end of this checkout, not an installed one.
        places["JUPYTER_PATH"] = str(folder / "checkout")
        extensions = folder / "checkout" / "labextensions"
        extensions.mkdir(parents=True)
        (extensions / "etrain-jupyter").symlink_to(REPOSITORY / "etrain_jupyter" / "labextension")
        settings = folder / "lab_settings"
        quiet = settings / "@jupyterlab" / "apputils-extension"
        quiet.mkdir(parents=True)
        (quiet / "notification.jupyterlab-settings").write_text(QUIET_SETTINGS)
        if not with_extension:
            page_config = Path(places["JUPYTER_CONFIG_DIR"]) / "labconfig" / "page_config.json"
            page_config.parent.mkdir(parents=True)
            page_config.write_text('{"disabledExtensions": {"etrain-jupyter": true}}')
        environment = os.environ | places
        environment |= {
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTERLAB_SETTINGS_DIR": str(settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "PYTHONPATH": str(REPOSITORY),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", app, "--config", str(config)],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        self._wait_until_up()

    def close(self) -> None:
        """Shut down the server and its kernels."""
        self.end_sessions()
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def write_notebook(self, name: str, *cells: str) -> Path:
        """Write a notebook of code cells below the server's root folder."""
        notebook = {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                "language_info": {"name": "python"},
            },
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"cell-{number}",
                    "metadata": {},
                    "execution_count": None,
                    "outputs": [],
                    "source": source,
                }
                for number, source in enumerate(cells)
            ],
        }
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(notebook))
        return path

    def end_sessions(self) -> None:
        """Shut down every kernel: a reopened notebook would reconnect to its previous one."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/sessions") as reply:
                sessions = json.load(reply)
            for session in sessions:
                address = f"{self.url}/api/sessions/{session['id']}"
                urllib.request.urlopen(urllib.request.Request(address, method="DELETE")).close()
        except urllib.error.URLError:
            pass  # the server has stopped, and its kernels with it

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/api/status").close()
                return
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None:
                    break
                time.sleep(0.2)
        log = Path(self._log.name).read_text()[-3000:]
        raise RuntimeError(f"the Jupyter server did not start within {START_LIMIT_S} s:\n{log}")


class Notebook:
    """One notebook, open in one page."""

    def __init__(self, lab: Lab, page: Page, name: str) -> None:
        self.lab, self.page, self.name = lab, page, name

    def open(self, *, new_kernel: bool = True) -> Notebook:
        """Load the page and wait for an idle kernel."""
        if new_kernel:
            self.lab.end_sessions()
        self._load()
        self.page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")
        self.wait_until_idle()
        return self

    def run(self, cell: int, *, wait: bool = True) -> None:
        """Run the cell with this index."""
        self.page.evaluate(
            """index => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = index;
                notebook.deselectAll();
                window.etrainRun = window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            cell,
        )
        if wait:
            self.page.evaluate("() => window.etrainRun")

    def output(self, cell: int) -> Locator:
        """Return the output area of a cell."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".jp-OutputArea")

    def job(self, cell: int) -> Locator:
        """Return the view of a job below a cell."""
        return self.output(cell).locator(".etrain-job")

    def save(self) -> dict[str, Any]:
        """Save the notebook and return the contents of the file."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        saved: dict[str, Any] = json.loads((self.lab.root / self.name).read_text())
        return saved

    def restart_kernel(self) -> None:
        """Restart the kernel without the confirmation dialog."""
        self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )
        self.wait_until_idle()

    def set_theme(self, theme: str) -> None:
        """Switch to ``JupyterLab Dark`` or ``JupyterLab Light``."""
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme
        )
        self.page.wait_for_selector(f'body[data-jp-theme-name="{theme}"]', state="attached")

    def hide_side_bars(self) -> None:
        """Collapse both side bars to give the notebook the whole width."""
        self.page.evaluate(
            """() => {
                window.jupyterapp.shell.collapseLeft();
                window.jupyterapp.shell.collapseRight();
            }"""
        )

    def wait_until_idle(self) -> None:
        """Wait until the kernel is idle."""
        self.page.wait_for_function(
            """() => {
                const widget = window.jupyterapp.shell.currentWidget;
                return widget?.sessionContext?.session?.kernel?.status === 'idle';
            }""",
            timeout=60_000,
        )

    def _load(self) -> None:
        """Load JupyterLab; retry, because a new network interface on the host can abort a load."""
        # JupyterLab navigates away during the load if another page has opened its workspace.
        path = self.lab.path.replace("lab/", f"lab/workspaces/page-{uuid.uuid4().hex[:8]}/", 1)
        for attempt in range(3):
            try:
                self.page.goto(f"{self.lab.url}/{path}/{self.name}?reset", timeout=60_000)
                self.page.wait_for_function(
                    "() => window.jupyterapp && !document.querySelector('#jupyterlab-splash')",
                    timeout=30_000,
                )
                self.page.evaluate("() => window.jupyterapp.started")
                return
            except Error:
                if attempt == 2:
                    raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
