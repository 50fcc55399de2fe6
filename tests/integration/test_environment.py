"""A small environment, from this machine through the bucket to a node's interpreter.

The user-data runs as on a machine, with its metadata service, up to the start of the agent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from etrain_jupyter.errors import StoreError
from etrain_jupyter.plugins.ec2.bootstrap import ROOT, BootFacts, user_data
from etrain_jupyter.plugins.ec2.environment import torch_builds
from etrain_jupyter.plugins.ec2.environment.packages import Package, find_uv, run_uv
from etrain_jupyter.plugins.ec2.environment.prepare import NodeNeeds, Prepared, prepare
from etrain_jupyter.plugins.ec2.environment.sources import MissingWheelsError
from etrain_jupyter.plugins.ec2.environment.wheels import key_of
from etrain_jupyter.plugins.ec2.machine.base_agent import LIMITS
from etrain_jupyter.plugins.ec2.simulator.imds import ImdsServer, instance_pages
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.storage.objects.s3_bucket import Bucket
from etrain_jupyter.testing.s3_faults import OWNER
from etrain_jupyter.testing.s3_server import S3Server

pytestmark = pytest.mark.aws

BACKEND = """
import zipfile

def build_wheel(folder, settings=None, metadata=None):
    texts = {"beta.py": open("beta.py").read()}
    info = "beta-2.0.dist-info"
    texts[info + "/METADATA"] = "Metadata-Version: 2.1\\nName: beta\\nVersion: 2.0\\n"
    texts[info + "/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    texts[info + "/RECORD"] = "".join(name + ",,\\n" for name in [*texts, info + "/RECORD"])
    with zipfile.ZipFile(f"{folder}/beta-2.0-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)
    return "beta-2.0-py3-none-any.whl"
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def bucket(s3_server: S3Server, s3_bucket: str) -> Bucket:
    return Bucket(s3_bucket, "etrain", LIMITS, owner=lambda: "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the only package index, a folder: no request leaves this machine."""
    folder = tmp_path / "index"
    write_wheel(folder, "alpha", "1.0")
    name, version = "uv", run_uv("--version").split()[1]
    texts = {f"{name}-{version}.data/scripts/uv": Path(find_uv()).read_bytes()}
    write_wheel(folder, name, version, f"py3-none-linux_{platform.machine()}", files=texts)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def packages(tmp_path: Path, index: Path) -> list[Package]:
    """Provide the packages alpha, from the index, and beta, which is built."""
    sources = tmp_path / "beta sources"
    sources.mkdir()
    for name, text in (("backend", BACKEND), ("beta", "VERSION = 'of the sources'\n")):
        (sources / f"{name}.py").write_text(text)
    (sources / "pyproject.toml").write_text(PROJECT)
    return [
        Package(name="alpha", version="1.0"),
        Package(name="beta", version="2.0", project=sources),
    ]


def store(bucket: Bucket, packages: list[Package], folder: Path, **needs: Any) -> Prepared:
    said: list[str] = []
    cache = folder / "cache"
    return prepare(bucket, NodeNeeds(**needs), cache=cache, say=said.append, packages=packages)


def write_wheel(
    folder: Path, name: str, version: str, tag: str = "py3-none-any", *needs: str,
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write a wheel with one module, as a package index would have it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in needs)]
    all_files = {
        **(files or {f"{name}.py": f"VERSION = '{version}'\n".encode()}),
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *lines, ""]).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = "".join(f"{path},,\n" for path in (*all_files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        for path, data in {**all_files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(path, data)


class Node:
    """A machine on which the user-data runs up to the agent, which is not installed on it."""

    def __init__(self, folder: Path, bucket: str) -> None:
        self.folder, self._bucket = folder, bucket
        self.imds = ImdsServer(instance_pages(instance_id="i-1"))
        (folder / "bin").mkdir()
        command = folder / "bin" / "shutdown"
        command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/shutdowns\n')
        command.chmod(0o755)

    def boot(self, digest: str) -> str:
        """Run the user-data; return the console's text."""
        pool = AwsSpotSpec.parse({"region": "us-east-1", "bucket": self._bucket})
        spec = pool.with_manifest(digest)
        script = user_data(spec, "c1", BootFacts(keys="keys/0", owner=OWNER))
        base = {key: os.environ[key] for key in os.environ if key.startswith("AWS_")}
        done = subprocess.run(
            ["bash", "-c", script],
            env={
                **base,
                "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.imds.url,
                ROOT: str(self.folder / "root"),
            },
            cwd=self.folder,
            text=True,
            capture_output=True,
            check=False,
            timeout=120,
        )
        return done.stdout + done.stderr

    def python(self, digest: str, code: str) -> str:
        """Run code with the interpreter that the user-data starts the agent with."""
        python = self.folder / "root" / "environments" / digest[:16] / "bin" / "python"
        command = [str(python), "-I", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture
def node(tmp_path: Path, s3_bucket: str) -> Iterator[Node]:
    one = Node(tmp_path, s3_bucket)
    yield one
    one.imds.close()


def report(bucket: Bucket) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bucket.get("clusters/c1/nodes/i-1.json", "report") or b"")
    return found


def test_environment_is_stored_once_and_installed_from_the_bucket(
    bucket: Bucket, packages: list[Package], tmp_path: Path, node: Node
) -> None:
    first = store(bucket, packages, tmp_path)
    assert [str(one.name) for one in first.manifest.wheels] == ["alpha", "beta"]
    assert first.num_uploaded == 3  # with uv, which the nodes install them with
    again = store(bucket, packages, tmp_path)
    assert (again.digest, again.num_uploaded) == (first.digest, 0)
    # Another machine does not know the stored wheels, but gets the same bytes.
    other = store(bucket, packages, tmp_path / "other")
    assert (other.digest, other.num_uploaded) == (first.digest, 0)

    console = node.boot(first.digest)
    code = "import alpha, beta, importlib.metadata as m; print(alpha.VERSION, beta.VERSION, "
    code += "m.version('beta'))"
    assert node.python(first.digest, code) == "1.0 of the sources 2.0\n", console
    phases = [one["name"] for one in report(bucket)["phases"]]
    assert phases == ["download", "environment", "install"]
    assert report(bucket)["state"] == "booting"
    # The agent is started with the new interpreter, in which this test has not installed it.
    assert "No module named 'etrain_jupyter'" in console

    node.boot(first.digest)
    [phase] = report(bucket)["phases"]
    assert phase["detail"] == "found on the image"

    # Only the changed package is uploaded and downloaded.
    (tmp_path / "beta sources" / "beta.py").write_text("VERSION = 'changed'\n")
    changed = store(bucket, packages, tmp_path)
    assert changed.num_uploaded == 1
    node.boot(changed.digest)
    detail = report(bucket)["phases"][0]["detail"]
    assert "1 wheels, 0 MB, 2 were on the image" in detail
    assert node.python(changed.digest, "import beta; print(beta.VERSION)") == "changed\n"


def test_node_refuses_a_wheel_that_was_changed_in_the_bucket(
    bucket: Bucket, packages: list[Package], tmp_path: Path, node: Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prepared = store(bucket, packages, tmp_path)
    bucket.put(key_of(prepared.digest), prepared.manifest.to_json() + b" ", "test")
    console = node.boot(prepared.digest)
    assert "was changed: its SHA-256 differs" in report(bucket)["error"]
    assert report(bucket)["state"] == "refused"
    assert "No module named" not in console
    assert (tmp_path / "shutdowns").read_text().splitlines()[-1] == "-h now"


def test_python_that_the_node_lacks_is_refused_with_what_to_type(
    bucket: Bucket, packages: list[Package], tmp_path: Path, node: Node
) -> None:
    known = store(bucket, packages, tmp_path).manifest
    manifest = dataclasses.replace(known, python="3.7")
    bucket.put(key_of(manifest.digest), manifest.to_json(), "test")
    node.boot(manifest.digest)
    error = report(bucket)["error"]
    for part in ("this image has no Python 3.7", "image.ami", "image.setup", "python3.7"):
        assert part in error, error


def test_package_that_exists_nowhere_is_refused_before_anything_starts(
    bucket: Bucket, packages: list[Package], tmp_path: Path
) -> None:
    missing = [
        Package(name="gamma-private", version="3.1"),
        Package(name="moved", version="1", project=tmp_path / "nowhere"),
        Package(name="other", version="2"),
    ]
    with pytest.raises(MissingWheelsError, match=r"moved 1: .*nowhere does not exist any more"):
        store(bucket, [*packages, *missing], tmp_path)
    with pytest.raises(MissingWheelsError) as caught:
        store(bucket, [*packages, missing[0], missing[2]], tmp_path)
    text = str(caught.value)
    for part in ("2 packages", "gamma-private 3.1", "other 2", "exclude: [gamma-private, other]",
                 "wheels: FOLDER", "gamma_private-3.1-...whl", "Nothing was started"):  # fmt: skip
        assert part in text, text
    kept = store(bucket, [*packages, missing[0]], tmp_path, exclude=["gamma_*"])
    assert "gamma-private" not in {one.name for one in kept.manifest.wheels}
    # A wheel in the folder of image.environment.wheels is enough.
    write_wheel(tmp_path / "own", "gamma_private", "3.1")
    found = store(bucket, [*packages, missing[0]], tmp_path, wheels=tmp_path / "own")
    assert "gamma-private" in {one.name for one in found.manifest.wheels}


def test_wheel_is_downloaded_for_the_nodes_or_built_from_the_sources_of_an_index(
    bucket: Bucket, packages: list[Package], index: Path, tmp_path: Path
) -> None:
    here = "{}{}".format(*sys.version_info[:2])
    tag = f"cp{here}-cp{here}-manylinux_2_28_x86_64"
    write_wheel(index, "delta", "4.0", f"cp{here}-cp{here}-win_amd64")
    write_wheel(index, "delta", "4.0", tag)
    with tarfile.open(index / "beta-2.0.tar.gz", "w:gz") as archive:
        archive.add(packages[1].project or "", arcname="beta-2.0")
    from_index = [Package(name="delta", version="4.0"), Package(name="beta", version="2.0")]
    found = store(bucket, from_index, tmp_path).manifest
    assert [one.file for one in found.wheels] == [
        "beta-2.0-py3-none-any.whl",
        f"delta-4.0-{tag}.whl",
    ]


def test_nodes_with_gpus_get_the_cuda_build_with_its_libraries(
    bucket: Bucket, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = tmp_path / "whl"
    monkeypatch.setattr(torch_builds, "INDEX", builds.as_uri())
    for label, name, version, needs in (
        ("cu128", "torch", "2.9.1+cu128", ["nvidia_lib"]),
        ("cu128", "nvidia_lib", "1", []),
        ("cpu", "torch", "2.9.1+cpu", []),
    ):
        folder = builds / label / name.replace("_", "-")
        write_wheel(folder, name, version, "py3-none-any", *needs)
        file = f"{name}-{version}-py3-none-any.whl"
        (folder / "index.html").write_text(f'<a href="{file}">{file}</a>')
    torch = [Package(name="torch", version="2.9.1+cpu")]
    # Only find-links is off the network; with no index, pip would ignore PyTorch's, too.
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", (builds / "none").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (builds / "none").as_uri())

    on_cpus = store(bucket, torch, tmp_path).manifest
    assert [one.version for one in on_cpus.wheels] == ["2.9.1+cpu"]
    on_gpus = store(bucket, torch, tmp_path, capabilities=[(8, 6)]).manifest
    assert [(one.name, one.version) for one in on_gpus.wheels] == [
        ("nvidia-lib", "1"),
        ("torch", "2.9.1+cu128"),
    ]
    # The second start downloads nothing.
    shutil.rmtree(builds)
    assert store(bucket, torch, tmp_path, capabilities=[(8, 6)]).manifest == on_gpus


def test_interrupted_start_is_finished_by_the_next_one(
    bucket: Bucket, packages: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Bucket.upload

    def fail(self: Bucket, key: str, *arguments: Any) -> Any:
        if "alpha" in key:
            raise StoreError("the connection was lost")
        return upload(self, key, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", fail)
        with pytest.raises(StoreError, match="the connection was lost"):
            store(bucket, packages, tmp_path)
    prepared = store(bucket, packages, tmp_path)
    assert prepared.num_uploaded <= 3
    # A lifecycle rule of the bucket may remove a wheel.
    [alpha] = [one for one in prepared.manifest.wheels if one.name == "alpha"]
    bucket.delete(alpha.key, "test")
    again = store(bucket, packages, tmp_path)
    assert (again.digest, again.num_uploaded) == (prepared.digest, 1)
