"""A bucket that responds slowly forever blocks nothing.

No byte may be late by the read timeout here, and yet no answer ever ends: only a total deadline
gives such a request up. Without one, these tests do not end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from etrain_jupyter.errors import CheckpointError, RunStoreError, StoreError
from etrain_jupyter.notebook.job.runs import S3RunStore
from etrain_jupyter.plugins.ec2.machine import base_agent
from etrain_jupyter.storage.bucket_log import objects
from etrain_jupyter.storage.checkpoints.s3 import S3Store
from etrain_jupyter.storage.objects import s3_deadlines
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.storage.objects.s3_deadlines import Deadline, DeadlineError
from etrain_jupyter.storage.objects.s3_requests import S3Limits
from etrain_jupyter.testing.s3_faults import S3Fault
from etrain_jupyter.testing.s3_server import S3Server

pytestmark = [
    pytest.mark.timeout(90),
    # boto3 leaves an answer that it cannot parse to the garbage collector, with its connection.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DRIP_S = 0.05
QUICK = S3Limits(
    connect_timeout_s=1.0, read_timeout_s=1.0, num_requests=2, num_attempts=2, deadline_s=0.5
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nLast-Modified: Thu, 01 Jan 2026"
BODY = HEAD + b" 00:00:00 GMT\r\nContent-Length: 1000000\r\n\r\n"
HOW = {"never": b"", "head": HEAD, "body": BODY}
"""What is sent at once; then follows a byte now and then, or nothing."""


class SlowServer:
    """Takes every connection and never ends an answer."""

    def __init__(self, how: str, context: ssl.SSLContext | None = None) -> None:
        self._how = how
        self._context = context
        self._end = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._end.is_set():
                connection, _ = self._listener.accept()
                self._threads.append(
                    threading.Thread(target=self._serve, args=[connection], daemon=True)
                )
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            connection.recv(65536)
            connection.sendall(HOW[self._how])
            while not self._end.wait(DRIP_S):
                if self._how != "never":
                    connection.sendall(b"x")

    def close(self) -> None:
        self._end.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_pauses: None
) -> Iterator[Callable[..., SlowServer]]:
    """Start servers and let boto3 find the last of them."""
    servers: list[SlowServer] = []
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)

    def start(how: str, context: ssl.SSLContext | None = None) -> SlowServer:
        servers.append(SlowServer(how, context))
        scheme = "https" if context else "http"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"{scheme}://127.0.0.1:{servers[-1].port}")
        return servers[-1]

    yield start
    for server in servers:
        server.close()


GIVEN_UP = "so it was cancelled|timed out|the connection was closed"


@pytest.mark.parametrize("how", HOW)
def test_store_times_out_if_a_response_never_ends(
    serve: Callable[..., SlowServer], tmp_path: Path, how: str
) -> None:
    serve(how)
    store = S3Store("s3://bucket/p", limits=QUICK)
    for act in (
        lambda: store.begin(1),
        lambda: store.list_steps(),
        lambda: store._bucket.get("a", "test"),
        lambda: store._bucket.download("a", 1000, tmp_path / how, "test"),
    ):
        with pytest.raises((CheckpointError, StoreError), match=GIVEN_UP):
            act()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_slow_response_is_named_in_the_message(
    serve: Callable[..., SlowServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_encrypted: bool,
) -> None:
    context = None
    if is_encrypted:
        certificate = make_certificate(tmp_path)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    serve("body", context)
    with pytest.raises(StoreError, match=r"S3 did not complete the request within .* cancelled"):
        Bucket("bucket", "p", QUICK).get("a", "test")


def make_certificate(folder: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.mark.parametrize("how", ["head", "body"])
def test_list_of_jobs_and_record_time_out_in_the_kernel(
    serve: Callable[..., SlowServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    monkeypatch.setenv("ETRAIN_STATE", str(tmp_path))
    serve(how)
    store = S3RunStore("s3://bucket/runs")
    monkeypatch.setattr(objects, "DEADLINE_S", 0.5)
    with pytest.raises(RunStoreError, match=GIVEN_UP):
        store.records()
    with pytest.raises(RunStoreError, match=GIVEN_UP):
        store._read_record("digits-0a1b2c3d")


@pytest.mark.parametrize("how", HOW)
def test_node_times_out_if_a_response_never_ends(
    serve: Callable[..., SlowServer], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    limits = dataclasses.replace(base_agent.LIMITS, deadline_s=0.5, read_timeout_s=1.0)
    monkeypatch.setattr(base_agent, "LIMITS", limits)
    serve(how)
    bucket = base_agent.open_node_bucket("s3://bucket/p", region="us-east-1")
    with pytest.raises(StoreError, match=GIVEN_UP):
        bucket.get_aged("lease.json", "test")
    with pytest.raises(StoreError, match=GIVEN_UP):
        bucket.put("nodes/i-1.json", b"{}", "test")


def test_response_with_steady_progress_is_read(
    s3_server: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece extends the deadline."""
    monkeypatch.setattr("etrain_jupyter.storage.objects.s3_bucket.READ_BYTES", 1 << 10)
    bucket = Bucket(s3_bucket, "p", S3Limits(deadline_s=2.5, slowest_bytes_per_s=1 << 10))
    data = bytes(8 << 10)
    bucket.put("a", data, "test")
    read = bucket._read_body

    def read_slowly(answer: dict[str, Any], most_bytes: int | None = None) -> bytes:
        @contextlib.contextmanager
        def slow() -> Iterator[Any]:
            with answer["Body"] as body:

                def read_later(size: int) -> bytes:
                    time.sleep(0.4)
                    return bytes(body.read(size))

                yield SimpleNamespace(read=read_later)

        return read({**answer, "Body": slow()}, most_bytes)

    monkeypatch.setattr(bucket, "_read_body", read_slowly)
    assert bucket.get("a", "test") == data


