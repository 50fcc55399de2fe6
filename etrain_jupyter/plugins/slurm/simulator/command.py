"""Client of sbatch, squeue and scancel: ``python -IS command.py SOCKET COMMAND [ARGUMENT ...]``.

It imports nothing but the standard library, so that a command takes milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> int:
    """Send the command to the controller, and print what it returns."""
    path, command, *arguments = sys.argv[1:]
    request = {
        "command": command,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
        except OSError:
            message = "Unable to contact slurm controller (connect failure)"
            print(f"slurm_load_jobs error: {message}", file=sys.stderr)
            return 1
        connection.sendall(json.dumps(request).encode() + b"\n")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile() as file:
            answer = json.loads(file.read())
    sys.stdout.write(answer["out"])
    sys.stderr.write(answer["err"])
    return int(answer["code"])


if __name__ == "__main__":
    sys.exit(main())
