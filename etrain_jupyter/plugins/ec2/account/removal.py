"""Remove everything that ``init`` has created for a pool: ``%etrain pools remove``.

That is the pool's stack, and its bucket, which the stack keeps. The entry in ``pools.yaml`` is
removed last, so that the command can be repeated after an interruption.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.errors import ConfigError, PoolError
from etrain_jupyter.plugins.ec2.account.cloudformation import label_of
from etrain_jupyter.plugins.ec2.account.init import open_site
from etrain_jupyter.plugins.ec2.account.options import InitOptions
from etrain_jupyter.plugins.ec2.account.pools_file import has_mark, remove_entry
from etrain_jupyter.plugins.ec2.account.site import (
    Dialog,
    Site,
    check_name,
    reason_of,
    running_clusters,
)
from etrain_jupyter.plugins.ec2.account.stack import Stack, to_remove
from etrain_jupyter.plugins.ec2.aws_messages import AwsErrors
from etrain_jupyter.plugins.ec2.spec import KIND
from etrain_jupyter.pools.catalog import own_file, read_catalog
from etrain_jupyter.storage.objects.s3_messages import code_of

NOTHING = "Nothing was removed."


def remove_pool(
    name: str,
    options: InitOptions,
    dialog: Dialog,
    *,
    deletes_objects: bool = False,
) -> str:
    """Remove a pool's resources, and its entry in ``pools.yaml``.

    ``options`` has the region, bucket and profile of a pool that is not in ``pools.yaml``.

    Raises:
        ConfigError: If the pool is not known, and no region is given.
        PoolError: If one of its clusters still exists, or AWS refuses a request.
    """
    check_name(name)
    known = read_catalog().get(name)
    if known is None and options.region is None:
        raise ConfigError(
            f"no pools.yaml defines pool '{name}'. {NOTHING}",
            hint=f"to remove the rest of it, name its region: pools remove {name} --region R",
        )
    region = str(known.values.get("region", "")) if known and known.kind == KIND else ""
    options = dataclasses.replace(options, region=options.region or region)
    site, _ = open_site(name, options)
    file = known.file if known is not None else options.file or own_file()
    stack = Stack(site)
    steps: list[tuple[str, Callable[[], None]]] = []
    try:
        if ids := running_clusters(site.clients, site.spec):
            raise PoolError(
                f"pool {name} still has {', '.join(ids)}. {NOTHING} Run `%etrain down {name}` "
                "first."
            )
        resources = stack.resources(is_usable=False)
        held = _holders(site, resources)
        if stack.describe():
            steps.append(
                (f"delete stack {stack.name}", lambda: _delete_stack(site, stack, held, dialog.say))
            )
        bucket_steps, notes = to_remove(site, deletes_objects=deletes_objects)
    except AwsErrors as exc:
        raise PoolError(f"the account cannot be examined: {reason_of(exc)}. {NOTHING}") from exc
    details = [f"  delete {label_of(one)}" for id, one in resources.items() if id != "Bucket"]
    details += [f"  detach policy {policy} from {kind.lower()} {one}" for policy, kind, one in held]
    steps += bucket_steps
    if known is not None and has_mark(file, name):
        steps.append((f"remove pool {name} from {file}", lambda: remove_entry(file, name)))
    elif known is not None:
        notes.append(f"pool {name} stays in {file}: `etrain pools init` did not write it")
    shown = [[text, *(details if text.startswith("delete stack") else ())] for text, _ in steps]
    dialog.show(site, notes, [line for lines in shown for line in lines])
    if not steps:
        return f"Nothing of pool {name} is left to remove."
    if refusal := dialog.refusal("remove", NOTHING):
        return refusal
    for text, run in steps:
        dialog.say(text)
        try:
            run()
        except AwsErrors as exc:
            raise PoolError(
                f"could not {text}: {reason_of(exc)}. Then run `%etrain pools remove {name}` "
                "again: it continues with this step."
            ) from exc
    return f"pool {name} was removed"


def _holders(site: Site, resources: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return where policies are attached: policy, ``User``, ``Group`` or ``Role``, and its name."""
    held = []
    for one in resources.values():
        if one["Type"] != "AWS::IAM::ManagedPolicy":
            continue
        policy = one["Properties"]["ManagedPolicyName"]
        try:
            found = site.clients.iam.list_entities_for_policy(PolicyArn=_arn(site, policy))
        except ClientError as exc:
            if code_of(exc) != "NoSuchEntity":  # an earlier attempt has deleted it
                raise
            continue
        for kind in ("User", "Group", "Role"):
            held += [(policy, kind, who[f"{kind}Name"]) for who in found[f"Policy{kind}s"]]
    return held


def _delete_stack(
    site: Site, stack: Stack, held: list[tuple[str, str, str]], say: Callable[[str], object]
) -> None:
    for policy, kind, who in held:
        # IAM refuses to delete a policy that is still attached.
        detach = getattr(site.clients.iam, f"detach_{kind.lower()}_policy")
        detach(**{f"{kind}Name": who}, PolicyArn=_arn(site, policy))
    stack.delete(say)


def _arn(site: Site, policy: str) -> str:
    return f"arn:aws:iam::{site.account}:policy/{policy}"
