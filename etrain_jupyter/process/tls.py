"""TLS and Dask configuration for all processes started by etrain.

Any client that can reach a Dask scheduler can run code on it, so every cluster has its own
certificate authority. The authority signs one leaf certificate per role, and its key is discarded
immediately, so no further certificates can be issued for this cluster.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import ssl
from pathlib import Path
from typing import Any

from etrain_jupyter.errors import PoolError

ROLES = ("scheduler", "worker", "client")
VALID_DAYS = 366
"""Longer than any job, because validity is checked on every new connection and reconnect."""


def mint_certificates(cluster_id: str) -> dict[str, str]:
    """Create a certificate authority and sign one certificate for each role.

    Returns:
        PEM text by file name: ``ca.pem``, and ``ROLE.pem`` and ``ROLE.key`` for each of ``ROLES``.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    # The authority's key exists only in this call: it is not among the returned files.
    authority_key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    authority = _sign(cluster_id, "ca", authority_key.public_key(), authority_key)
    files = {"ca.pem": authority.public_bytes(pem).decode()}
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(cluster_id, role, key.public_key(), authority_key)
        secret = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files[f"{role}.pem"] = certificate.public_bytes(pem).decode()
        files[f"{role}.key"] = secret.decode()
    return files


def _sign(cluster_id: str, name: str, public_key: Any, authority_key: Any) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_distinguished_name(cluster_id, name))
        .issuer_name(_distinguished_name(cluster_id, "ca"))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        # Machines' clocks differ, and a clock may be set back while the cluster runs. Only this
        # cluster trusts its authority, so a certificate that is valid earlier is harmless.
        .not_valid_before(now - datetime.timedelta(days=VALID_DAYS))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
    )
    for extension, is_critical in _extensions(name, public_key, authority_key.public_key()):
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(authority_key, hashes.SHA256())


