"""Parts that moto's CloudFormation lacks: events, failures, and changes of IAM resources.

moto raises the error of a resource to the caller. CloudFormation instead records it as an event,
and removes what it has created (``OnFailure=DELETE``). Call ``teach_moto`` before the first
request; it imports moto's CloudFormation, which takes seconds.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from moto.cloudformation.models import CloudFormationBackend, Event, Stack, cloudformation_backends
from moto.iam.models import ManagedPolicy, Role, iam_backends

_create, _update, _delete = Stack.create_resources, Stack.update, Stack.delete
_delete_stack = CloudFormationBackend.delete_stack
_create_role = Role.create_from_cloudformation_json.__func__  # type: ignore[attr-defined]


@cache
def teach_moto() -> None:
    """Replace methods of moto, once for each process."""
    replacements: tuple[tuple[Any, str, Any], ...] = (
        (Stack, "create_resources", _create_resources),
        (Stack, "update", _update_resources),
        (Stack, "delete", _delete_resources),
        (CloudFormationBackend, "delete_stack", _keep_failed),
        (Role, "create_from_cloudformation_json", classmethod(_create_role_with_policies)),
        (Role, "update_from_cloudformation_json", classmethod(_update_role)),
        (ManagedPolicy, "update_from_cloudformation_json", classmethod(_update_policy)),
        (ManagedPolicy, "delete_from_cloudformation_json", classmethod(_delete_policy)),
    )
    for owner, name, method in replacements:
        setattr(owner, name, method)


def _create_resources(self: Any) -> None:
    resources = self.template_dict["Resources"]
    try:
        _create(self)
    except Exception as exc:
        made = self.resource_map._parsed_resources
        failed = next(id for id in resources if id not in made)
        _record(self, failed, "CREATE_FAILED", getattr(exc, "message", str(exc)))
        for one in resources.values():
            one.pop("DeletionPolicy", None)
        self.delete()
        backend = cloudformation_backends[self.account_id][self.region_name]
        backend.deleted_stacks[self.stack_id] = backend.stacks.pop(self.stack_id)
        return
    for id in resources:
        _record(self, id, "CREATE_COMPLETE")


def _update_resources(self: Any, template: str, *args: Any, **words: Any) -> None:
    before = self.template_dict["Resources"]
    _update(self, template, *args, **words)
    for id, one in self.template_dict["Resources"].items():
        if one != before.get(id):
            _record(self, id, "UPDATE_COMPLETE" if id in before else "CREATE_COMPLETE")


def _delete_resources(self: Any) -> None:
    # moto would evaluate the outputs of a deleted stack, and create its resources again.
    self.output_map._output_json_map = {}
    resources = self.resource_map._resource_json_map
    for one in resources.values():
        if one.get("DeletionPolicy") == "RetainExceptOnCreate":
            one["DeletionPolicy"] = "Retain"
    deleted = [id for id, one in resources.items() if one.get("DeletionPolicy") != "Retain"]
    try:
        _delete(self)
    except Exception as exc:
        for id in deleted:
            if id in self.resource_map._parsed_resources:
                _record(self, id, "DELETE_FAILED", getattr(exc, "message", str(exc)))
        self.status = "DELETE_FAILED"
        return
    for id in deleted:
        _record(self, id, "DELETE_COMPLETE")


def _keep_failed(self: Any, name_or_stack_id: str) -> None:
    _delete_stack(self, name_or_stack_id)
    stack = self.deleted_stacks.get(name_or_stack_id)
    if stack is not None and stack.status == "DELETE_FAILED":
        self.stacks[stack.stack_id] = self.deleted_stacks.pop(name_or_stack_id)


def _create_role_with_policies(cls: Any, *args: Any, **words: Any) -> Any:
    role = _create_role(cls, *args, **words)
    # moto keeps the documents of a template as mappings, and those of other requests as text.
    role.policies = {name: json.dumps(document) for name, document in role.policies.items()}
    return role


def _record(stack: Any, id: str, status: str, reason: str | None = None) -> None:
    made = stack.resource_map._parsed_resources.get(id)
    event = Event(
        stack_id=stack.stack_id,
        stack_name=stack.name,
        logical_resource_id=id,
        physical_resource_id=getattr(made, "physical_resource_id", None) or id,
        resource_type=stack.resource_map._resource_json_map[id]["Type"],
        resource_status=status,
        resource_status_reason=reason,
        resource_properties=None,
    )
    stack.events.append(event)


def _update_role(cls: Any, /, original_resource: Any, cloudformation_json: Any, **_: Any) -> Any:
    for policy in cloudformation_json["Properties"]["Policies"]:
        original_resource.put_policy(policy["PolicyName"], json.dumps(policy["PolicyDocument"]))
    return original_resource


def _update_policy(
    cls: Any, /, original_resource: Any, cloudformation_json: Any, account_id: str, **_: Any
) -> Any:
    iam, arn = iam_backends[account_id]["aws"], original_resource.arn
    if len(original_resource.versions) >= 5:
        oldest = next(one for one in original_resource.versions if not one.is_default)
        iam.delete_policy_version(arn, oldest.version_id)
    document = json.dumps(cloudformation_json["Properties"]["PolicyDocument"])
    iam.create_policy_version(arn, document, True)
    return original_resource


def _delete_policy(
    cls: Any, /, resource_name: str, resource_json: Any, account_id: str, region_name: str
) -> None:
    policy = iam_backends[account_id]["aws"].get_policy(resource_name)
    if policy.attachment_count:
        raise RuntimeError("Cannot delete a policy attached to entities.")
    iam_backends[account_id]["aws"].delete_policy(resource_name)
