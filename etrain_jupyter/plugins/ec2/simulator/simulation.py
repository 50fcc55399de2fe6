"""IAM's ``SimulatePrincipalPolicy``: evaluate a user's or role's policies without a request."""

from __future__ import annotations

import json
from typing import Any

from moto.core.exceptions import ServiceException
from moto.iam.models import iam_backends

from etrain_jupyter.plugins.ec2.simulator.iam import Request, is_allowed
from etrain_jupyter.plugins.ec2.simulator.records import ACCOUNT
from etrain_jupyter.plugins.ec2.simulator.wire import ApiError, Call, Response, nested, response

IAM_NAMESPACE = "https://iam.amazonaws.com/doc/2010-05-08/"


def simulate(call: Call) -> Response:
    """Process a call; the caller holds the backend's lock.

    Raises:
        ApiError: If the user or role does not exist.
    """
    query = nested(call.body)
    policies = _policies_of(str(query.get("PolicySourceArn", "")))
    context = {
        one["ContextKeyName"]: _members(one.get("ContextKeyValues"))
        for one in _members(query.get("ContextEntries"))
    }
    results = "".join(
        f"<member><EvalActionName>{action}</EvalActionName>"
        f"<EvalResourceName>{resource}</EvalResourceName><EvalDecision>{decision}</EvalDecision>"
        "<MatchedStatements/><MissingContextValues/></member>"
        for action in _members(query.get("ActionNames"))
        for resource in _members(query.get("ResourceArns")) or ["*"]
        for decision in [_decide(policies, Request(action, resource, context))]
    )
    text = (
        f'<SimulatePrincipalPolicyResponse xmlns="{IAM_NAMESPACE}"><SimulatePrincipalPolicyResult>'
        f"<IsTruncated>false</IsTruncated><EvaluationResults>{results}</EvaluationResults>"
        "</SimulatePrincipalPolicyResult><ResponseMetadata><RequestId>simulated</RequestId>"
        "</ResponseMetadata></SimulatePrincipalPolicyResponse>"
    )
    return response(200, text.encode(), "text/xml")


def _decide(policies: list[dict[str, Any]], request: Request) -> str:
    return "allowed" if is_allowed(policies, request) else "implicitDeny"


def _members(value: Any) -> list[Any]:
    """Return a list parameter of IAM, such as ``ActionNames.member.1``."""
    found = (value or {}).get("member", [])
    return found if isinstance(found, list) else [found]


def _policies_of(arn: str) -> list[dict[str, Any]]:
    iam = iam_backends[ACCOUNT]["aws"]
    kind, _, name = arn.rpartition(":")[2].partition("/")
    try:
        found = iam.get_role(name) if kind == "role" else iam.get_user(name)
    except ServiceException:
        raise ApiError("NoSuchEntity", f"{arn} does not exist.", 404) from None
    managed = [
        version.document
        for one in found.managed_policies.values()
        for version in one.versions
        if version.is_default
    ]
    return [json.loads(one) for one in (*found.policies.values(), *managed)]
