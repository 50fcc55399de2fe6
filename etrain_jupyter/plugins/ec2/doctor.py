"""Checks of ``%etrain doctor`` for EC2. Only ``check_all`` sends requests, with a short timeout."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etrain_jupyter.display.numbers import counted
from etrain_jupyter.errors import EtrainError, PoolError
from etrain_jupyter.notebook.commands.doctor import Finding, version_of
from etrain_jupyter.plugins.ec2.account_commands import aws_specs
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.pools.catalog import PoolEntry

if TYPE_CHECKING:
    from etrain_jupyter.plugins.ec2.reaping import Tagged

EC2_S = 15.0
"""Timeout for querying EC2 in one region, in seconds."""
METHODS = {
    "env": "the environment",
    "shared-credentials-file": "~/.aws/credentials",
    "config-file": "~/.aws/config",
    "iam-role": "the role of this machine",
    "container-role": "the role of this container",
    "assume-role": "a role that a profile assumes",
    "sso": "a profile that signs in",
    "login": "a profile that signs in",
    "custom-process": "a program that a profile names",
}
"""Sources of credentials, by boto3's names."""


def check(entries: Sequence[PoolEntry]) -> list[Finding]:
    """Check for boto3 and credentials, without a request to AWS."""
    # Credentials belong to a profile, so check each profile only once, even if several pools use
    # it.
    specs: dict[str | None, AwsSpotSpec] = {}
    for entry in entries:
        spec = entry.read_as(AwsSpotSpec)
        specs.setdefault(spec.profile, spec)
    version = version_of("boto3")
    if not version:
        remedy = "pip install 'etrain-jupyter[aws]'"
        return [Finding(state="wrong", what="boto3 missing: EC2 cannot be used", remedy=remedy)]
    findings = []
    for spec in specs.values():
        whose = f" of profile {spec.profile}" if spec.profile else ""
        try:
            place, trouble = find_credentials(spec), "none were found on this machine"
        except EtrainError as exc:
            place, trouble = "", str(exc)
        if place:
            what = f"boto3 {version}, credentials{whose} from {place}"
            findings.append(Finding(state="ok", what=what))
        else:
            remedy = "aws sso login, aws configure, or attach a role to this machine"
            what = f"no AWS credentials{whose}: {trouble}"
            findings.append(Finding(state="wrong", what=what, remedy=remedy))
    return findings


def find_credentials(spec: AwsSpotSpec) -> str:
    """Return the source of boto3's credentials as text; empty if there are none.

    They may be invalid or expired; only a request to AWS can determine that. Outside of EC2, this
    may take two seconds, while boto3 looks for the machine's role.

    Raises:
        PoolError: If the configuration is invalid, such as a profile that does not exist.
    """
    import boto3
    from botocore.exceptions import BotoCoreError

    from etrain_jupyter.plugins.ec2.aws_messages import message_of_error

    try:
        session = boto3.session.Session(profile_name=spec.profile, region_name=spec.region)
        found = session.get_credentials()
    except BotoCoreError as exc:
        raise PoolError(message_of_error(exc)) from exc
    # A newer boto3 may have methods that METHODS lacks: return boto3's own name for those.
    return METHODS.get(found.method, found.method) if found is not None else ""


def check_all(region: str | None) -> list[Finding]:
    """Check all clusters that this package created in the account, even those of other users."""
    return [found for spec in aws_specs(region) for found in _query_ec2(spec)]


def _query_ec2(spec: AwsSpotSpec) -> list[Finding]:
    from etrain_jupyter.plugins.ec2.ec2_api import Clients
    from etrain_jupyter.plugins.ec2.reaping import by_cluster, find_tagged

    results: list[Tagged | Exception] = []
    has_responded = threading.Event()

    def query() -> None:
        try:
            results.extend(find_tagged(Clients(spec), spec.region))
        except Exception as exc:
            results.append(exc)
        has_responded.set()

    # Use a daemon thread, so that a hanging request blocks neither the cell nor the kernel's exit.
    threading.Thread(target=query, name="etrain-doctor", daemon=True).start()
    # The thread continues if the timeout expires; its result is then ignored.
    if not has_responded.wait(EC2_S):
        what = f"EC2 in {spec.region} has not responded within {EC2_S:g} s"
        return [Finding(state="wrong", what=what, remedy="check the network and the proxy")]
    if results and isinstance(results[0], Exception):
        return [Finding(state="wrong", what=str(results[0]), remedy="%etrain pools policy")]
    resources = [one for one in results if not isinstance(one, Exception)]
    findings = [
        _describe_cluster(spec.region, cluster, own)
        for cluster, own in by_cluster(resources).items()
    ]
    return findings or [Finding(state="ok", what=f"no clusters on EC2 in {spec.region}")]


def _describe_cluster(region: str, cluster: str, resources: list[Tagged]) -> Finding:
    num_machines = sum(one.kind == "instance" for one in resources)
    usd = sum(one.usd_per_h or 0.0 for one in resources)
    rest = len(resources) - num_machines
    what = f"cluster {cluster} on EC2 in {region}: {counted(num_machines, 'machine')}, "
    what += f"{counted(rest, 'other resource')}, ${usd:.3g}/h"
    # An expired cluster should have shut itself down; until it does, it wastes money.
    if all(one.is_expired for one in resources):
        return Finding(state="wrong", what=f"{what}; has expired", remedy="%etrain reap ends it")
    return Finding(state="ok", what=what)
