"""Classify and explain EC2 errors: what happened, and what to do next."""

from __future__ import annotations

from typing import Literal

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    ProfileNotFound,
)

from etrain_jupyter.errors import PoolError
from etrain_jupyter.storage.objects.s3_messages import (
    code_of,
    endpoint_of,
    is_credentials_error,
    message_of,
)

Kind = Literal["capacity", "quota", "unsupported", "transient", "credentials", "fatal"]

#   kind          reaction of `fleet_state` and `fleet_launch`
#   capacity      back off from this pool (type, zone, lifecycle), exponentially
#   quota         back off from all pools of the request, for MAX_BACK_OFF_S
#   unsupported   back off from this pool for an hour
#   transient     retry with the same token
#   credentials   no retry: renew them first
#   fatal         count; launches stop after MAX_REFUSALS consecutive ones
_KINDS: dict[str, Kind] = {
    "InsufficientInstanceCapacity": "capacity",
    "InsufficientCapacity": "capacity",
    "InsufficientHostCapacity": "capacity",
    "InsufficientFreeAddressesInSubnet": "capacity",
    "UnfulfillableCapacity": "capacity",
    "SpotMaxPriceTooLow": "capacity",
    "MaxSpotInstanceCountExceeded": "quota",
    "VcpuLimitExceeded": "quota",
    "InstanceLimitExceeded": "quota",
    "Unsupported": "unsupported",
    "UnsupportedOperation": "unsupported",
    "InvalidFleetConfiguration": "unsupported",
    "RequestLimitExceeded": "transient",
    "Throttling": "transient",
    "ThrottlingException": "transient",
    "Unavailable": "transient",
    "ServiceUnavailable": "transient",
    "InternalError": "transient",
    "InternalFailure": "transient",
    "RequestTimeout": "transient",
    "IdempotentRequestInProgress": "transient",
    "AuthFailure": "credentials",
    "InvalidClientTokenId": "credentials",
    "RequestExpired": "credentials",
    "ExpiredToken": "credentials",
    "ExpiredTokenException": "credentials",
}

_SIGN_IN = (
    "Renew them where the cluster's head runs: aws sso login, the profile in ~/.aws, or the role "
    "of the machine"
)
_QUOTA = (
    "the account's quota of spot machines is used up. Request more at Service Quotas ('All G and "
    "VT Spot Instance Requests', L-3819A6DF), or use types of another family"
)
_POLICY = "`%etrain pools policy` prints the policy that the role or user needs"

_CODES: dict[str, str] = {
    "UnauthorizedOperation": f"AWS does not allow it. {_POLICY}",
    "AccessDenied": f"AWS does not allow it. {_POLICY}",
    "AccessDeniedException": f"AWS does not allow it. {_POLICY}",
    "AuthFailure": f"AWS does not accept these credentials. {_SIGN_IN}",
    "InvalidClientTokenId": f"AWS does not accept these credentials. {_SIGN_IN}",
    "SignatureDoesNotMatch": f"AWS does not accept these credentials. {_SIGN_IN}",
    "RequestExpired": f"the credentials have expired, or this machine's clock is wrong. {_SIGN_IN}",
    "ExpiredToken": f"the credentials have expired. {_SIGN_IN}",
    "ExpiredTokenException": f"the credentials have expired. {_SIGN_IN}",
    "MaxSpotInstanceCountExceeded": _QUOTA,
    "VcpuLimitExceeded": (
        "the account's quota of on-demand vCPUs is used up. Request more at Service Quotas "
        "('Running On-Demand G and VT instances'), or lower capacity.on_demand.max"
    ),
    "InstanceLimitExceeded": "the account's quota of machines is used up. Request more at Service "
    "Quotas",
    "InsufficientInstanceCapacity": "EC2 has no capacity for it there. Add types or zones to "
    "capacity",
    "Unsupported": "this zone does not have this type. Remove it from capacity.types, or set zones",
    "OptInRequired": "the account may not use this region or service. Enable it in the console",
    "PendingVerification": "AWS is still verifying the account. Wait for the e-mail from AWS",
    "Blocked": "AWS has blocked the account. Contact AWS Support",
    "RequestLimitExceeded": "EC2 limits the request rate. The next request retries",
}
_BEGINNINGS = (
    ("InvalidAMIID", "there is no such image in this region. Correct image.ami in pools.yaml"),
    (
        "InvalidIamInstanceProfile",
        "there is no such instance profile. Create it with the policy that `%etrain pools policy` "
        "prints, or correct iam.instance_profile",
    ),
    ("InvalidSubnet", "there is no such subnet in this region. Correct network.subnets"),
    ("InvalidGroup", "there is no such security group. Correct network.security_group"),
    ("InvalidSecurityGroupID", "there is no such security group. Correct network.security_group"),
    (
        "InvalidLaunchTemplate",
        "the cluster's launch template was deleted. Run `%etrain down`, then run the cell again",
    ),
    ("InvalidInstanceType", "there is no such type. Correct capacity.types"),
    ("ParameterNotFound", "there is no such parameter. Correct image.ami in pools.yaml"),
)


