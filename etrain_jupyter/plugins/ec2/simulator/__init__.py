"""A simulated AWS on this machine: EC2, S3, IAM and whatever else a spot cluster needs.

Instances are real processes that run their real user-data, with a metadata service, a console and a
bill. They only share this machine's hardware. Tests use the simulation, and so do notebooks that
demonstrate a spot cluster without an account. It requires ``etrain-jupyter[fakeaws]``.

Read in this order: ``cloud`` (the client), ``process`` and ``control`` (the server), ``api`` and
``ec2`` (AWS's actions) over ``wire``, ``market`` and ``bill`` (pure), ``hypervisor`` and
``machine`` (instances) over ``networks``, ``imds`` and ``guest``. Only ``backend``,
``permissions`` and ``account`` use moto's internals.
"""

from __future__ import annotations

from etrain_jupyter.plugins.ec2.simulator.cloud import Account, FakeAws
from etrain_jupyter.plugins.ec2.simulator.faults import ApiFault

__all__ = ["Account", "ApiFault", "FakeAws"]
