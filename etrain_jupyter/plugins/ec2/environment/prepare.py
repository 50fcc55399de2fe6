"""Store the kernel's environment in the pool's bucket, for nodes to install.

::

    this machine                                    bucket
    list packages, choose the build of torch
    for each package that is not stored yet:
      build or download its wheel --------------->  environments/wheels/SHA256/FILE
    manifest: names and digests   --------------->  environments/SHA256.json
                                                      ^ the user-data names it; nodes verify it

Each wheel is downloaded and uploaded only once. The second start of a cluster builds the wheels of
local projects, and otherwise only lists the bucket.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.account.machines import find_architecture
from etrain_jupyter.plugins.ec2.ec2_api import Clients
from etrain_jupyter.plugins.ec2.environment.packages import (
    Package,
    find_lock,
    read_packages,
    run_uv,
    without,
)
from etrain_jupyter.plugins.ec2.environment.sources import (
    Missing,
    MissingWheelsError,
    NoWheelError,
    Sources,
)
from etrain_jupyter.plugins.ec2.environment.torch_builds import (
    capabilities_of,
    choose_build,
    installed_cuda,
)
from etrain_jupyter.plugins.ec2.environment.wheels import (
    WHEELS,
    Manifest,
    Platform,
    Wheel,
    key_of,
)
from etrain_jupyter.plugins.ec2.launch_context import find_types
from etrain_jupyter.plugins.ec2.network import NOTHING
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec, EnvironmentSpec
from etrain_jupyter.process.files import write_private
from etrain_jupyter.process.state_root import open_state_root
from etrain_jupyter.storage.objects.s3_bucket import Bucket

INDEX_FILE = "wheels.json"
"""File in the state folder with the wheels that this machine has stored, by package."""
NUM_THREADS = 4


MACHINES = {"x86_64": "x86_64", "arm64": "aarch64"}
"""Architectures of EC2, and their names in wheels."""
CACHE = "environments"
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class NodeNeeds:
    """Requirements of the nodes."""

    machine: str = "x86_64"
    """Architecture of the nodes."""
    capabilities: Sequence[tuple[int, int]] = ()
    """Compute capabilities of the nodes' GPUs."""
    exclude: Sequence[str] = ()
    wheels: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An environment in the bucket."""

    manifest: Manifest
    num_uploaded: int
    uploaded_bytes: int
    seconds: float

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return self.manifest.digest


def prepare(
    bucket: Bucket,
    needs: NodeNeeds,
    *,
    cache: Path,
    say: Callable[[str], object],
    packages: Sequence[Package] | None = None,
) -> Prepared:
    """Store this kernel's environment in the bucket, unless it is already there.

    ``cache`` is the folder for the list of stored wheels; ``packages`` are by default those of this
    process.

    Raises:
        MissingWheelsError: If some packages have no wheel.
        PoolError: If no build of torch fits the GPUs.
        StoreError: If the bucket cannot be read or written.
    """
    started = time.monotonic()
    chosen = without(read_packages() if packages is None else packages, needs.exclude)
    sources, notes = _sources_of(chosen, needs)
    for note in notes:
        say(f"etrain: {note}")
    stored = set(bucket.keys(WHEELS, "the stored wheels cannot be listed"))
    store = _WheelStore(bucket, sources, cache, stored, say)
    # Nodes install with uv, even if uv is a separate program here, in no environment.
    has_uv = any(one.name == "uv" for one in chosen)
    uv = Package(name="uv", version=run_uv("--version").split()[1])
    with tempfile.TemporaryDirectory(prefix="etrain-wheels-") as folder:
        wheels = store.find_all([*chosen, *([] if has_uv else [uv])], Path(folder))
    installer = wheels["uv"]
    manifest = Manifest(
        python=platform.python_version(),
        machine=sources.platform.machine,
        wheels=tuple(wheels[name] for name in sorted(wheels) if has_uv or name != "uv"),
        installer=installer,
    )
    # The key is the digest, so an existing object has the same content.
    bucket.put_if_absent(
        key_of(manifest.digest), manifest.to_json(), "the manifest cannot be stored"
    )
    return Prepared(
        manifest=manifest,
        num_uploaded=store.num_uploaded,
        uploaded_bytes=store.uploaded_bytes,
        seconds=time.monotonic() - started,
    )


def _sources_of(packages: Sequence[Package], needs: NodeNeeds) -> tuple[Sources, list[str]]:
    """Return the sources of wheels, and remarks for the user."""
    notes = []
    torch = next((one for one in packages if one.name == "torch"), None)
    build = None
    if torch is not None:
        installed = _cuda_of(torch)
        build = choose_build(torch.version, installed, needs.capabilities)
        if build is not None:
            kind = f"for CUDA {installed}" if installed else "for CPUs"
            notes.append(
                f"torch {torch.version} is a build {kind}; the nodes get {build.label} from "
                f"{build.index}"
            )
    folder = needs.wheels
    if folder is not None and not folder.is_dir():
        raise PoolError(
            f"image.environment.wheels: the folder {folder} does not exist. Nothing was started. "
            "Correct the path in pools.yaml, or remove the key."
        )
    lock, why_not = find_lock(Path.cwd(), packages)
    if why_not:
        notes.append(why_not)
    node = Platform(python=sys.version_info[:2], machine=needs.machine)
    return Sources(platform=node, build=build, folder=folder, lock=lock), notes


def _cuda_of(torch: Package) -> str:
    """Return the CUDA version of the installed torch, such as ``12.8``; empty for a CPU build."""
    if label := Version(torch.version).local:
        return f"{label[2:-1]}.{label[-1]}" if label.startswith("cu") else ""
    found = importlib.util.find_spec("torch")
    return installed_cuda(Path(found.origin).parent) if found and found.origin else ""


class _WheelStore:
    """Finds the wheels that the bucket lacks, and uploads them."""

    def __init__(
        self,
        bucket: Bucket,
        sources: Sources,
        cache: Path,
        stored: set[str],
        say: Callable[[str], object],
    ) -> None:
        self._bucket = bucket
        self._sources = sources
        self._cache = cache / INDEX_FILE
        self._known = _read_index(self._cache)
        self._stored = stored
        self._say = say
        self.num_uploaded = 0
        self.uploaded_bytes = 0

    def find_all(self, packages: Sequence[Package], folder: Path) -> dict[str, Wheel]:
        """Make sure that the bucket has the wheels of all packages; return them by name."""
        found: dict[str, Wheel] = {}
        to_download: list[Package] = []
        missing: list[Missing] = []

        def find(package: Package) -> None:
            try:
                path = self._sources.find_here(package, folder)
            except NoWheelError as exc:
                missing.append(Missing(package=package, reason=str(exc)))
                return
            known = self._known.get(self._cache_key(package))
            if path is not None:
                found[package.name] = self._store(path)
            elif known and all(one.key in self._stored for one in known):
                for one in known:
                    found.setdefault(one.name, one)
            else:
                to_download.append(package)

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="etrain-wheels") as pool:
            list(pool.map(find, packages))
            if missing:
                raise MissingWheelsError(sorted(missing, key=lambda one: one.package.name))
            if to_download:
                self._say(
                    f"etrain: downloading {len(to_download)} of {len(packages)} packages for "
                    f"{self._sources.platform}; this is done once"
                )
                self._download(sorted(to_download, key=lambda one: one.name), folder, found, pool)
        self._write_index()
        return found

    def _download(
        self,
        packages: Sequence[Package],
        folder: Path,
        found: dict[str, Wheel],
        pool: ThreadPoolExecutor,
    ) -> None:
        replaced = [one for one in packages if self._sources.is_replaced(one)]
        others = [one for one in packages if not self._sources.is_replaced(one)]
        # A build comes with the CUDA libraries that it needs.
        build = list(pool.map(self._store, self._sources.download_build(replaced, folder)))
        for package in replaced:
            self._known[self._cache_key(package)] = build
        paths = self._sources.download(others, folder)
        wheels = pool.map(self._store, [paths[one.name] for one in others])
        for package, wheel in zip(others, wheels, strict=True):
            self._known[self._cache_key(package)] = [wheel]
            found[package.name] = wheel
        for wheel in build:
            found.setdefault(wheel.name, wheel)

    def _store(self, path: Path) -> Wheel:
        """Upload a wheel, unless it is already stored."""
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name, version, _, _ = parse_wheel_filename(path.name)
        wheel = Wheel(name=name, version=str(version), file=path.name, sha256=digest, size=size)
        if wheel.key not in self._stored:
            what = f"the wheel {path.name} cannot be stored"
            try:
                self._bucket.upload(wheel.key, path, size, what)
            except StoreError:
                # Another kernel may have stored it in the meantime.
                if self._bucket.head(wheel.key, what) is None:
                    raise
            self._stored.add(wheel.key)
            self.num_uploaded += 1
            self.uploaded_bytes += size
        return wheel

    def _cache_key(self, package: Package) -> str:
        """Return everything that determines a downloaded wheel, as a key."""
        build = self._sources.build if self._sources.is_replaced(package) else None
        return f"{package.requirement} for {self._sources.platform} {build.label if build else ''}"

    def _write_index(self) -> None:
        self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = {key: [asdict(one) for one in wheels] for key, wheels in self._known.items()}
        write_private(self._cache, json.dumps(known))


def _read_index(path: Path) -> dict[str, Sequence[Wheel]]:
    try:
        known: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
        return {key: [Wheel(**one) for one in wheels] for key, wheels in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # missing, or written by another version: the wheels are downloaded again


def with_environment(
    clients: Clients, spec: AwsSpotSpec, say: Callable[[str], object] = print
) -> AwsSpotSpec:
    """Return the spec with the manifest of the stored environment; blocks until it is stored.

    Pools whose image has its own interpreter are returned unchanged.

    Raises:
        PoolError: If a package cannot be sent, or the bucket cannot be used.
    """
    if not spec.image.is_kernel:
        return spec
    try:
        if spec.image.manifest:
            _check_stored(clients, spec)
            return spec
        prepared = prepare(
            clients.bucket,
            needs_of(clients, spec),
            cache=open_state_root() / CACHE,
            say=say,
        )
    except StoreError as exc:
        raise PoolError(
            f"the kernel's environment cannot be stored in the bucket {spec.bucket}: {exc}. "
            f"{NOTHING} `%etrain pools policy` prints the policy that the user needs. To use an "
            "interpreter of the image instead, set image.python."
        ) from exc
    wheels = prepared.manifest.wheels
    uploaded = (
        f"{prepared.num_uploaded} wheels ({prepared.uploaded_bytes / MB:.0f} MB) uploaded"
        if prepared.num_uploaded
        else "all in the bucket"
    )
    say(
        f"etrain: nodes install this kernel's environment: {len(wheels)} packages, "
        f"{sum(one.size for one in wheels) / MB:.0f} MB, {uploaded} ({prepared.seconds:.1f} s)"
    )
    return spec.with_manifest(prepared.digest)


def needs_of(clients: Clients, spec: AwsSpotSpec) -> NodeNeeds:
    """Return what the pool's machines need.

    Raises:
        PoolError: If the image does not exist.
    """
    environment = spec.image.environment or EnvironmentSpec()
    named = spec.capacity.gpu is None
    types = spec.capacity.types if named else tuple(find_types(clients, spec))
    folder = environment.wheels
    return NodeNeeds(
        machine=MACHINES.get(find_architecture(clients, spec), "x86_64"),
        capabilities=capabilities_of(types),
        exclude=environment.exclude,
        wheels=Path(folder).expanduser() if folder is not None else None,
    )


def _check_stored(clients: Clients, spec: AwsSpotSpec) -> None:
    key = key_of(spec.image.manifest)
    if clients.bucket.head(key, "looking up the environment") is None:
        raise PoolError(
            f"image.environment.manifest names an environment that s3://{spec.bucket}/"
            f"{spec.prefix}{key} does not contain. {NOTHING} Remove the key, to store the kernel's "
            "environment."
        )
