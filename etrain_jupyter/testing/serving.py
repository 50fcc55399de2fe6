"""Processes and HTTP servers that simulate a cloud, a store or a batch system."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from socketserver import BaseServer
from typing import Any, Self

import psutil

Environ = dict[str, Any]
Response = tuple[str, list[tuple[str, str]], bytes]
"""Status line, headers, body."""
Wsgi = Callable[..., Iterable[bytes]]
"""A WSGI application."""


class Closing:
    """Context manager that closes the object at the end of the block."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_server(
    what: str, module: str, *arguments: str, env: Mapping[str, str]
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a server in a process that prints a line of JSON as soon as it listens.

    Returns:
        The process, which exits when its standard input closes, and the line.

    Raises:
        RuntimeError: If it exits instead; ``what`` begins the message.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        # The server exits when this pipe closes, even if this process is killed.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Jupyter signals the kernel's whole process group, which must not end the server.
        start_new_session=True,
        env=env,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        with process:
            process.kill()
        raise RuntimeError(f"{what} did not start. See its output above for the reason.")
    return process, json.loads(line)


def processes_with(*variables: str) -> list[psutil.Process]:
    """Return this user's processes that have one of these ``NAME=value`` in their environment."""
    # Do not search by process group or parent, because programs may start new sessions.
    wanted = {variable.encode() for variable in variables}
    found = []
    for process in psutil.process_iter():
        with suppress(OSError), open(f"/proc/{process.pid}/environ", "rb") as file:
            is_other = process.pid == os.getpid() or os.fstat(file.fileno()).st_uid != os.getuid()
            if not is_other and wanted & set(file.read().split(b"\0")):
                found.append(process)
    return found


def call_wsgi(app: Wsgi, environ: Environ, body: bytes) -> Response:
    """Call an application with a body that has already been read; return its response."""
    environ["wsgi.input"] = io.BytesIO(body)
    begun: list[Any] = []

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
        begun[:] = status, headers

    data = b"".join(app(environ, start))
    return begun[0], begun[1], data


def serve_in_thread(server: BaseServer, name: str) -> threading.Thread:
    """Serve on a daemon thread; return the thread."""
    # 0.05 s is the interval at which the server checks whether it should shut down.
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name=name, daemon=True)
    thread.start()
    return thread


def make_wsgi_server(
    app: Any, *, host: str = "127.0.0.1", port: int = 0, dated: bool = True
) -> Any:
    """Return a threaded, silent HTTP/1.1 server for a WSGI application; it is not started.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on; 0 for any.
        dated: Add a ``Date`` header; without it, the application sends its own.
    """
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # with 1.0, uploads wait a second for "100 Continue"

        def log(self, *_: Any) -> None:
            """Print nothing."""

        def send_response(self, code: int, message: str | None = None) -> None:
            # The base method adds this machine's time. The simulated cloud has its own clock.
            if dated:
                super().send_response(code, message)
            else:
                self.send_response_only(code, message)

    return make_server(host, port, app, threaded=True, request_handler=Handler)
