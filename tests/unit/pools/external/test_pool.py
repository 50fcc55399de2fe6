"""What the pool `address` says before and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.pools import SchedulerAddress
from etrain_jupyter.pools.external import pool as address_module
from etrain_jupyter.pools.external.messages import unfit_workers
from etrain_jupyter.pools.external.pool import AddressPool
from etrain_jupyter.process.tls import mint_certificates, write_certificates

HERE = {"python": "3.11.7", "etrain-jupyter": "0.1.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"address": "lab:8786"}, r"no address of a Dask scheduler.*tcp://HOST:8786"),
        ({"address": "http://lab:8786"}, "no address of a Dask scheduler"),
        ({"address": "tls://lab:8786"}, r"needs certificates.*pools\.yaml"),
        (
            {"address": "tcp://lab:1", "tls": {"ca": "/c", "cert": "/d", "key": "/e"}},
            r"tcp:// does not use any.*Write tls://lab:1",
        ),
        (
            {"address": "tls://lab:1", "tls": {"ca": "/c", "cert": "/d", "key": "/e"}},
            r"^/c, /d, /e is not there.*Correct tls",
        ),
    ],
)
def test_address_that_cannot_work_is_refused_at_once(values: dict[str, Any], words: str) -> None:
    pool = AddressPool.from_spec(values)
    for act in (pool.up, pool.down):
        with pytest.raises(PoolError, match=words):
            act()


@pytest.mark.parametrize(
    ("values", "words"),
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
def test_keys_that_are_wrong_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AddressPool.from_spec(values)


def test_certificates_stay_where_they_are_and_the_address_survives_its_json_form(
    tmp_path: Path,
) -> None:
    write_certificates(tmp_path / "tls", mint_certificates("theirs"))
    names = {"tls_ca": "ca.pem", "tls_cert": "client.pem", "tls_key": "client.key"}
    files = {key: str(tmp_path / "tls" / name) for key, name in names.items()}
    address = SchedulerAddress(
        address="tls://lab:1", cluster_id="c", tls_min_version="1.3", **files
    )
    assert SchedulerAddress.from_dict(address.to_dict()) == address
    assert address.security("client").tls_client_key == files["tls_key"]
    assert address.connection_args()["ssl_context"].minimum_version.name == "TLSv1_3"
    (tmp_path / "tls" / "client.key").unlink()
    with pytest.raises(FileNotFoundError, match=r"client\.key does not exist"):
        address.connection_args()


def test_plain_tcp_elsewhere_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_module, "_said", set())
    monkeypatch.setattr(AddressPool, "_ask_dask", lambda self, work: None)
    said: list[str] = []
    for place in ("127.0.0.1", "localhost", "[::1]", "10.0.3.7", "10.0.3.7"):
        AddressPool(f"tcp://{place}:8786", say=said.append).up()
    assert len(said) == 1
    assert "anybody who reaches that port can run code" in said[0]


def test_unfit_workers_are_told_with_what_they_lack_and_the_command_that_mends_it() -> None:
    found: dict[str, Any] = {
        "a": HERE | {"torch": "2.13.0+cu130", "python": "3.11.2"},
        "b": HERE | {"torch": ""},
        "c": HERE | {"torch": "2.6.0"},
        "d": HERE | {"python": "3.12.1"},
        "e": ModuleNotFoundError("No module named 'etrain_jupyter'"),
        "f": TimeoutError("too busy"),
    }
    words = unfit_workers("tcp://lab:1", found, HERE)
    assert words is not None
    assert words.num_unfit == 5
    assert words.text == (
        "5 of 6 workers of tcp://lab:1 cannot train: torch is missing on b; "
        "torch is 2.6.0, not 2.13.0+cpu on c; python is 3.12.1, not 3.11.7 on d; "
        "etrain-jupyter cannot be loaded (ModuleNotFoundError: No module named 'etrain_jupyter') "
        "on e; it cannot be asked what is installed (TimeoutError: too busy) on f."
    )
    assert words.advice == (
        "In Python 3.11 there: pip install 'etrain-jupyter==0.1.0' 'torch==2.13.0'."
    )
    assert unfit_workers("tcp://lab:1", {"a": found["a"]}, HERE) is None
    assert unfit_workers("tcp://lab:1", {}, HERE) is None


def test_relative_paths_of_a_pools_file_begin_beside_it(tmp_path: Path) -> None:
    class Entry:
        file = tmp_path / "pools.yaml"

        def read_as(self, section: Any) -> Any:
            tls = {"ca": "ca.pem", "cert": "/abs/me.pem", "key": "~/me.key"}
            return section.model_validate({"address": "tls://lab:1", "tls": tls})

    with pytest.raises(PoolError) as caught:
        AddressPool.from_entry(Entry()).up()  # type: ignore[arg-type]
    files = (tmp_path / "ca.pem", Path("/abs/me.pem"), Path.home() / "me.key")
    assert str(caught.value).startswith(", ".join(map(str, files)) + " is not there")
