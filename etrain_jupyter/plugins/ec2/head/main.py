"""Create the source of an ``aws-spot`` cluster's nodes, for its head."""

from __future__ import annotations

from etrain_jupyter.head.node_source import HeadFacts
from etrain_jupyter.plugins.ec2.head.nodes import AwsNodes
from etrain_jupyter.plugins.ec2.spec import AwsSpotSpec
from etrain_jupyter.wire.versions import read_fingerprint


def make_nodes(facts: HeadFacts) -> AwsNodes:
    """Return the source of a cluster's nodes; no request is sent yet."""
    nodes = AwsNodes(
        facts.cluster,
        AwsSpotSpec.model_validate(facts.settings.spec),
        is_connected=facts.is_connected,
        on_gone=facts.on_gone,
        on_warning=facts.on_warning,
        on_halt=facts.on_halt,
        on_note=facts.on_note,
        fingerprint=read_fingerprint(),
    )
    # These are optional, so they are attributes of `AwsNodes`, not parameters.
    nodes.on_notice = facts.on_notice
    nodes.is_busy = facts.is_busy
    nodes.progress = facts.progress
    return nodes
