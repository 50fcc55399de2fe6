"""What an error of S3 or of boto3 means, in words: what happened, and what to type next.

The services' own messages are not shown but for codes that are unknown here, and then without
anything that looks like a credential: some of them repeat the key or the whole signed request.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

_SIGN_IN = (
    "Renew them where the worker finds them: aws sso login, the profile in ~/.aws, or the role of "
    "the machine"
)
_POLICY = "docs/how-to/store-checkpoints-in-s3.md lists what a role needs"
_BUCKET = "Make it, or correct checkpoint.to"

_EXPIRED = f"the credentials have expired. {_SIGN_IN}"
_REJECTED = f"the credentials are not valid. {_SIGN_IN}"
_DENIED = f"access denied. {_POLICY}"
_SLOW = "S3 asks to slow down. It is tried again with the next checkpoint"
_REGION = "the bucket is in another region. Set AWS_REGION or the profile's region"

_CODES: dict[str, str] = {
    "NoSuchBucket": f"there is no such bucket. {_BUCKET}",
    "InvalidBucketName": f"no bucket can have this name. {_BUCKET}",
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
    "400": f"the request was refused, as with credentials that have expired. {_SIGN_IN}",
    "RequestTimeTooSkewed": "the clock of this machine is wrong. Set it, for example with chrony",
    "SlowDown": _SLOW,
    "Throttling": _SLOW,
    "ThrottlingException": _SLOW,
    "RequestLimitExceeded": _SLOW,
    "503": _SLOW,
    "ServiceUnavailable": _SLOW,
    "InternalError": "S3 has an internal error. It is tried again with the next checkpoint",
    "500": "S3 has an internal error. It is tried again with the next checkpoint",
    "RequestTimeout": "the connection is too slow for the upload. Look at the worker's network",
    "BadDigest": "the bytes were altered on their way. Look at the worker's network and memory",
    "XAmzContentSHA256Mismatch": "the bytes were altered on their way. Look at the network",
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "QuotaExceeded": "the bucket is full. Remove what is not needed, or raise its quota",
    "NotImplemented": "the endpoint has no conditional writes (If-None-Match). Use another one",
}

CREDENTIAL_CODES = frozenset(
    code for code, words in _CODES.items() if words in (_EXPIRED, _REJECTED) or code == "400"
)
"""After these a new session is made: the files or the role may have other credentials by then."""

_BOTO: tuple[tuple[type[Exception], str], ...] = (
    (
        boto.ProfileNotFound,
        "the profile of AWS_PROFILE is not in ~/.aws on this worker. Add it, or unset AWS_PROFILE",
    ),
    (boto.NoCredentialsError, f"there are no AWS credentials on this worker. {_SIGN_IN}"),
    (boto.PartialCredentialsError, f"the AWS credentials of this worker lack a part. {_SIGN_IN}"),
    (boto.CredentialRetrievalError, f"the credentials cannot be had. {_SIGN_IN}"),
    (boto.SSOError, _EXPIRED),
    (boto.TokenRetrievalError, _EXPIRED),
    (boto.MetadataRetrievalError, f"the machine's role cannot be asked for. {_SIGN_IN}"),
    (boto.ConnectTimeoutError, "no connection within the time limit. Look at the network"),
    (boto.ReadTimeoutError, "no answer within the time limit. Look at the network"),
    (
        boto.EndpointConnectionError,
        "the endpoint cannot be reached. Look at AWS_ENDPOINT_URL, AWS_REGION and the network",
    ),
    (boto.ConnectionClosedError, "the connection broke. Look at the network"),
    (boto.ProxyConnectionError, "the proxy cannot be reached. Look at HTTPS_PROXY"),
    (boto.SSLError, "the endpoint's certificate is not accepted. Look at AWS_CA_BUNDLE"),
    (boto.ResponseStreamingError, "the answer was cut short. Look at the network"),
    (boto.IncompleteReadError, "the answer was cut short. Look at the network"),
    (boto.NoRegionError, _REGION),
    (boto.HTTPClientError, "the connection broke. Look at the network"),
)

_SECRETS = re.compile(
    r"(?:AKIA|ASIA)[A-Z0-9]{8,}|(?i:signature|token|secret|credential)[^\s=:]*\s*[=:]\s*\S+"
    r"|[A-Za-z0-9/+=]{40,}"
)


def code_of(exc: BaseException) -> str:
    """Return the service's code of an error, or an empty string."""
    if not isinstance(exc, ClientError):
        return ""
    return str(exc.response.get("Error", {}).get("Code", ""))


def is_of_credentials(exc: BaseException) -> bool:
    """Tell whether other credentials would help."""
    kinds = (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.SSOError,
        boto.TokenRetrievalError,
    )
    return code_of(exc) in CREDENTIAL_CODES or isinstance(exc, kinds)


def words_of(exc: BaseException, *, setting: str = "checkpoint.to") -> str:
    """Return what went wrong and what to do about it, without credentials.

    Args:
        exc: The error.
        setting: What named the place; messages about another one than ``checkpoint.to`` are not
            about checkpoints and not about workers only.
    """
    words = _words_of(exc)
    if setting == "checkpoint.to":
        return words
    words = words.replace("checkpoint.to", setting).replace("with the next checkpoint", "soon")
    for worker in ("of this worker", "on this worker", "the worker finds", "the worker's"):
        words = words.replace(worker, worker.replace("worker", "machine"))
    return words


def _words_of(exc: BaseException) -> str:
    code = code_of(exc)
    if code:
        known = _CODES.get(code)
        return f"{known} ({code})" if known else f"{code}: {_shown(exc)}"
    for kind, words in _BOTO:
        if isinstance(exc, kind):
            return f"{words} ({type(exc).__name__})"
    if isinstance(exc, OSError):
        return exc.strerror or type(exc).__name__
    what = _shown(exc) if isinstance(exc, BotoCoreError) else "the connection broke"
    return f"{what} ({type(exc).__name__})"


def place_of(url: str) -> str:
    """Return an endpoint's address without a user's name and password.

    >>> place_of("https://me:secret@minio.example:9000/x?y")
    'https://minio.example:9000'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _shown(exc: BaseException) -> str:
    text = str(exc)
    if isinstance(exc, ClientError):
        text = str(exc.response.get("Error", {}).get("Message", ""))
    return _SECRETS.sub("…", text)[:200].rstrip(".")
