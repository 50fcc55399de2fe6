"""Start and stop HTTP servers that simulate a cloud or a store."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Protocol, Self


class Closing:
    """Context manager that closes the object at the end of the block."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Server(Protocol):
    """The interface of servers from the standard library and werkzeug."""

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Handle requests until the server is shut down."""
        ...


def serve_in_thread(server: Server, name: str) -> threading.Thread:
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
