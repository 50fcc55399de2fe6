"""Install the notebook's environment on a node that has no part of it yet.

The user-data contains this file and runs it with the image's own interpreter, so it uses nothing
but the standard library of Python 3.8. It reads the manifest and the wheels from the pool's bucket
with the machine's role, verifies their digests, and installs them without a package index. Each
phase is reported in ``nodes/ID.json``, like the agent's states later.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

PHASES = "phases.json"
COMPLETE = "complete"
NUM_THREADS = 8
BOOT_S = 600.0
"""Timeout for the metadata service and S3 at boot, in seconds: a new role takes minutes."""
RETRY_S = 2.0
REQUEST_S = 60.0
CHUNK_BYTES = 1 << 20
PLACES = ("/usr/bin", "/usr/local/bin", "/opt/pytorch/bin", "/opt/conda/bin", "/opt/python/bin")
EMPTY = hashlib.sha256(b"").hexdigest()


T = TypeVar("T")


class InstallError(Exception):
    """The environment cannot be installed; the text is shown to the user."""


class Metadata:
    """The metadata service: identity and role of this machine."""

    def __init__(self) -> None:
        url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
        self._url = url.rstrip("/") + "/latest/"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token = ""

    def get(self, path: str) -> str:
        """Return a page."""
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
            request = urllib.request.Request(self._url + "api/token", headers=headers, method="PUT")
            self._token = self._read(request)
        request = urllib.request.Request(
            self._url + path, headers={"X-aws-ec2-metadata-token": self._token}
        )
        try:
            return self._read(request)
        except urllib.error.HTTPError as exc:
            if exc.code == 401:
                self._token = ""  # expired; the caller's retry requests a new one
            raise

    def _read(self, request: urllib.request.Request) -> str:
        with self._opener.open(request, timeout=5) as response:
            return str(response.read().decode())

    def identity(self) -> dict[str, str]:
        """Return the id of this machine and its facts, as the agent reports them."""
        document = json.loads(self.get("dynamic/instance-identity/document"))
        return {
            "instance_id": document["instanceId"],
            "type": document.get("instanceType", ""),
            "zone": document.get("availabilityZone", ""),
        }

    def credentials(self) -> tuple[str, str, str]:
        """Return key, secret and token of the role."""
        environment = os.environ
        if "AWS_ACCESS_KEY_ID" in environment:
            return (
                environment["AWS_ACCESS_KEY_ID"],
                environment.get("AWS_SECRET_ACCESS_KEY", ""),
                environment.get("AWS_SESSION_TOKEN", ""),
            )
        folder = "meta-data/iam/security-credentials/"
        role = json.loads(self.get(folder + self.get(folder).split()[0]))
        return role["AccessKeyId"], role["SecretAccessKey"], role["Token"]


class Bucket:
    """Objects below the pool's prefix, by signed requests (AWS Signature Version 4)."""

    def __init__(self, name: str, prefix: str, region: str, owner: str, metadata: Metadata) -> None:
        self.name, self._prefix, self._region, self._owner = name, prefix, region, owner
        self._metadata = metadata
        self._known: tuple[str, str, str] | None = None
        self._known_at = 0.0
        given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        # A name with dots does not match the certificate of *.s3.REGION.amazonaws.com.
        if given or "." in name:
            self._base = (given or f"https://s3.{region}.{suffix}").rstrip("/") + "/" + name
        else:
            self._base = f"https://{name}.s3.{region}.{suffix}"

    def open(self, key: str) -> Any:
        """Return the response with an object's bytes."""
        return self._send("GET", key, b"")

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""
        with self._send("PUT", key, data) as response:
            response.read()

    def _send(self, method: str, key: str, data: bytes) -> Any:
        url = urllib.parse.urlsplit(self._base + "/" + urllib.parse.quote(self._prefix + key))
        if self._known is None or time.monotonic() - self._known_at > 900:
            self._known, self._known_at = self._metadata.credentials(), time.monotonic()
        headers = self._sign(method, url, data, *self._known)
        if data:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(
            urllib.parse.urlunsplit(url), data=data or None, headers=headers, method=method
        )
        return urllib.request.urlopen(request, timeout=REQUEST_S)

    def _sign(
        self,
        method: str,
        url: urllib.parse.SplitResult,
        data: bytes,
        access: str,
        secret: str,
        token: str,
    ) -> dict[str, str]:
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest = hashlib.sha256(data).hexdigest() if data else EMPTY
        headers = {"host": url.netloc, "x-amz-content-sha256": digest, "x-amz-date": now}
        if token:
            headers["x-amz-security-token"] = token
        if self._owner:
            headers["x-amz-expected-bucket-owner"] = self._owner
        names = ";".join(sorted(headers))
        lines = [f"{name}:{headers[name]}\n" for name in sorted(headers)]
        canonical = "\n".join([method, url.path, "", "".join(lines), names, digest])
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashed])
        key = ("AWS4" + secret).encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={names}, "
            f"Signature={signature}"
        )
        return headers


