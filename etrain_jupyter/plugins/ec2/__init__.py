"""Pool of EC2 spot machines: launch, monitor, bill and remove them with boto3.

``spec`` is the configuration. ``head.fleet`` and ``ledger`` are pure rules. ``prices``,
``ec2_api``, ``network`` and ``bootstrap`` send requests to AWS. ``head.reconciler`` and
``head.nodes`` apply the rules in the scheduler process, and ``machine.agent`` runs on each
instance. ``reaping`` removes leftovers from any machine. This package is imported only when a pool
of this kind is used.
"""

from __future__ import annotations

from etrain_jupyter.plugin import Command, Plugin, PoolKind

_HERE = "etrain_jupyter.plugins.ec2"

PLUGIN = Plugin(
    pools={
        "aws-spot": PoolKind(
            make=f"{_HERE}.client.remote_pool:from_entry",
            prefix="aws",
            of_cluster=f"{_HERE}.client.pool:AwsSpotPool.of_cluster",
            address_of=f"{_HERE}.client.head_link:head_address_of",
            # Machines take one or two minutes to terminate, and only then can their security
            # group be deleted.
            down_s=240.0,
            check=f"{_HERE}.doctor:check",
            find=f"{_HERE}.account_commands:find_machines",
            check_all=f"{_HERE}.doctor:check_all",
        )
    },
    commands=(
        Command(run=f"{_HERE}.account_commands:reap", after="down"),
        Command(run=f"{_HERE}.account_commands:init", group="pools"),
        Command(run=f"{_HERE}.account_commands:check", group="pools"),
        Command(run=f"{_HERE}.account_commands:remove", group="pools"),
        Command(run=f"{_HERE}.account_commands:policy", group="pools"),
    ),
    words=f"{_HERE}.account_commands:WORDS",
    notices=f"{_HERE}.machine.imds:watch_if_on_ec2",
)
