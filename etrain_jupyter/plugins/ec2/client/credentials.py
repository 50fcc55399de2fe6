"""Find out whether this machine has credentials for a pool, without a request to AWS."""

from __future__ import annotations

import boto3
from botocore.exceptions import BotoCoreError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.plugins.ec2.aws_messages import message_of_error
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec

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


def find_credentials(spec: AwsSpotSpec) -> str:
    """Return the source of boto3's credentials as text; empty if there are none.

    They may be invalid or expired; only a request to AWS can determine that. Outside of EC2, this
    may take two seconds, while boto3 looks for the machine's role.

    Raises:
        PoolError: If the configuration is invalid, such as a profile that does not exist.
    """
    try:
        session = boto3.session.Session(profile_name=spec.profile, region_name=spec.region)
        found = session.get_credentials()
    except BotoCoreError as exc:
        raise PoolError(message_of_error(exc)) from exc
    # A newer boto3 may have methods that METHODS lacks: return boto3's own name for those.
    return METHODS.get(found.method, found.method) if found is not None else ""
