"""An empty account in the fake cloud, and a user who creates a pool in it.

Commands run in processes of their own, as in a terminal, so that they can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3

from etrain_jupyter.plugins.ec2.simulator.cloud import Account, FakeAws
from etrain_jupyter.process.cluster_dir import cluster_dirs
from etrain_jupyter.process.processes import kill_processes_of

if TYPE_CHECKING:
    from tests.integration.notebook import Notebook

POOL = "spot"
TYPE = "m5.large"
QUICK = (
    "jupyter*", "playwright", "pyarrow", "transformers", "scikit-learn", "pandas", "mlflow*",
    "moto", "cfn-lint", "mkdocs*", "wandb", "mypy", "ruff", "tensorboard", "matplotlib",
)  # fmt: skip
"""Packages that the quick run leaves out: a training job needs none of them."""
ADMIN = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": ["*"], "Resource": ["*"]}],
}
ETRAIN = "from etrain_jupyter.cli import main; raise SystemExit(main())"
QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
PATIENCE_S = 1800.0
DISK_S = 1800.0
"""Time for which the disk of a terminated node may be deleted, in seconds."""


@contextlib.contextmanager
def user_of(cloud: FakeAws, folder: Path, *, enforces: bool = True) -> Iterator[Account]:
    """Become the administrator of an account with an image and a market."""
    spot = {"instance_type": TYPE, "zone": "us-east-1a", "capacity": 4, "price_usd": 0.036}
    cloud.set_market([spot], [{"instance_type": TYPE, "price_usd": 0.1}])
    account = cloud.make_account()
    before, place = dict(os.environ), Path.cwd()
    for name in [name for name in os.environ if name.startswith(("AWS_", "ETRAIN_"))]:
        del os.environ[name]
    os.environ.update(cloud.environment, **cloud.make_user("admin", ADMIN))
    for name in ("ETRAIN_STATE", "ETRAIN_RUNS"):
        os.environ[name] = str(folder / name.lower())
    os.environ["ETRAIN_POOLS"] = str(folder / "pools.yaml")
    os.chdir(folder)
    cloud.enforce_iam(enforces)
    try:
        yield account
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)


class Steps:
    """Run steps, and record their seconds and their requests to AWS."""

    def __init__(self, cloud: FakeAws, found: dict[str, Any]) -> None:
        self._cloud = cloud
        self._steps: list[dict[str, Any]] = found.setdefault("steps", [])

    def run(self, name: str, act: Callable[[], Any]) -> Any:
        """Run a step; record its seconds and its requests to AWS, by service."""
        self._cloud.set_faults()  # resets the counters
        started = time.monotonic()
        result = act()
        seconds, requests = time.monotonic() - started, self._cloud.calls()
        services: Counter[str] = Counter()
        for action, number in requests.items():
            services[action.partition(".")[0]] += number
        calls = sum(services.values())
        step = {"step": name, "seconds": seconds, "calls": calls, "services": dict(services)}
        self._steps.append(step)
        print(f"{name}: {seconds:.1f} s, {calls} requests {dict(services)}", flush=True)
        return result


def set_image(image: str) -> None:
    """Change the pool's image in pools.yaml."""
    file = Path("pools.yaml")
    lines = [line for line in file.read_text().splitlines() if not line.startswith("  image:")]
    file.write_text("\n".join([*lines, f"  image: {image}"]) + "\n")


def without_packages(image: str, exclude: Sequence[str]) -> str:
    """Return the key ``image`` of a pool with the kernel's environment, without some packages."""
    names = ", ".join(f"'{name}'" for name in exclude)
    return f"{{ami: {image}, environment: {{exclude: [{names}]}}}}"


def shorten(cloud: FakeAws) -> None:
    """Add the settings of the simulated cloud to the pool's entry, as a user would edit it."""
    with Path("pools.yaml").open("a") as stream:
        stream.write(
            f"  head_host: {cloud.host_address}\n  tick: 1 s\n"
            "  lifetime: {lease_ttl: 60 s, linger: 1 s, boot: 10 h}\n"
        )


