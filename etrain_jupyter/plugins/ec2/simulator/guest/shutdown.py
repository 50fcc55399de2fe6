"""The ``shutdown`` command of a simulated instance: sends the request to the simulated cloud.

``python shutdown.py ENDPOINT INSTANCE [arguments of shutdown(8)]``
"""

from __future__ import annotations

import http.client
import json
import sys


def main() -> None:
    """Send the request, print the response, and exit with its status."""
    endpoint, instance_id, *arguments = sys.argv[1:]
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    body = json.dumps({"instance_id": instance_id, "arguments": arguments})
    try:
        connection.request("POST", "/_fakeaws/shut_down", body)
        response = connection.getresponse()
        text = json.load(response)
    except (OSError, http.client.HTTPException) as exc:
        sys.exit(f"shutdown: the harness does not respond: {exc}")
    if text:
        print(text, file=sys.stderr, flush=True)
    sys.exit(response.status != http.HTTPStatus.OK)


if __name__ == "__main__":
    main()
