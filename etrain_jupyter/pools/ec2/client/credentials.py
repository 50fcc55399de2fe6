"""Whether this machine has credentials for a pool, and from where; AWS is not asked."""

from __future__ import annotations

import boto3
from botocore.exceptions import BotoCoreError

from etrain_jupyter.errors import PoolError
from etrain_jupyter.pools.ec2.aws_messages import message_of_error
from etrain_jupyter.pools.ec2.spec import AwsSpotSpec

METHODS = {
    "env": "the environment",
    "shared-credentials-file": "~/.aws/credentials",
    "config-file": "~/.aws/config",
    "iam-role": "the role of this machine",
    "container-role": "the role of this container",
    "assume-role": "a role that a profile takes",
    "sso": "a profile that signs in",
    "login": "a profile that signs in",
    "custom-process": "a program that a profile names",
}


def find_credentials(spec: AwsSpotSpec) -> str:
    """Return where boto3 finds credentials, in words; empty if it finds none.

    They may be wrong or expired: only AWS knows. Outside of EC2 this may take a second or two, in
    which boto3 looks for the role of the machine.

    Raises:
        PoolError: If what there is cannot be read, such as a profile that does not exist.
    """
    try:
        session = boto3.session.Session(profile_name=spec.profile, region_name=spec.region)
        found = session.get_credentials()
    except BotoCoreError as exc:
        raise PoolError(message_of_error(exc)) from exc
    return METHODS.get(found.method, found.method) if found is not None else ""
