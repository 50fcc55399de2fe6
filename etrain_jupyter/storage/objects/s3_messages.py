"""Explain errors of S3 and boto3: what happened, and what to do next.

The services' own messages are shown only for codes that are not listed here, and without anything
that looks like a credential, because some repeat the access key or the whole signed request.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

_SIGN_IN = (
    "Renew them where the worker reads them: aws sso login, the profile in ~/.aws, or the role of "
    "the machine"
)
_POLICY = "docs/how-to/store-checkpoints-in-s3.md lists the permissions that a role needs"
_BUCKET = "Create it, or correct checkpoint.to"

_EXPIRED = f"the credentials have expired. {_SIGN_IN}"
_REJECTED = f"the credentials are not valid. {_SIGN_IN}"
_DENIED = f"access denied. {_POLICY}"
_SLOW = "S3 limits the request rate. The next checkpoint retries"
_INTERNAL = "S3 has an internal error. The next checkpoint retries"
_REGION = "the bucket is in another region. Set AWS_REGION or the profile's region"
_CORRUPT = "the bytes were corrupted in transit. Check the worker's network and memory"

# Bare statuses such as "403" are the codes of failed HEAD requests, whose responses have no body.
_CODES: dict[str, str] = {
    "NoSuchBucket": f"there is no such bucket. {_BUCKET}",
    "InvalidBucketName": f"the bucket's name is invalid. {_BUCKET}",
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AccountProblem": _DENIED,
    "403": _DENIED,
    "InvalidAccessKeyId": _REJECTED,
    "SignatureDoesNotMatch": _REJECTED,
    "InvalidClientTokenId": _REJECTED,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "400": f"the request was refused, possibly because the credentials have expired. {_SIGN_IN}",
    "RequestTimeTooSkewed": "the clock of this machine is wrong. Set it, for example with chrony",
    "SlowDown": _SLOW,
    "Throttling": _SLOW,
    "ThrottlingException": _SLOW,
    "RequestLimitExceeded": _SLOW,
    "503": _SLOW,
    "ServiceUnavailable": _SLOW,
    "InternalError": _INTERNAL,
    "500": _INTERNAL,
    "RequestTimeout": "the connection is too slow for the upload. Check the worker's network",
    "BadDigest": _CORRUPT,
    "XAmzContentSHA256Mismatch": _CORRUPT,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "the bucket is full. Delete unneeded objects, or raise its quota",
    "NotImplemented": "the endpoint has no conditional writes (If-None-Match). Use another one",
}

CREDENTIAL_CODES = frozenset(
    code for code, text in _CODES.items() if text in (_EXPIRED, _REJECTED) or code == "400"
)
"""Errors after which a new session may succeed: the files or the role may have new credentials."""

_CREDENTIALS: dict[str, str] = {
    "NoCredentialsError": f"there are no AWS credentials on this worker. {_SIGN_IN}",
    "PartialCredentialsError": f"the AWS credentials on this worker are incomplete. {_SIGN_IN}",
    "CredentialRetrievalError": f"the credentials cannot be read. {_SIGN_IN}",
    "SSOError": _EXPIRED,
    "TokenRetrievalError": _EXPIRED,
}
# By the name of boto3's class, which also applies to its subclasses.
_BOTO: dict[str, str] = _CREDENTIALS | {
    "ProfileNotFound": "the profile of AWS_PROFILE is not in ~/.aws on this worker. Add it, or "
    "unset AWS_PROFILE",
    "MetadataRetrievalError": f"the machine's role cannot be read. {_SIGN_IN}",
    "ConnectTimeoutError": "connecting timed out. Check the network",
    "ReadTimeoutError": "the response timed out. Check the network",
    "EndpointConnectionError": "the endpoint cannot be reached. Check AWS_ENDPOINT_URL, AWS_REGION "
    "and the network",
    "ConnectionClosedError": "the connection was closed. Check the network",
    "ProxyConnectionError": "the proxy cannot be reached. Check HTTPS_PROXY",
    "SSLError": "the endpoint's certificate is not trusted. Check AWS_CA_BUNDLE",
    "ResponseStreamingError": "the response was cut off. Check the network",
    "IncompleteReadError": "the response was cut off. Check the network",
    "NoRegionError": _REGION,
    "HTTPClientError": "the connection was closed. Check the network",
}

# In order: access key ids, "name=value" pairs of a signed request, and anything as long as a
# secret key (40 characters of base64), because services repeat them in unexpected places.
_SECRETS = re.compile(
    r"(?:AKIA|ASIA)[A-Z0-9]{8,}|(?i:signature|token|secret|credential)[^\s=:]*\s*[=:]\s*\S+"
    r"|[A-Za-z0-9/+=]{40,}"
)


def code_of(exc: BaseException) -> str:
    """Return the service's error code, or an empty string."""
    if not isinstance(exc, ClientError):
        return ""
    return str(exc.response.get("Error", {}).get("Code", ""))


def is_credentials_error(exc: BaseException) -> bool:
    """Return whether new credentials may resolve the error."""
    return code_of(exc) in CREDENTIAL_CODES or _known_class(exc) in _CREDENTIALS


def _known_class(exc: BaseException) -> str:
    """Return the most specific boto3 class of an error that has a text, or an empty string."""
    # Other libraries have classes of the same names.
    kinds = type(exc).__mro__ if isinstance(exc, BotoCoreError) else ()
    return next((kind.__name__ for kind in kinds if kind.__name__ in _BOTO), "")


def message_of(exc: BaseException, *, setting: str = "checkpoint.to") -> str:
    """Return what went wrong and what to do about it, without credentials.

    Args:
        exc: The error.
        setting: The setting that names the location. Unless it is ``checkpoint.to``, the message
            does not mention checkpoints or workers.
    """
    message = _message_of(exc)
    if setting == "checkpoint.to":
        return message
    # The texts are written for checkpoints. For other requests, no checkpoint follows, and the
    # machine may not be a worker: for example, a notebook may follow a job in a bucket.
    message = message.replace("checkpoint.to", setting)
    message = message.replace("The next checkpoint retries", "The next request retries")
    for worker in ("of this worker", "on this worker", "the worker reads", "the worker's"):
        message = message.replace(worker, worker.replace("worker", "machine"))
    return message


def _message_of(exc: BaseException) -> str:
    code = code_of(exc)
    if code:
        known = _CODES.get(code)
        return f"{known} ({code})" if known else f"{code}: {_service_message(exc)}"
    if kind := _known_class(exc):
        return f"{_BOTO[kind]} ({type(exc).__name__})"
    if isinstance(exc, OSError):
        return exc.strerror or type(exc).__name__
    # Other errors come from urllib3. Their messages contain the URL, so show only their class.
    is_boto_error = isinstance(exc, BotoCoreError)
    message = _service_message(exc) if is_boto_error else "the connection was closed"
    return f"{message} ({type(exc).__name__})"


def endpoint_of(url: str) -> str:
    """Return an endpoint's address without user name and password.

    >>> endpoint_of("https://me:secret@minio.example:9000/x?y")
    'https://minio.example:9000'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _service_message(exc: BaseException) -> str:
    text = str(exc)
    if isinstance(exc, ClientError):
        text = str(exc.response.get("Error", {}).get("Message", ""))
    return _SECRETS.sub("…", text)[:200].rstrip(".")