def kind_of(exc: BaseException) -> Kind:
    """Classify an error: wait for capacity, retry, renew credentials, or stop."""
    # Check this first, because some of boto3's credential errors are not ClientErrors and have no
    # code.
    if is_credentials_error(exc):
        return "credentials"
    if isinstance(exc, ClientError):
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return kind_of_code(code_of(exc), is_server_error=status >= 500)
    # After a connection error, it is unknown whether EC2 received the request.
    return "transient"


def kind_of_code(code: str, *, is_server_error: bool = False) -> Kind:
    """Classify an error code, such as one in CreateFleet's list of errors.

    >>> kind_of_code("InsufficientInstanceCapacity")
    'capacity'
    """
    return _KINDS.get(code, "transient" if is_server_error else "fatal")


def message_of_code(code: str, message: str = "") -> str:
    """Return the meaning of a code, and what to do about it."""
    # EC2 appends details to these codes, such as InvalidAMIID.NotFound and .Malformed.
    for beginning, meaning in _BEGINNINGS:
        if code.startswith(beginning):
            return f"{meaning} ({code})"
    # EC2 reports an unknown profile as InvalidParameterValue, with the parameter's name in the
    # text.
    if "iamInstanceProfile" in message:
        return f"{_BEGINNINGS[1][1]} ({code})"
    if code in _CODES:
        return f"{_CODES[code]} ({code})"
    error = {"Error": {"Code": code, "Message": message}}
    return message_of(ClientError(error, "EC2"), setting="pools.yaml")


def message_of_error(exc: BaseException) -> str:
    """Return the meaning of a boto3 exception; the text contains no credentials."""
    if isinstance(exc, ClientError):
        message = str(exc.response.get("Error", {}).get("Message", ""))
        return message_of_code(code_of(exc), message)
    if isinstance(exc, ProfileNotFound):
        return (
            f"there is no profile {exc.kwargs.get('profile', '')!r} in ~/.aws on this machine. Add "
            "it, or correct profile in pools.yaml or AWS_PROFILE (ProfileNotFound)"
        )
    if isinstance(exc, EndpointConnectionError):
        return (
            f"{endpoint_of(exc.kwargs.get('endpoint_url', ''))} cannot be reached. Check the "
            "network, region and endpoint_url in pools.yaml, and AWS_ENDPOINT_URL "
            "(EndpointConnectionError)"
        )
    return message_of(exc, setting="bucket")


def pool_error(what: str, exc: BaseException, done: str) -> PoolError:
    """Return an error that states ``what`` failed, why, what was ``done``, and what to do next."""
    # All messages above have the form "cause. advice (code)": put `done` before the advice.
    cause, _, advice = message_of_error(exc).partition(". ")
    code = f" ({code_of(exc)})" if code_of(exc) and code_of(exc) not in cause else ""
    advice = advice.removesuffix(f" ({code_of(exc)})")
    return PoolError(f"{what}: {cause}{code}. {done} {advice or 'Retry'}.")


AwsErrors = (ClientError, BotoCoreError)
"""Base classes of all boto3 errors."""
