"""The IAM resources of a pool: the machines' roles, and the policies of those who launch them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.account.site import (
    DENIED,
    Site,
    Step,
    View,
    as_document,
    is_missing,
    tag_pairs,
    tags_from,
)
from etrain_jupyter.plugins.ec2.client.policy import Policy, launcher_policy, trust_policy
from etrain_jupyter.storage.objects.s3_messages import code_of

INLINE = "etrain"
"""Name of a role's inline policy."""
SESSIONS = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
MAX_POLICY = 6144
"""IAM's limit for the characters of a managed policy, without white space."""
MAX_VERSIONS = 5


class RolePiece:
    """A role with its policy, and the instance profile of the same name.

    Args:
        site: The pool's place in the account.
        name: Name of the role and of the profile.
        policy: Returns the role's policy.
        managed: ARN of a policy of AWS that the role has in addition; empty for none.
    """

    def __init__(
        self, site: Site, name: str, policy: Callable[[], Policy], *, managed: str = ""
    ) -> None:
        self._site = site
        self._name = name
        self._policy = policy
        self._managed = managed

    def to_make(self) -> View:
        """Return the steps for the missing ones of role, policy and profile."""
        iam, name, tags = self._site.clients.iam, self._name, tag_pairs(self._site.tags())
        role, profile = self._role(), self._profile()
        for what, found in (("role", role), ("instance profile", profile)):
            if found is not None:
                self._check_ours(what, tags_from(found.get("Tags", ())))
        steps = []
        if role is None:
            document = json.dumps(trust_policy())
            steps.append(
                Step(
                    text=f"create role {name}",
                    run=lambda: iam.create_role(
                        RoleName=name,
                        AssumeRolePolicyDocument=document,
                        Description=f"Machines of the etrain-jupyter pool {self._site.name}",
                        Tags=tags,
                    ),
                )
            )
        if role is None or self._inline() != self._policy():
            steps.append(Step(text=f"set the policy of role {name}", run=self._put_policy))
        if self._managed and (role is None or self._managed not in self._attached()):
            steps.append(
                Step(
                    text=f"attach {self._managed.rpartition('/')[2]} to role {name}",
                    run=lambda: iam.attach_role_policy(RoleName=name, PolicyArn=self._managed),
                )
            )
        if profile is None:
            steps.append(
                Step(
                    text=f"create instance profile {name}",
                    run=lambda: iam.create_instance_profile(InstanceProfileName=name, Tags=tags),
                )
            )
        if profile is None or not profile["Roles"]:
            steps.append(
                Step(
                    text=f"add role {name} to instance profile {name}",
                    run=lambda: iam.add_role_to_instance_profile(
                        InstanceProfileName=name, RoleName=name
                    ),
                )
            )
        return View(steps=steps)

    def to_remove(self) -> View:
        """Return the steps that remove profile, policy and role."""
        iam, name, notes = self._site.clients.iam, self._name, list[str]()
        role, profile = self._role(), self._profile()
        steps = []
        what = f"instance profile {name}"
        if profile is not None and self._is_removable(profile, what, notes):
            steps += [
                Step(
                    text=f"remove role {one['RoleName']} from instance profile {name}",
                    run=partial(
                        iam.remove_role_from_instance_profile,
                        InstanceProfileName=name,
                        RoleName=one["RoleName"],
                    ),
                )
                for one in profile["Roles"]
            ]
            steps.append(
                Step(
                    text=f"delete {what}",
                    run=lambda: iam.delete_instance_profile(InstanceProfileName=name),
                )
            )
        if role is not None and self._is_removable(role, f"role {name}", notes):
            if self._inline() is not None:
                steps.append(
                    Step(
                        text=f"delete the policy of role {name}",
                        run=lambda: iam.delete_role_policy(RoleName=name, PolicyName=INLINE),
                    )
                )
            if SESSIONS in self._attached():
                steps.append(
                    Step(
                        text=f"detach {SESSIONS.rpartition('/')[2]} from role {name}",
                        run=lambda: iam.detach_role_policy(RoleName=name, PolicyArn=SESSIONS),
                    )
                )
            # If someone has added other policies, IAM refuses this step with their number.
            steps.append(
                Step(text=f"delete role {name}", run=lambda: iam.delete_role(RoleName=name))
            )
        return View(steps=steps, notes=notes)

    def _is_removable(self, found: dict[str, Any], what: str, notes: list[str]) -> bool:
        return self._site.is_removable(tags_from(found.get("Tags", ())), what, notes)

    def _check_ours(self, what: str, tags: dict[str, str]) -> None:
        if not self._site.is_ours(tags):
            raise PoolError(
                f"the {what} {self._name} exists, but was not made for pool {self._site.mark}. "
                "Nothing was changed. Choose another name for the pool, or use an existing "
                "instance profile with --role PROFILE."
            )

    def _role(self) -> dict[str, Any] | None:
        return _read(lambda: self._site.clients.iam.get_role(RoleName=self._name)["Role"])

    def _profile(self) -> dict[str, Any] | None:
        iam = self._site.clients.iam
        return _read(
            lambda: iam.get_instance_profile(InstanceProfileName=self._name)["InstanceProfile"]
        )

    def _inline(self) -> Any:
        found = _read(
            lambda: self._site.clients.iam.get_role_policy(RoleName=self._name, PolicyName=INLINE)
        )
        return as_document(found["PolicyDocument"]) if found is not None else None

    def _attached(self) -> list[str]:
        found = self._site.clients.iam.list_attached_role_policies(RoleName=self._name)
        return [one["PolicyArn"] for one in found["AttachedPolicies"]]

    def _put_policy(self) -> None:
        self._site.clients.iam.put_role_policy(
            RoleName=self._name, PolicyName=INLINE, PolicyDocument=json.dumps(self._policy())
        )


