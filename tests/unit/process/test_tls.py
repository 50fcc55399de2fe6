"""Certificates, and the rule that nobody is let in without one."""

from __future__ import annotations

import datetime
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from etrain_jupyter.errors import PoolError
from etrain_jupyter.process.tls import (
    check_listen,
    mint_certificates,
    read_security,
    write_certificates,
)


@pytest.fixture(scope="module")
def minted() -> dict[str, str]:
    return mint_certificates("local-abc-def")


def test_key_of_the_certificate_authority_is_not_kept(minted: dict[str, str]) -> None:
    assert sorted(minted) == [
        "ca.pem",
        *("client.key", "client.pem"),
        *("scheduler.key", "scheduler.pem"),
        *("worker.key", "worker.pem"),
    ]
    assert "PRIVATE KEY" not in minted["ca.pem"]


def test_each_leaf_is_signed_by_the_authority_and_can_sign_nothing(minted: dict[str, str]) -> None:
    authority = x509.load_pem_x509_certificate(minted["ca.pem"].encode())
    for role in ("scheduler", "worker", "client"):
        leaf = x509.load_pem_x509_certificate(minted[f"{role}.pem"].encode())
        leaf.verify_directly_issued_by(authority)
        assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


@pytest.mark.parametrize("name", ["ca", "scheduler", "worker", "client"])
def test_certificates_stay_valid_if_the_clock_is_set_back_or_forward(
    minted: dict[str, str], name: str
) -> None:
    certificate = x509.load_pem_x509_certificate(minted[f"{name}.pem"].encode())
    now, month = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=31)

    assert certificate.not_valid_before_utc < now - month
    assert certificate.not_valid_after_utc > now + month


def test_client_certificate_is_not_valid_for_a_server(minted: dict[str, str]) -> None:
    leaf = x509.load_pem_x509_certificate(minted["client.pem"].encode())
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_certificate_files_are_private_and_never_overwritten(
    minted: dict[str, str], tmp_path: Path
) -> None:
    write_certificates(tmp_path / "tls", minted)

    files = list((tmp_path / "tls").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        write_certificates(tmp_path / "tls", minted)


def test_security_requires_encryption_and_holds_one_role(
    minted: dict[str, str], tmp_path: Path
) -> None:
    write_certificates(tmp_path / "tls", minted)

    security = read_security(tmp_path / "tls", "client")

    assert security.require_encryption is True
    assert security.tls_min_version == ssl.TLSVersion.TLSv1_3
    assert security.tls_worker_key is None
    context = security.get_connection_args("client")["ssl_context"]
    assert context.verify_mode == ssl.CERT_REQUIRED


def test_error_names_the_missing_certificates_of_an_ended_cluster(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ca\.pem does not exist: the cluster has ended"):
        read_security(tmp_path, "client")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "", "node7"])
def test_non_loopback_port_without_tls_is_refused(host: str) -> None:
    with pytest.raises(PoolError, match="without TLS"):
        check_listen(host, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_is_allowed_without_tls(host: str) -> None:
    check_listen(host, None)


def test_non_loopback_port_with_tls_is_allowed(minted: dict[str, str], tmp_path: Path) -> None:
    write_certificates(tmp_path / "tls", minted)

    check_listen("0.0.0.0", read_security(tmp_path / "tls", "scheduler"))


def test_our_dask_settings_override_those_of_the_user(tmp_path: Path) -> None:
    code = f"""if True:
        from pathlib import Path
        from etrain_jupyter.process.tls import configure_dask
        configure_dask(Path({str(tmp_path)!r}))
        import dask, distributed.core, distributed.utils
        get = dask.config.get
        print(get("distributed.scheduler.preload"), get("distributed.scheduler.worker-ttl"))
        print(distributed.core.tick_maximum_delay, get("temporary-directory") == {str(tmp_path)!r})
    """
    environment = {
        "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "antigravity",
        "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "1s",
        "PATH": "",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout.split("\n") == ["[] None", "60 True", ""]
