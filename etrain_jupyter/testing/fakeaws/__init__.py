"""A cloud on this machine: EC2, S3, IAM and what a spot cluster needs of AWS, without an account.

Instances are real processes that run their real user-data; their metadata service, their console
and their bill are real too, only their hardware is this machine's. For tests, and for notebooks
that show a spot cluster without an account. Needs the extra ``etrain-jupyter[fakeaws]``.

Read in this order: ``cloud`` (what a test holds), ``process`` and ``control`` (the other side),
``api`` and ``ec2`` (what AWS answers) over ``wire``, ``market`` and ``bill`` (pure), ``hypervisor``
and ``machine`` (instances) over ``networks``, ``power``, ``imds`` and ``guest``; ``backend`` and
``account`` are all that knows moto's insides.
"""

from __future__ import annotations

from etrain_jupyter.testing.fakeaws.cloud import Account, FakeAws
from etrain_jupyter.testing.fakeaws.faults import ApiFault

__all__ = ["Account", "ApiFault", "FakeAws"]