class Reports:
    """The phases of this boot, on the console and in ``nodes/ID.json``."""

    def __init__(self, bucket: Bucket, cluster: str, identity: dict[str, str], file: str) -> None:
        self._bucket, self._file = bucket, file
        self._identity = identity
        self._key = f"clusters/{cluster}/nodes/{identity['instance_id']}.json"
        self._started = time.time()
        self.phases: list[dict[str, Any]] = []

    def done(self, name: str, detail: str = "") -> None:
        """Report the end of a phase, which began when the previous one ended."""
        now = time.time()
        seconds = round(now - self._started, 3)
        phase = {"name": name, "seconds": seconds, "detail": detail, "at": now}
        self._started = now
        self.phases.append(phase)
        print(f"etrain: {name}: {seconds:.1f} s" + (f" ({detail})" if detail else ""))
        sys.stdout.flush()
        with open(self._file, "w") as file:
            json.dump(self.phases, file)
        self._write("booting", "")

    def refuse(self, error: str) -> None:
        """Report that this machine cannot be used."""
        self._write("refused", error)

    def _write(self, state: str, error: str) -> None:
        record = dict(self._identity, state=state, error=error, at=time.time(), phases=self.phases)
        try:
            self._bucket.put(self._key, json.dumps(record).encode())
        except (OSError, ValueError, KeyError) as exc:
            # Reports are for messages only; the boot continues without them.
            print(f"etrain: the report was not written: {exc}")


def retry(what: str, act: Callable[[], T]) -> T:
    """Retry a request, because a new role and the network may need some time after the boot."""
    deadline = time.monotonic() + BOOT_S
    shown = ""
    while True:
        try:
            return act()
        except (OSError, ValueError, KeyError, IndexError) as exc:
            error = f"{type(exc).__name__}: {exc}"
            # An object that does not exist will not appear later.
            if getattr(exc, "code", 0) == 404 or time.monotonic() > deadline:
                raise InstallError(f"{what}: {error}") from exc
        if error != shown:
            print(f"etrain: {what}: {error}; retrying")
            shown = error
        time.sleep(RETRY_S)


def read_manifest(bucket: Bucket, digest: str) -> Any:
    """Return the manifest; its digest is in the user-data, so it cannot be replaced."""

    def read() -> bytes:
        with bucket.open(f"environments/{digest}.json") as response:
            return bytes(response.read())

    data = retry("the manifest of the environment cannot be read", read)
    if hashlib.sha256(data).hexdigest() != digest:
        raise InstallError(f"environments/{digest}.json was changed: its SHA-256 differs")
    return json.loads(data)


def fetch(bucket: Bucket, wheel: dict[str, Any], folder: str) -> tuple[str, int]:
    """Return the path of a wheel; download it unless it is on this disk already."""
    target = os.path.join(folder, wheel["sha256"], wheel["file"])
    if os.path.exists(target) and digest_of(target) == wheel["sha256"]:
        return target, 0
    os.makedirs(os.path.dirname(target), exist_ok=True)

    def download() -> tuple[str, int]:
        key = f"environments/wheels/{wheel['sha256']}/{wheel['file']}"
        seen = hashlib.sha256()
        with bucket.open(key) as response, open(target + ".part", "wb") as file:
            while True:
                data = response.read(CHUNK_BYTES)
                if not data:
                    break
                seen.update(data)
                file.write(data)
        if seen.hexdigest() != wheel["sha256"]:
            raise OSError("the bytes differ from their SHA-256 digest")
        os.replace(target + ".part", target)
        return target, wheel["size"]

    return retry(f"{wheel['file']} cannot be downloaded", download)


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file."""
    seen = hashlib.sha256()
    with open(path, "rb") as file:
        for data in iter(lambda: file.read(CHUNK_BYTES), b""):
            seen.update(data)
    return seen.hexdigest()


def unpack_uv(wheel: str, root: str) -> str:
    """Return the path of uv from its wheel."""
    target = os.path.join(root, "uv-" + os.path.basename(os.path.dirname(wheel))[:16], "uv")
    if not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            name = next(one for one in archive.namelist() if one.endswith(".data/scripts/uv"))
            with archive.open(name) as source, open(target + ".part", "wb") as file:
                shutil.copyfileobj(source, file)
        os.chmod(target + ".part", 0o755)
        os.replace(target + ".part", target)
    return target


def make_environment(version: str, root: str, folder: str, uv: str) -> str:
    """Create an empty environment; return the interpreter that it is based on.

    Raises:
        InstallError: If this machine lacks the interpreter, and uv cannot download it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = [uv, "--no-config", "venv", "--quiet", "--no-project", "--python", version, folder]
    places = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    done = run(command, PATH=places, UV_PYTHON_INSTALL_DIR=os.path.join(root, "python"))
    if done.returncode:
        raise InstallError(
            f"this image has no Python {version}, which the notebook has, and uv could not "
            f"download it: {last_line(done.stderr)}. Choose an image with it (image.ami), install "
            f"it with image.setup, for example [apt-get install -y python{version}], together with "
            "image.environment: kernel, or give the nodes a route to the internet "
            "(network.public_ip: true)"
        )
    return os.path.realpath(os.path.join(folder, "bin", "python"))