def _distinguished_name(cluster_id: str, name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name(
        [
            # X.509 limits this name to 64 characters.
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"etrain-{cluster_id}"[:64]),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _extensions(name: str, public_key: Any, authority_key: Any) -> list[tuple[Any, bool]]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    is_authority = name == "ca"
    # path_length=0: the authority may sign leaf certificates, but not further authorities.
    extensions: list[tuple[Any, bool]] = [
        (x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True),
        (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key), False),
    ]
    if is_authority:
        # Allow only key_cert_sign and crl_sign.
        usage = (False, False, False, False, False, True, True, False, False)
        return [*extensions, (x509.KeyUsage(*usage), True)]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if name != "client":
        # A client certificate cannot be used to impersonate a scheduler or a worker.
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    return [
        *extensions,
        (x509.ExtendedKeyUsage(usages), False),
        # The role serves as the host name; see ``peers.pinned_to_scheduler``.
        (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
    ]


def write_certificates(tls_dir: Path, files: dict[str, str]) -> None:
    """Write the certificates into a new folder with mode 0700, each with mode 0600."""
    tls_dir.mkdir(mode=0o700)
    for name, text in files.items():
        # The mode is set at creation, so other users can never open the file.
        with os.fdopen(
            os.open(tls_dir / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as f:
            f.write(text)


def read_security(tls_dir: str | Path, role: str) -> Any:
    """Return a role's ``distributed.Security``. It requires TLS on every connection.

    Args:
        tls_dir: The folder written by ``write_certificates``.
        role: One of ``ROLES``.

    Raises:
        FileNotFoundError: If the role's certificate does not exist.
    """
    from distributed.security import Security

    folder = Path(tls_dir)
    paths = {"ca": folder / "ca.pem", "cert": folder / f"{role}.pem", "key": folder / f"{role}.key"}
    for path in paths.values():
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: the cluster has ended")
    secure: Any = Security
    return secure(
        require_encryption=True,
        tls_ca_file=str(paths["ca"]),
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        **{f"tls_{role}_cert": str(paths["cert"]), f"tls_{role}_key": str(paths["key"])},
    )


def read_foreign_security(ca: str, cert: str, key: str, *, min_version: str = "") -> Any:
    """Return the ``distributed.Security`` for a cluster that etrain did not start.

    Args:
        ca: File with that cluster's certificate authority.
        cert: File with our client certificate.
        key: File with the certificate's private key.
        min_version: ``1.2`` or ``1.3``; empty for Dask's default.

    Raises:
        FileNotFoundError: If a file does not exist.
    """
    from distributed.security import Security

    for path in (ca, cert, key):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} does not exist")
    oldest = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}.get(min_version)
    secure: Any = Security
    return secure(
        require_encryption=True,
        tls_ca_file=ca,
        # There is only one client certificate. Dask looks it up by role, so every role gets it.
        **({"tls_min_version": oldest} if oldest else {}),
        **{
            f"tls_{role}_{kind}": path
            for role in ROLES
            for kind, path in (("cert", cert), ("key", key))
        },
    )


def check_listen(host: str, security: Any) -> None:
    """Refuse to open a port without TLS on anything but the loopback interface.

    Args:
        host: Address on which a scheduler is about to listen.
        security: A ``distributed.Security``, or None.

    Raises:
        PoolError: If ``host`` is not this machine's loopback and TLS is not required.
    """
    if security is not None and security.require_encryption:
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        raise PoolError(
            f"a scheduler on {host!r} without TLS would let every client that can reach it run "
            "code under your account. It was not started. Listen on 127.0.0.1, or configure "
            "certificates."
        )


def without_http(server: type[Any]) -> type[Any]:
    """Return a subclass of a Dask ``Scheduler`` or ``Worker`` that opens no HTTP port.

    Dask has no option for this: even with ``dashboard=False`` it serves health, metrics and JSON
    about the whole cluster to every user on the machine, without authentication.
    """
    return type(
        server.__name__, (server,), {"start_http_server": lambda self, *args, **kwargs: None}
    )


def configure_dask(scratch_dir: Path) -> None:
    """Override the user's Dask configuration for etrain's Dask processes.

    Call before ``distributed`` is first imported, because it reads some values only once.

    Args:
        scratch_dir: Folder for Dask's temporary files; by default Dask leaves some in the system
            temporary folder.
    """
    import dask

    dask.config.set(DASK_CONFIG | {"temporary-directory": str(scratch_dir)})
    import distributed

    for name in (distributed.__name__, "tornado"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # This logger reports every closed connection as an error.
    logging.getLogger("distributed.comm.tcp").setLevel(logging.ERROR)


DASK_CONFIG: dict[str, Any] = {
    # Do not run the user's preloads or serve web pages in etrain's processes.
    "distributed.scheduler.preload": [],
    "distributed.worker.preload": [],
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # On a single machine, a closed connection reveals a dead process immediately. A wall-clock
    # timeout would evict all workers when a laptop wakes from sleep.
    "distributed.scheduler.worker-ttl": None,
    "distributed.scheduler.idle-timeout": None,
    "distributed.scheduler.no-workers-timeout": None,
    # Ranks are not Dask tasks, so there is nothing to steal, replicate, spill, or profile.
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    # NVML costs each process start-up time and GPU driver memory.
    "distributed.diagnostics.nvml": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.system-monitor.disk": False,
    "distributed.admin.system-monitor.interval": "5s",
    # The default of 20 ms wakes each process 50 times per second, on the cores used for training.
    # The limit is high because trainers sometimes starve these processes, which is harmless.
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.tick.limit": "60s",
    "distributed.admin.log-length": 1000,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.compression": False,
    # By default, Dask estimates each message's size, so that it can encode messages of more than 10
    # MB in a thread. That takes ten times as long as encoding, and our messages are smaller.
    "distributed.comm.offload": False,
}
"""Values that differ from Dask's defaults; all others are left to Dask and the user."""
