"""The ``shutdown`` command of a simulated instance: sends the request to the harness.

``python shutdown.py FOLDER INSTANCE [arguments of shutdown(8)]``
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "power.sock"


def main() -> None:
    """Send the request, print the response, and exit with its status."""
    folder, instance, *arguments = sys.argv[1:]
    os.chdir(folder)  # socket paths have a maximum length
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(SOCKET)
        except OSError as exc:
            sys.exit(f"shutdown: the harness does not respond: {exc}")
        connection.sendall(
            json.dumps({"instance": instance, "arguments": arguments}).encode() + b"\n"
        )
        response = json.loads(connection.makefile().readline() or '{"text": "", "status": 0}')
    if response["text"]:
        print(response["text"], file=sys.stderr, flush=True)
    sys.exit(response["status"])


if __name__ == "__main__":
    main()
