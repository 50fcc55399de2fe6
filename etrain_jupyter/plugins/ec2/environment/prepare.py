"""Store the kernel's environment in the pool's bucket, for nodes to install.

::

    this machine                                    bucket
    list packages, choose the build of torch
    for each package that is not stored yet:
      make or download its wheel  --------------->  environments/wheels/SHA256/FILE
    manifest: names and digests   --------------->  environments/SHA256.json
                                                      ^ the user-data names it; nodes verify it

A wheel is packed and uploaded once: the second start of a cluster reads a list of the bucket only.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from etrain_jupyter.errors import PoolError, StoreError
from etrain_jupyter.plugins.ec2.environment.locked import find_lock
from etrain_jupyter.plugins.ec2.environment.manifest import WHEELS, Manifest, Wheel, key_of
from etrain_jupyter.plugins.ec2.environment.packages import Package, read_packages, without
from etrain_jupyter.plugins.ec2.environment.sources import (
    Missing,
    MissingWheelsError,
    Sources,
    find_uv,
)
from etrain_jupyter.plugins.ec2.environment.torch_builds import choose_build, installed_cuda
from etrain_jupyter.plugins.ec2.environment.wheels import (
    Platform,
    UnpackableError,
    digest_of,
    pack_program,
)
from etrain_jupyter.process.files import write_private
from etrain_jupyter.storage.objects.s3_bucket import Bucket

INDEX_FILE = "wheels.json"
"""Wheels that this machine has stored, by package, in the state folder."""
NUM_THREADS = 4
MIB = 1 << 20


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
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of listing the packages, packing and uploading."""

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
    """Store this kernel's environment in the bucket, unless it is there.

    Args:
        bucket: The pool's prefix.
        needs: Requirements of the nodes.
        cache: Folder for the list of stored wheels.
        say: Shows a line.
        packages: The environment; by default the packages of this process.

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
    listed = time.monotonic()
    stored = set(bucket.keys(WHEELS, "the stored wheels cannot be listed"))
    store = _WheelStore(bucket, sources, cache, stored, say)
    with tempfile.TemporaryDirectory(prefix="etrain-wheels-") as folder:
        wheels = store.find_all(chosen, Path(folder))
        installer = store.find_installer(chosen, wheels, Path(folder))
    manifest = Manifest(
        python="{}.{}".format(*sources.platform.python),
        machine=sources.platform.machine,
        wheels=tuple(sorted(wheels, key=lambda one: one.name)),
        installer=installer,
    )
    # The key is the digest, so an existing object has the same content.
    bucket.put_if_absent(
        key_of(manifest.digest), manifest.to_json(), "the manifest cannot be stored"
    )
    ended = time.monotonic()
    return Prepared(
        manifest=manifest,
        num_uploaded=store.num_uploaded,
        uploaded_bytes=store.uploaded_bytes,
        seconds=ended - started,
        phases={"list": listed - started, "pack and upload": ended - listed},
    )


def _sources_of(packages: Sequence[Package], needs: NodeNeeds) -> tuple[Sources, list[str]]:
    """Return the sources of wheels, and remarks for the user."""
    notes = []
    node = Platform(python=sys.version_info[:2], machine=needs.machine)
    is_linux = sys.platform == "linux"
    here = Platform(python=sys.version_info[:2], machine=platform.machine()) if is_linux else None
    torch = next((one for one in packages if one.name == "torch"), None)
    build = None
    if torch is not None and torch.distribution is not None:
        installed = installed_cuda(Path(str(torch.distribution.locate_file("torch"))))
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
    return Sources(platform=node, build=build, folder=folder, lock=lock, here=here), notes


class _WheelStore:
    """Makes and uploads the wheels that the bucket lacks."""

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

    def find_all(self, packages: Sequence[Package], folder: Path) -> list[Wheel]:
        """Return the wheels of all packages, which are then in the bucket."""
        found: dict[str, Wheel] = {}
        to_make = []
        for package in packages:
            known = self._known.get(self._cache_key(package))
            if known and all(one.key in self._stored for one in known):
                found |= {one.name: one for one in known}
            else:
                to_make.append(package)
        changing = [one for one in to_make if not one.identity]
        if len(to_make) > len(changing):
            self._say(
                f"etrain: preparing {len(to_make)} of {len(packages)} packages for the nodes; this "
                "is done once"
            )
        missing: list[Missing] = []
        to_download: list[Package] = []

        def make(package: Package) -> None:
            try:
                path = self._sources.find(package, folder)
            except UnpackableError as exc:
                missing.append(Missing(package=package, reason=str(exc)))
                return
            if path is None:
                to_download.append(package)
            else:
                found[package.name] = self._remember(package, self._store(path))

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="etrain-wheels") as pool:
            # Start with the largest: torch takes longer than all others together.
            for _ in pool.map(make, sorted(to_make, key=_weight, reverse=True)):
                pass
        if missing:
            raise MissingWheelsError(sorted(missing, key=lambda one: one.package.name))
        for wheel in self._download(sorted(to_download, key=lambda one: one.name), folder):
            # The build of torch for the nodes needs packages that this one does not need.
            found.setdefault(wheel.name, wheel)
        self._write_index()
        return list(found.values())

    def find_installer(
        self, packages: Sequence[Package], wheels: Sequence[Wheel], folder: Path
    ) -> Wheel | None:
        """Return the wheel of uv, or else that of pip."""
        by_name = {one.name: one for one in wheels}
        if "uv" in by_name:
            return by_name["uv"]
        # Environments that uv has made contain neither uv nor pip.
        program = find_uv()
        if not program or self._sources.here != self._sources.platform:
            return by_name.get("pip")
        stat = Path(program).stat()
        key = f"{program} {stat.st_size} {stat.st_mtime_ns}"
        known = self._known.get(key)
        if known is None or known[0].key not in self._stored:
            path = pack_program("uv", Path(program), self._sources.platform, folder)
            self._known[key] = known = [self._store(path)]
            self._write_index()
        return known[0]

    def _download(self, packages: Sequence[Package], folder: Path) -> list[Wheel]:
        if not packages:
            return []
        self._say(f"etrain: downloading {len(packages)} packages for {self._sources.platform}")
        replaced = [one for one in packages if self._sources.is_replaced(one)]
        others = [one for one in packages if not self._sources.is_replaced(one)]
        # A build comes with the CUDA libraries that it needs.
        build = [self._store(path) for path in self._sources.download_build(replaced, folder)]
        for package in replaced:
            self._remember(package, *build)
        wheels = [self._store(path) for path in self._sources.download(others, folder)]
        by_name = {one.name: one for one in wheels}
        for package in others:
            self._remember(package, by_name[package.name])
        return [*wheels, *build]

    def _remember(self, package: Package, *wheels: Wheel) -> Wheel:
        if package.identity:
            self._known[self._cache_key(package)] = wheels
        return wheels[0]

    def _store(self, path: Path) -> Wheel:
        """Upload a wheel, unless it is stored; remove the file if we have made it."""
        size = path.stat().st_size
        name, version, _, _ = parse_wheel_filename(path.name)
        wheel = Wheel(
            name=name, version=str(version), file=path.name, sha256=digest_of(path), size=size
        )
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
        if path.parent != self._sources.folder:
            path.unlink(missing_ok=True)
        return wheel

    def _cache_key(self, package: Package) -> str:
        """Return what determines the content of a package's wheel; empty if that may change."""
        if not package.identity:
            return ""
        parts = (
            str(package),
            package.identity,
            str(self._sources.platform),
            self._sources.build.label
            if self._sources.build and self._sources.is_replaced(package)
            else "",
            str(self._sources.folder or ""),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _write_index(self) -> None:
        self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = {key: [asdict(one) for one in wheels] for key, wheels in self._known.items()}
        write_private(self._cache, json.dumps(known))


def _read_index(path: Path) -> dict[str, Sequence[Wheel]]:
    try:
        known: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
        return {key: [Wheel(**one) for one in wheels] for key, wheels in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # missing, or written by another version: the wheels are packed again


def _weight(package: Package) -> int:
    files = package.distribution.files if package.distribution is not None else None
    return sum(one.size or 0 for one in files or ())
