"""``from_pretrained`` in the cell: workers download the weights, once per machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import etrain_jupyter
from etrain_jupyter.errors import JobFailedError
from etrain_jupyter.log.events import UserErrorRaised
from tests.integration.conftest import PATIENCE_S

transformers: Any = pytest.importorskip("transformers")
AutoModelForQuestionAnswering = transformers.AutoModelForQuestionAnswering

pytestmark = pytest.mark.timeout(400)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/small-albert"


class Hub:
    """The part of the Hugging Face hub that ``from_pretrained`` uses, for one model."""

    def __init__(self, folder: Path) -> None:
        self.downloads: Counter[str] = Counter()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._send(has_body=False)

            def do_GET(self) -> None:
                self._send(has_body=True)

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _send(self, *, has_body: bool) -> None:
                name = self.path.split("?")[0].rpartition("/")[2]
                path = folder / name
                is_file = self.path.startswith(f"/{REPOSITORY}/resolve/") and path.is_file()
                data = path.read_bytes() if is_file else b"{}"
                self.send_response(200 if is_file else 404)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("Content-Length", str(len(data)))
                if not is_file:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()
                if has_body:
                    hub.downloads[name] += is_file
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, name="hub")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Provide a hub that processes started later use instead of the real one."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=20_000,
        embedding_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    transformers.AlbertForQuestionAnswering(config).save_pretrained(folder / REPOSITORY)
    hub = Hub(folder / REPOSITORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(folder / "cache"))
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield hub
        hub.close()


def samples() -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(16 * 16).reshape(16, 16)
    label = torch.tensor(3)
    return [{"input_ids": row, "start_positions": label, "end_positions": label} for row in ids]


def body(name: str) -> dict[str, Any]:
    return {
        "model": f"AutoModelForQuestionAnswering.from_pretrained({name!r})",
        "data": {"train": samples()},
        "optimizer": {"name": "AdamW", "lr": 0.001},
        "batch": {"global": 8},
        "steps": 3,
        "workers": {"min": 2, "max": 2},
    }


def test_weights_are_downloaded_once_by_the_workers(hub: Hub, runs: Path) -> None:
    job = etrain_jupyter.distributed(body(REPOSITORY))

    assert job.wait(PATIENCE_S) == "finished", job
    assert hub.downloads["model.safetensors"] == 1
    assert job.metrics["loss"] > 0


def test_model_that_the_hub_does_not_have_is_named(hub: Hub, runs: Path) -> None:
    job = etrain_jupyter.distributed(body("someone/misspelled"))

    with pytest.raises(JobFailedError):
        job.wait(PATIENCE_S)
    [error] = [event for event in job.events() if isinstance(event, UserErrorRaised)]
    assert "someone/misspelled" in error.error
