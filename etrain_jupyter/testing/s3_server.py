"""A local S3 for tests: moto in a separate process, with fault injection.

::

    with S3Server() as server:
        server.make_bucket("bucket")
        os.environ |= server.environment
        store = open_store("s3://bucket/run")
        server.set_faults(S3Fault(kind="slow_down", every=3))

Requires ``moto`` and ``flask``. It listens on the loopback interface only, keeps everything in
memory, and exits with the process that started it.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
import urllib.parse
import urllib.request

from etrain_jupyter.testing.s3_faults import AROUND, CONTROL, FaultyS3, S3Fault
from etrain_jupyter.testing.serving import Closing, make_wsgi_server, serve_in_thread, start_server

REGION = "us-east-1"


class S3Endpoint:
    """Client for an S3 with faults, in any process."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def environment(self) -> dict[str, str]:
        """The variables that boto3 needs to find the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        self._send("PUT", f"/{name}")

    def set_faults(self, *faults: S3Fault) -> None:
        """Replace all faults and reset the counters."""
        payload = json.dumps([fault.to_dict() for fault in faults])
        self._send("POST", f"{CONTROL}faults", payload.encode())

    def counts(self) -> dict[str, int]:
        """Return the number of requests by operation and of faults by kind."""
        counted: dict[str, int] = json.loads(self._send("GET", f"{CONTROL}counts"))
        return counted

    def list_keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return up to 1,000 keys below a prefix. Bypasses faults, like the next three methods."""
        query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix})
        listed = self._send("GET", f"/{bucket}?{query}").decode()
        return [html.unescape(key) for key in re.findall("<Key>(.*?)</Key>", listed)]

    def read(self, bucket: str, key: str) -> bytes:
        """Return an object."""
        return self._send("GET", _path_of(bucket, key))

    def write(self, bucket: str, key: str, data: bytes) -> None:
        """Create or replace an object."""
        self._send("PUT", _path_of(bucket, key), data)

    def remove(self, bucket: str, key: str) -> None:
        """Delete an object."""
        self._send("DELETE", _path_of(bucket, key))

    def _send(self, method: str, path: str, data: bytes | None = None) -> bytes:
        # moto reads the service from the signature's scope, and does not verify the signature.
        scope = f"AWS4-HMAC-SHA256 Credential=testing/20260101/{REGION}/s3/aws4_request"
        binary = "application/octet-stream"  # moto parses other types as a form
        headers = {"Authorization": scope, AROUND: "1", "Content-Type": binary}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return bytes(response.read())


class S3Server(S3Endpoint, Closing):
    """An S3 in a separate process."""

    def __init__(self) -> None:
        # The server belongs to no cluster, so it gets none of our variables.
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETRAIN_")}
        self._process, facts = start_server("The S3 server", __name__, env=env)
        super().__init__(f"http://127.0.0.1:{facts['port']}")

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def close(self) -> None:
        """Kill the process."""
        with self._process:
            self._process.kill()


def _path_of(bucket: str, key: str) -> str:
    return f"/{bucket}/{urllib.parse.quote(key)}"


def main() -> None:
    """Serve until the parent process has exited, which closes standard input."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    server = make_wsgi_server(FaultyS3(DomainDispatcherApplication(create_backend_app)))
    serve_in_thread(server, "serve")
    print(json.dumps({"port": server.server_port}), flush=True)
    sys.stdin.read()
    os._exit(0)  # do not wait for threads with open connections


if __name__ == "__main__":
    main()
