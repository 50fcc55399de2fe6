"""Enforce IAM in the fake cloud: signatures, and policies with their conditions."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from moto import settings
from moto.core.authorization import ActionAuthenticatorMixin
from moto.core.exceptions import ServiceException
from moto.core.request import EnvironHeaders
from moto.iam.access_control import (
    CreateAccessKeyFailure,
    IAMRequest,
    IAMRequestBase,
    create_access_key,
)
from werkzeug.exceptions import HTTPException

from etrain_jupyter.plugins.ec2.simulator.iam import Request, is_allowed
from etrain_jupyter.plugins.ec2.simulator.permissions import World, requests_of
from etrain_jupyter.plugins.ec2.simulator.records import ACCOUNT
from etrain_jupyter.plugins.ec2.simulator.wire import ApiError, Call
from etrain_jupyter.testing.s3_faults import AROUND


class Enforcement:
    """Checks of signatures and policies, off by default.

    Args:
        lock: Guards moto's state.
        world_of: Returns a region's resources, for evaluating conditions.
    """

    def __init__(self, lock: threading.RLock, world_of: Callable[[str], World]) -> None:
        self._lock = lock
        self._world_of = world_of
        self.requests: dict[str, tuple[Request, bool]] = {}
        """Requests to IAM since enforcement started, and whether they were allowed."""
        _replace_motos_checks()

    def is_enforcing(self) -> bool:
        """Return whether signatures and policies are checked."""
        # moto's own switch: it checks requests after the first INITIAL_NO_AUTH_ACTION_COUNT.
        return bool(ActionAuthenticatorMixin.request_count >= settings.INITIAL_NO_AUTH_ACTION_COUNT)

    def enforce(self, is_on: bool) -> None:
        """Start or stop checking signatures and policies."""
        self.requests.clear()
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0.0 if is_on else float("inf")
        ActionAuthenticatorMixin.request_count = 0

    def check_signed(self, call: Call) -> None:
        """Refuse a call with an invalid signature, if moto does not check it.

        Raises:
            ApiError: If it is refused.
        """
        if not self.is_enforcing():
            return
        request = IAMRequest(
            account_id=ACCOUNT,
            method=call.environ["REQUEST_METHOD"],
            path=call.environ["PATH_INFO"],
            data=dict(parse_qsl(call.body.decode("latin-1"))),
            body=call.body,
            headers=dict(EnvironHeaders(call.environ)),
            action=call.action,
        )
        try:
            request.check_signature()
        except (ServiceException, HTTPException):
            raise ApiError("AuthFailure", "AWS was not able to validate the credentials.") from None

    def check_permitted(self, call: Call) -> None:
        """Refuse a call that the caller's policies do not allow, conditions included.

        Raises:
            ApiError: If it is refused.
        """
        if not self.is_enforcing() or "HTTP_X_ETRAIN_AROUND" in call.environ:
            return
        with self._lock:
            policies = self._policies_of(call)
            if policies is None:
                return  # an unknown caller: the signature check refuses it
            for request in requests_of(call, self._world_of(call.region)):
                is_permitted = is_allowed(policies, request)
                # The text is the key, so that repeated requests, such as polls, count once.
                self.requests[str(request)] = (request, is_permitted)
                if not is_permitted:
                    code = "UnauthorizedOperation" if call.service == "ec2" else "AccessDenied"
                    raise ApiError(code, f"not authorized to perform {request}", 403)

    def _policies_of(self, call: Call) -> list[dict[str, Any]] | None:
        headers = dict(EnvironHeaders(call.environ))
        try:
            key = create_access_key(ACCOUNT, "aws", call.access_key, headers)
        except CreateAccessKeyFailure:
            return None
        return [_document_of(policy) for policy in key.collect_policies()]


def _document_of(policy: Any) -> dict[str, Any]:
    """Return a policy, which moto keeps as text, as a mapping, or as a managed policy."""
    if hasattr(policy, "versions"):
        [policy] = [one.document for one in policy.versions if one.is_default]
    parsed: dict[str, Any] = json.loads(
        policy if isinstance(policy, str) else policy["policy_document"]
    )
    return parsed


def _replace_motos_checks() -> None:
    # The test's own S3 requests are not signed, and must work with any policy.
    check = ActionAuthenticatorMixin._authenticate_and_authorize_action

    def check_others(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.headers.get(AROUND):
            check(self, *args, **kwargs)

    setattr(ActionAuthenticatorMixin, check.__name__, check_others)
    # Moto ignores conditions and most resources; ``check_permitted`` has already checked them.
    IAMRequestBase.check_action_permitted = _permit  # type: ignore[method-assign]


def _permit(self: IAMRequestBase, resource: str) -> None:
    """Accept any request: its signature and policies have been checked elsewhere."""
