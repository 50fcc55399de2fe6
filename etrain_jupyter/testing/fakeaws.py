"""The simulated AWS, for notebooks: see ``etrain_jupyter.plugins.ec2.simulator``."""

from __future__ import annotations

from etrain_jupyter.plugins.ec2.simulator import Account, ApiFault, FakeAws

__all__ = ["Account", "ApiFault", "FakeAws"]