def await_deleted_disks(cloud: FakeAws, *, num_kept: int = 0) -> None:
    """Wait until the disks of terminated nodes are deleted, except those of images.

    EC2's nodes have disks of their own, but simulated ones share that of this machine.
    """
    disks = Path(cloud.folder)
    cloud.wait_until(lambda: len([*disks.glob("*/disk")]) <= num_kept, within_s=DISK_S)
    os.sync()


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Everything that a pool has left in the account and on the user's machine."""

    running: Sequence[str] = ()
    """Machines that are not terminated."""
    names: Sequence[str] = ()
    """Buckets, roles, instance profiles, policies and security groups of the pool."""
    uploads: Sequence[str] = ()
    """Keys of uploads that a killed command has begun; the bucket's rule ends them after a day."""
    objects: Sequence[str] = ()
    """Objects in its bucket, without the environment and the jobs of the user's run store."""
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Templates, volumes, processes and others, by kind."""

    def __bool__(self) -> bool:
        return bool(self.running or self.names or self.uploads or self.objects or self.others)

    def __str__(self) -> str:
        parts = {
            "running": self.running,
            "names": self.names,
            "uploads": self.uploads,
            "objects": self.objects,
        }
        shown = {name: list(one) for name, one in (parts | dict(self.others)).items() if one}
        return json.dumps(shown) if shown else "nothing"


class User:
    """A user of the pool, in the folder of ``user_of``.

    Args:
        cloud: The fake cloud.
        account: Its account.
        image: The key ``image`` of the pool; empty for the default.
    """

    def __init__(self, cloud: FakeAws, account: Account, *, image: str = "") -> None:
        self.cloud, self.account, self._image = cloud, account, image
        self.bucket = f"etrain-{POOL}-{account.account_id}-{account.region}"
        self._launcher = cloud.make_user("ann")
        self._children: list[subprocess.Popen[str]] = []
        self._notebooks: list[Notebook] = []

    # --- what the administrator does ---

    def init(self) -> None:
        """Create the pool, and permit the user to start clusters."""
        flags = ["--region", self.account.region, "--types", TYPE, "--ami", self.account.image]
        self.etrain("pools", "init", POOL, *flags, "--yes", is_admin=True)

    def prepare(self) -> None:
        """Write the settings of the simulated cloud, and attach the launchers' policy."""
        shorten(self.cloud)
        if self._image:
            set_image(self._image)
        boto3.Session().client("iam").attach_user_policy(
            UserName="ann",
            PolicyArn=f"arn:aws:iam::{self.account.account_id}:policy/etrain-{POOL}-launcher",
        )

    def remove(self) -> None:
        """Remove the pool with all objects."""
        self.etrain("pools", "remove", POOL, "--yes", "--delete-objects", is_admin=True)

    # --- what the user does ---

    def etrain(self, *words: str, is_admin: bool = False) -> str:
        """Run a command to its end; return its output.

        Raises:
            RuntimeError: If it fails, with its output.
        """
        child = self.start(*words, is_admin=is_admin)
        text, _ = child.communicate(timeout=PATIENCE_S)
        if child.returncode:
            raise RuntimeError(f"etrain {' '.join(words)} failed:\n{text}")
        return text

    def start(self, *words: str, is_admin: bool = False) -> subprocess.Popen[str]:
        """Start a command."""
        child = subprocess.Popen(
            [sys.executable, "-c", ETRAIN, *words],
            env={**os.environ, **({} if is_admin else self._launcher)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._children.append(child)
        return child

    def open_notebook(self) -> Notebook:
        """Start a kernel, and run the first cell of the quickstart notebook."""
        from tests.integration.notebook import Notebook

        notebook = Notebook(Path.cwd(), self._launcher)
        self._notebooks.append(notebook)
        self.show(notebook, quickstart()[0])
        return notebook

    def train(self, notebook: Notebook, until: str) -> None:
        """Run the quickstart's training cell, and wait until an expression with ``job`` is true."""
        self.show(notebook, quickstart()[1])
        wait = f"job.wait(until=lambda job: {until}, timeout={PATIENCE_S:g})"
        self.show(notebook, wait)

    def finish(self, notebook: Notebook) -> None:
        """Wait until the job of the notebook has finished."""
        self.show(notebook, "%etrain wait")

    def show(self, notebook: Notebook, code: str) -> str:
        """Run a cell; return its output.

        Raises:
            RuntimeError: If it fails.
        """
        done = notebook.run(code, PATIENCE_S)
        if done.status != "ok":
            raise RuntimeError(done.text)
        return done.text

    def down(self) -> str:
        """Shut the pool's cluster down."""
        return self.etrain("down", POOL)

    def close(self) -> None:
        """End everything that this user has started."""
        for notebook in self._notebooks:
            notebook.close()
        for child in self._children:
            if child.poll() is None:
                child.kill()
                child.communicate()
        # After an error, a head may still launch machines in this cloud.
        for cluster in cluster_dirs():
            kill_processes_of(cluster.cluster_id)

    # --- what is left ---

    def keys(self, prefix: str = "etrain/") -> list[str]:
        """Return the keys in the pool's bucket; empty if there is none."""
        names = [one["Name"] for one in boto3.Session().client("s3").list_buckets()["Buckets"]]
        return self.cloud.s3.list_keys(self.bucket, prefix) if self.bucket in names else []

    def _uploads(self) -> list[str]:
        s3 = boto3.Session().client("s3")
        if self.bucket not in [one["Name"] for one in s3.list_buckets()["Buckets"]]:
            return []
        found = s3.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())
        return [one["Key"] for one in found]

    def remains(self) -> Remains:
        """Return what is left after the pool's clusters have ended."""
        jobs = [one.name for one in Path(os.environ["ETRAIN_RUNS"]).glob("*")]
        known = ("etrain/environments/", *(f"etrain/runs/{job}/" for job in jobs))
        iam, s3 = boto3.Session().client("iam"), boto3.Session().client("s3")
        names = [
            *(one["Name"] for one in s3.list_buckets()["Buckets"]),
            *(one["RoleName"] for one in iam.list_roles()["Roles"]),
            *(one["PolicyName"] for one in iam.list_policies(Scope="Local")["Policies"]),
            *(
                one["InstanceProfileName"]
                for one in iam.list_instance_profiles()["InstanceProfiles"]
            ),
        ]
        left = self.cloud.leftovers()
        groups = left.pop("security_groups", [])
        left.pop("objects", None)  # counted below, with all others
        return Remains(
            running=[one.instance_id for one in self.cloud.instances("pending", "running")],
            names=[*(one for one in names if one.startswith(f"etrain-{POOL}")), *groups],
            uploads=self._uploads(),
            objects=[one for one in self.keys() if not one.startswith(known)],
            others=left,
        )


def quickstart() -> tuple[str, str]:
    """Return the first two cells of the quickstart notebook, of which the second one trains.

    Only the pool differs from the notebook.
    """
    cells = json.loads(QUICKSTART.read_text(encoding="utf-8"))["cells"]
    first, train = ["".join(one["source"]) for one in cells if one["cell_type"] == "code"][:2]
    return first, f"{train}\npool: {POOL}"
