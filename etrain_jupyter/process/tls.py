"""Ground rules for every Dask process that we start: mutual TLS, no web server, quiet.

Whoever reaches a Dask scheduler can run code, so each cluster has a certificate authority of its
own. It signs one leaf a role and its key is dropped at once: nobody can mint another certificate
for this cluster.
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
"""Longer than any job: it is checked at each new connection, also of a running job."""


def mint_certificates(cluster_id: str) -> dict[str, str]:
    """Make a new authority and sign one certificate for each role.

    Returns:
        File name to PEM text: ``ca.pem``, and ``ROLE.pem`` and ``ROLE.key`` for each of ``ROLES``.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

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
    """Return the certificate of ``name``; the one called ``ca`` signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_distinguished_name(cluster_id, name))
        .issuer_name(_distinguished_name(cluster_id, "ca"))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ by a little.
        .not_valid_before(now - datetime.timedelta(minutes=5))
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
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"etrain-{cluster_id}"[:64]),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _extensions(name: str, public_key: Any, authority_key: Any) -> list[tuple[Any, bool]]:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    is_authority = name == "ca"
    extensions: list[tuple[Any, bool]] = [
        (x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), True),
        (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key), False),
    ]
    if is_authority:
        usage = (False, False, False, False, False, True, True, False, False)
        return [*extensions, (x509.KeyUsage(*usage), True)]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if name != "client":
        # A client's certificate cannot pose as a scheduler or a worker.
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    return [
        *extensions,
        (x509.ExtendedKeyUsage(usages), False),
        (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
    ]


def write_certificates(tls_dir: Path, files: dict[str, str]) -> None:
    """Write minted files into a new folder that only the owner can enter, each with mode 0600."""
    tls_dir.mkdir(mode=0o700)
    for name, text in files.items():
        # The mode is given at creation: no instant at which others could open the file.
        with os.fdopen(
            os.open(tls_dir / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as f:
            f.write(text)


def read_security(tls_dir: str | Path, role: str) -> Any:
    """Return the ``distributed.Security`` of one role, which requires TLS on every connection.

    Args:
        tls_dir: Where ``write_certificates`` put them.
        role: One of ``ROLES``.

    Raises:
        FileNotFoundError: If the role's certificate is not there.
    """
    from distributed.security import Security

    folder = Path(tls_dir)
    paths = {"ca": folder / "ca.pem", "cert": folder / f"{role}.pem", "key": folder / f"{role}.key"}
    for path in paths.values():
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: the cluster has ended")
    secure: Any = Security
    return secure(
        require_encryption=True,
        tls_ca_file=str(paths["ca"]),
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        **{f"tls_{role}_cert": str(paths["cert"]), f"tls_{role}_key": str(paths["key"])},
    )


def read_foreign_security(ca: str, cert: str, key: str, *, min_version: str = "") -> Any:
    """Return the ``distributed.Security`` by which we reach a cluster that somebody else made.

    Args:
        ca: File with the authority that signed its certificates.
        cert: File with the certificate that we show.
        key: File with its key.
        min_version: ``1.2`` or ``1.3``; empty for Dask's default.

    Raises:
        FileNotFoundError: If a file is not there.
    """
    from distributed.security import Security

    for path in (ca, cert, key):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not there")
    oldest = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}.get(min_version)
    secure: Any = Security
    return secure(
        require_encryption=True,
        tls_ca_file=ca,
        **({"tls_min_version": oldest} if oldest else {}),
        **{
            f"tls_{role}_{kind}": path
            for role in ROLES
            for kind, path in (("cert", cert), ("key", key))
        },
    )


def check_listen(host: str, security: Any) -> None:
    """Refuse to open a port that others can reach without TLS.

    Args:
        host: Where a scheduler is about to listen.
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
            f"a scheduler on {host!r} without TLS would let anybody who reaches it run code as "
            "you. It was not started. Listen on 127.0.0.1, or give it certificates."
        )


def without_http(server: type[Any]) -> type[Any]:
    """Return a subclass of a Dask ``Scheduler`` or ``Worker`` that opens no HTTP port.

    Dask has no option for that: ``dashboard=False`` still serves health, metrics and JSON of the
    whole cluster to every user of the machine, without a password.
    """
    return type(
        server.__name__, (server,), {"start_http_server": lambda self, *args, **kwargs: None}
    )


def configure_dask(scratch_dir: Path) -> None:
    """Set what our Dask processes need, whatever the user's Dask files and variables say.

    Call it before anything imports ``distributed``, which reads some of these once and for all.

    Args:
        scratch_dir: Where Dask may make folders; by default it leaves one in the temporary folder
            of the machine.
    """
    import dask

    dask.config.set(DASK_CONFIG | {"temporary-directory": str(scratch_dir)})
    import distributed

    for name in (distributed.__name__, "tornado"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It says at each close that the connection is closed.
    logging.getLogger("distributed.comm.tcp").setLevel(logging.ERROR)


DASK_CONFIG: dict[str, Any] = {
    # Users' own preloads and web pages have no business in our processes.
    "distributed.scheduler.preload": [],
    "distributed.worker.preload": [],
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # On one machine a closed connection tells of a death at once. A time limit by the wall clock
    # would take all workers away when a laptop wakes up.
    "distributed.scheduler.worker-ttl": None,
    "distributed.scheduler.idle-timeout": None,
    "distributed.scheduler.no-workers-timeout": None,
    # Ranks are no Dask tasks: there is nothing to steal, replicate, spill, profile or draw.
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    # NVML in each process costs start-up time and memory on the GPU's driver.
    "distributed.diagnostics.nvml": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.system-monitor.disk": False,
    "distributed.admin.system-monitor.interval": "5s",
    # The default of 20 ms wakes each process 50 times a second, beside training on the same cores.
    # The limit is high because trainers starve these processes at times, which harms nobody.
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.tick.limit": "60s",
    "distributed.admin.log-length": 1000,
    "distributed.comm.timeouts.connect": "10s",
    "distributed.comm.compression": False,
}
"""Only ours; the rest is Dask's defaults and what the user set."""
