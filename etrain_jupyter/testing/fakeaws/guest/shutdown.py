"""The ``shutdown`` command of a fake instance: it tells the harness, which has the power switch.

``python shutdown.py FOLDER INSTANCE [words of shutdown(8)]``
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "power.sock"


def main() -> None:
    """Ask, print what is answered, exit as told."""
    folder, instance, *words = sys.argv[1:]
    os.chdir(folder)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(SOCKET)
        except OSError as exc:
            sys.exit(f"shutdown: nobody has the power switch: {exc}")
        connection.sendall(json.dumps({"instance": instance, "words": words}).encode() + b"\n")
        answer = json.loads(connection.makefile().readline() or '{"text": "", "status": 0}')
    if answer["text"]:
        print(answer["text"], file=sys.stderr, flush=True)
    sys.exit(answer["status"])


if __name__ == "__main__":
    main()
