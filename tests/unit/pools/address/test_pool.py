"""Checks and messages of the ``address`` pool that need no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.pools.address import pool as address_module
from etrain_jupyter.pools.address.messages import unfit_workers
from etrain_jupyter.pools.address.pool import AddressPool
from etrain_jupyter.pools.catalog import PoolEntry
from etrain_jupyter.process.tls import mint_certificates, write_certificates


def pool_of(values: dict[str, Any]) -> AddressPool:
    entry = PoolEntry(name="lab", kind="address", values=values, file=Path("pools.yaml"))
    return AddressPool.from_entry(entry)


HERE = {"python": "3.11.7", "etrain-jupyter": "0.1.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": "lab:8786"}, r"not a valid address of a Dask scheduler.*tcp://HOST:8786"),
        ({"address": "http://lab:8786"}, "not a valid address of a Dask scheduler"),
        ({"address": "tls://lab:8786"}, r"needs certificates.*pools\.yaml"),
        (
            {"address": "tcp://lab:1", "tls": {"ca": "/c", "cert": "/d", "key": "/e"}},
            r"tcp:// does not use any.*Write tls://lab:1",
        ),
        (
            {"address": "tls://lab:1", "tls": {"ca": "/c", "cert": "/d", "key": "/e"}},
            r"are missing: /c, /d, /e\. .*Correct tls",
        ),
    ],
)
def test_invalid_address_is_rejected_without_connecting(
    values: dict[str, Any], message: str
) -> None:
    pool = pool_of(values)
    for act in (pool.up, pool.down):
        with pytest.raises(PoolError, match=message):
            act()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "address"),
        ({"address": "tcp://lab:1", "adress": 1}, "adress"),
        ({"address": "tls://lab:1", "tls": {"ca": "/c", "cert": "/d"}}, r"tls\.key"),
        (
            {
                "address": "tls://x:1",
                "tls": {"ca": "", "cert": "", "key": "", "min_version": "1.1"},
            },
            r"tls\.min_version",
        ),
    ],
)
def test_error_names_the_invalid_key(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_of(values)


def test_address_with_certificate_files_round_trips_through_json(
    tmp_path: Path,
) -> None:
    write_certificates(tmp_path / "tls", mint_certificates("theirs"))
    names = {"tls_ca": "ca.pem", "tls_cert": "client.pem", "tls_key": "client.key"}
    files = {key: str(tmp_path / "tls" / name) for key, name in names.items()}
    address = SchedulerAddress(
        address="tls://lab:1", cluster_id="c", tls_min_version="1.3", **files
    )
    assert SchedulerAddress.from_dict(address.to_dict()) == address
    assert address.security().tls_client_key == files["tls_key"]
    assert address.connection_args()["ssl_context"].minimum_version.name == "TLSv1_3"
    (tmp_path / "tls" / "client.key").unlink()
    with pytest.raises(FileNotFoundError, match=r"client\.key does not exist"):
        address.connection_args()


def test_warning_about_plain_tcp_is_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(address_module, "_notified", set())
    monkeypatch.setattr(AddressPool, "_with_client", lambda self, work: None)
    for place in ("127.0.0.1", "localhost", "[::1]", "10.0.3.7", "10.0.3.7"):
        AddressPool(f"tcp://{place}:8786").up()
    [shown] = capsys.readouterr().out.splitlines()
    assert "anyone who can connect to that port can run code" in shown


def test_unfit_workers_are_listed_with_reasons_and_the_install_command() -> None:
    found: dict[str, Any] = {
        "a": HERE | {"torch": "2.13.0+cu130", "python": "3.11.2"},
        "b": HERE | {"torch": ""},
        "c": HERE | {"torch": "2.6.0"},
        "d": HERE | {"python": "3.12.1"},
        "e": ModuleNotFoundError("No module named 'etrain_jupyter'"),
        "f": TimeoutError("too busy"),
    }
    unfit = unfit_workers("tcp://lab:1", found, HERE)
    assert unfit is not None
    assert unfit.num_unfit == 5
    assert unfit.text == (
        "5 of 6 workers of tcp://lab:1 cannot train: torch is missing on b; "
        "torch is 2.6.0, not 2.13.0+cpu on c; python is 3.12.1, not 3.11.7 on d; "
        "etrain-jupyter cannot be imported (ModuleNotFoundError: No module named 'etrain_jupyter') "
        "on e; installed versions are unknown (TimeoutError: too busy) on f."
    )
    assert unfit.advice == (
        "Install the versions of this notebook there (Python 3.11): pip install "
        "'etrain-jupyter==0.1.0' 'torch==2.13.0'."
    )
    assert unfit_workers("tcp://lab:1", {"a": found["a"]}, HERE) is None
    assert unfit_workers("tcp://lab:1", {}, HERE) is None


def test_relative_paths_start_in_the_folder_of_the_file(tmp_path: Path) -> None:
    class Entry:
        file = tmp_path / "pools.yaml"

        def read_as(self, section: Any) -> Any:
            tls = {"ca": "ca.pem", "cert": "/abs/me.pem", "key": "~/me.key"}
            return section.model_validate({"address": "tls://lab:1", "tls": tls})

    with pytest.raises(PoolError) as caught:
        AddressPool.from_entry(Entry()).up()  # type: ignore[arg-type]
    files = (tmp_path / "ca.pem", Path("/abs/me.pem"), Path.home() / "me.key")
    assert f"are missing: {', '.join(map(str, files))}. " in str(caught.value)