def test_connection_is_reused_after_a_met_deadline(s3_server: S3Server, s3_bucket: str) -> None:
    bucket = Bucket(s3_bucket, "p", S3Limits())
    for number in range(3):
        bucket.put(str(number), b"1", "test")
    pools = bucket.connect()._endpoint.http_session._manager.pools
    [pool] = [pools[key] for key in pools.keys()]  # noqa: SIM118
    assert pool.num_connections == 1
    assert type(pool).__module__ == s3_deadlines.__name__


def test_deadlines_are_independent() -> None:
    ours, theirs = socket.socketpair(), socket.socketpair()
    over, other = Deadline(0.05), Deadline(60.0)

    def use() -> None:
        with over, other:
            over.hold(ours[0])
            other.hold(theirs[0])
            assert ours[1].recv(1) == b""  # shut down
            theirs[0].sendall(b"x")
            assert theirs[1].recv(1) == b"x"

    with pytest.raises(DeadlineError):
        use()
    assert (over.is_over, other.is_over) == (True, False)
    for one in (*ours, *theirs):
        one.close()


@pytest.mark.parametrize("size", [300, 3000, 200_000])
def test_truncated_object_is_read_again(
    size: int, s3_server: S3Server, s3_bucket: str, no_pauses: None
) -> None:
    """Read in pieces, a truncated object used to look complete."""
    bucket = Bucket(s3_bucket, "p", S3Limits())
    data = os.urandom(size)
    bucket.put("a", data, "test")
    s3_server.set_faults(S3Fault(kind="truncate", every=2))
    assert [bucket.get("a", "test") == data for _ in range(4)] == [True] * 4
    assert bucket.get("a", "test", most_bytes=100) == data[:100]


def test_truncated_error_is_not_a_credentials_error(
    s3_server: S3Server, s3_bucket: str, no_pauses: None
) -> None:
    bucket = Bucket(s3_bucket, "p", S3Limits())
    s3_server.set_faults(
        S3Fault(kind="spoil_upload", every=2), S3Fault(kind="truncate", every=2, match="PUT ")
    )
    for number in range(4):
        bucket.put("a", bytes([number]) * 300, "test")
    s3_server.set_faults()
    assert bucket.get("a", "test") == b"\x03" * 300