class LauncherPieces:
    """The managed policies with the permissions of those who start clusters.

    `init` attaches them to no user: the administrator attaches them to users, groups or roles. One
    policy is enough for most pools; IAM limits its size.
    """

    def __init__(self, site: Site, *, node_role: str = "", head_role: str = "") -> None:
        self._site = site
        self._node_role = node_role
        self._head_role = head_role

    def documents(self) -> dict[str, Policy]:
        """Return the policies by name."""
        whole = launcher_policy(
            self._site.spec,
            account=self._site.account,
            node_role=self._node_role,
            head_role=self._head_role,
        )
        parts = split_policy(whole)
        names = [self._site.launcher_policy] + [
            f"{self._site.launcher_policy}-{number}" for number in range(2, len(parts) + 1)
        ]
        return dict(zip(names, parts, strict=True))

    def to_make(self) -> View:
        """Return the steps that create policies, or update those that have changed."""
        steps = []
        for name in self.documents():
            found = self._find(name)
            if found is None:
                text, run = f"create policy {name}", self._create
            else:
                tags = tags_from(found.get("Tags", ()))
                if not self._site.is_ours(tags):
                    raise PoolError(
                        f"the policy {name} exists, but was not made for pool {self._site.mark}. "
                        "Nothing was changed. Choose another name for the pool."
                    )
                if self._document(found) == self.documents()[name]:
                    continue
                text, run = f"update policy {name}", self._update
            # The document is only complete when the step runs: it contains the security group.
            steps.append(Step(text=text, run=partial(run, name)))
        return View(steps=steps)

    def to_remove(self) -> View:
        """Return the steps that detach and delete the policies."""
        steps: list[Step] = []
        notes: list[str] = []
        names = {self._site.launcher_policy, *self.documents()}
        names |= {f"{self._site.launcher_policy}-{number}" for number in (2, 3)}
        for name in sorted(names):
            found = self._find(name)
            if found is None:
                continue
            tags = tags_from(found.get("Tags", ()))
            if not self._site.is_removable(tags, f"policy {name}", notes):
                continue
            held = self._holders(found["Arn"])
            of = f", which {', '.join(one for one, _ in held)} had" if held else ""
            steps.append(
                Step(
                    text=f"delete policy {name}{of}",
                    run=partial(self._delete, found["Arn"]),
                )
            )
        return View(steps=steps, notes=notes)

    def _arn(self, name: str) -> str:
        return f"arn:aws:iam::{self._site.account}:policy/{name}"

    def _find(self, name: str) -> dict[str, Any] | None:
        iam = self._site.clients.iam
        return _read(lambda: iam.get_policy(PolicyArn=self._arn(name))["Policy"])

    def _document(self, found: dict[str, Any]) -> Any:
        version = self._site.clients.iam.get_policy_version(
            PolicyArn=found["Arn"], VersionId=found["DefaultVersionId"]
        )
        return as_document(version["PolicyVersion"]["Document"])

    def _create(self, name: str) -> None:
        self._site.clients.iam.create_policy(
            PolicyName=name,
            PolicyDocument=_compact(self.documents()[name]),
            Description=f"For those who start clusters of the etrain-jupyter pool "
            f"{self._site.name}",
            Tags=tag_pairs(self._site.tags()),
        )

    def _update(self, name: str) -> None:
        iam, arn = self._site.clients.iam, self._arn(name)
        versions = iam.list_policy_versions(PolicyArn=arn)["Versions"]
        if len(versions) >= MAX_VERSIONS:
            others = [one for one in versions if not one["IsDefaultVersion"]]
            oldest = min(others, key=lambda one: one["CreateDate"])
            iam.delete_policy_version(PolicyArn=arn, VersionId=oldest["VersionId"])
        iam.create_policy_version(
            PolicyArn=arn, PolicyDocument=_compact(self.documents()[name]), SetAsDefault=True
        )

    def _holders(self, arn: str) -> list[tuple[str, Callable[[], object]]]:
        """Return who has the policy attached, each with the request that detaches it."""
        iam = self._site.clients.iam
        found = iam.list_entities_for_policy(PolicyArn=arn)
        return [
            *(
                (
                    f"user {one['UserName']}",
                    partial(iam.detach_user_policy, UserName=one["UserName"], PolicyArn=arn),
                )
                for one in found["PolicyUsers"]
            ),
            *(
                (
                    f"group {one['GroupName']}",
                    partial(iam.detach_group_policy, GroupName=one["GroupName"], PolicyArn=arn),
                )
                for one in found["PolicyGroups"]
            ),
            *(
                (
                    f"role {one['RoleName']}",
                    partial(iam.detach_role_policy, RoleName=one["RoleName"], PolicyArn=arn),
                )
                for one in found["PolicyRoles"]
            ),
        ]

    def _delete(self, arn: str) -> None:
        iam = self._site.clients.iam
        for _, detach in self._holders(arn):
            detach()
        for version in iam.list_policy_versions(PolicyArn=arn)["Versions"]:
            if not version["IsDefaultVersion"]:
                iam.delete_policy_version(PolicyArn=arn, VersionId=version["VersionId"])
        iam.delete_policy(PolicyArn=arn)


def split_policy(whole: Policy, *, most: int = MAX_POLICY) -> list[Policy]:
    """Split a policy into parts that are small enough for IAM, by statements."""
    parts: list[Policy] = []
    for statement in whole["Statement"]:
        if parts:
            grown = {**parts[-1], "Statement": [*parts[-1]["Statement"], statement]}
            if len(_compact(grown)) <= most:
                parts[-1] = grown
                continue
        parts.append({**whole, "Statement": [statement]})
    return parts


def _compact(document: Policy) -> str:
    return json.dumps(document, separators=(",", ":"))


def _read(read: Callable[[], Any]) -> dict[str, Any] | None:
    """Return what a request finds; None if it does not exist."""
    try:
        found: dict[str, Any] = read()
        return found
    except ClientError as exc:
        if is_missing(exc):
            return None
        if code_of(exc) in DENIED:
            raise PoolError(
                f"these credentials may not look at IAM roles and policies ({code_of(exc)}). "
                f"Nothing was changed. {WITHOUT_IAM}."
            ) from exc
        raise


WITHOUT_IAM = (
    "If your organization forbids this, write a CloudFormation template for an administrator with "
    "--template FILE, or name an instance profile that exists with --role PROFILE"
)