def install(wheels: list[str], version: str, folder: str, uv: str) -> None:
    """Install exactly these wheels into an environment, without an index."""
    requirements = os.path.join(folder, "requirements.txt")
    with open(requirements, "w") as file:
        file.write("\n".join(wheels) + "\n")
    # The wheels are verified and on this disk, so use no index and no user configuration.
    command = [uv, "--no-config", "pip", "sync", "--quiet", "--offline", "--no-index"]
    # Packages may require a later patch version of Python than that of this image.
    command += ["--python-version", version]
    command += ["--python", os.path.join(folder, "bin", "python"), requirements]
    cache = os.path.join(os.path.dirname(os.path.dirname(folder)), "uv-cache")
    done = run(command, UV_CACHE_DIR=cache)
    if done.returncode:
        raise InstallError("the wheels cannot be installed: " + last_line(done.stderr))


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables of Python, which would change the interpreter."""
    hidden = re.compile(r"PYTHON|UV_(?!PYTHON_)|PIP_|VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not hidden.match(name)}
    kept.update(variables)
    return subprocess.run(
        command,
        env=kept,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def last_line(text: str) -> str:
    """Return the last line of a program's output, or its last error with the causes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    starts = [at for at, line in enumerate(lines) if line.lower().startswith("error")]
    return " ".join(lines[starts[-1] if starts else -1 :])[:500] or "no output"


def boot(options: argparse.Namespace, reports: Reports, bucket: Bucket) -> None:
    """Install the environment."""
    folder = os.path.join(options.folder, "environments", options.manifest[:16])
    if os.path.exists(os.path.join(folder, COMPLETE)):
        reports.done("environment", "found on the image")
        return
    manifest = read_manifest(bucket, options.manifest)
    wheels, installer = manifest["wheels"], manifest["installer"]
    wanted = {one["sha256"]: one for one in [*wheels, installer]}
    place = os.path.join(options.folder, "wheels")
    # Start with the largest wheel, because torch takes longer than all others together.
    largest = sorted(wanted.values(), key=lambda one: -one["size"])
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(lambda one: fetch(bucket, one, place), largest))
    got = {wheel["sha256"]: one for wheel, one in zip(largest, found)}  # noqa: B905 (3.10)
    fetched = {digest: path for digest, (path, _) in got.items()}
    num_new = sum(1 for _, size in got.values() if size)
    megabytes = sum(size for _, size in got.values()) / 1e6
    old = "" if num_new == len(got) else f", {len(got) - num_new} were on the image"
    reports.done("download", f"{num_new} wheels, {megabytes:.0f} MB{old}")
    uv = unpack_uv(fetched[installer["sha256"]], options.folder)
    minor = ".".join(manifest["python"].split(".")[:2])
    base = make_environment(minor, options.folder, folder, uv)
    reports.done("environment", f"Python {minor} from {base}")
    install([fetched[one["sha256"]] for one in wheels], manifest["python"], folder, uv)
    with open(os.path.join(folder, COMPLETE), "w") as file:
        file.write(options.manifest)
    reports.done("install", f"{len(wheels)} packages")


def main() -> None:
    """Install the environment that the arguments name; exit with 1 if that fails."""
    parser = argparse.ArgumentParser(prog="etrain-install")
    for name in ("bucket", "region", "cluster", "manifest", "folder"):
        parser.add_argument("--" + name, required=True)
    for name in ("prefix", "owner"):
        parser.add_argument("--" + name, default="")
    options = parser.parse_args()
    os.makedirs(options.folder, exist_ok=True)
    metadata = Metadata()
    bucket = Bucket(options.bucket, options.prefix, options.region, options.owner, metadata)
    identity = retry("the metadata service cannot be read", metadata.identity)
    file = os.path.join(options.folder, PHASES)
    reports = Reports(bucket, options.cluster, identity, file)
    try:
        boot(options, reports, bucket)
    except Exception as exc:  # the machine must turn itself off, with the reason
        error = str(exc) if isinstance(exc, InstallError) else f"{type(exc).__name__}: {exc}"
        print(f"etrain: the environment was not installed: {error}")
        reports.refuse(f"the environment was not installed: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
