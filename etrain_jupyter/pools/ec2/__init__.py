"""Pool of EC2 spot machines: launch, monitor, bill and remove them with boto3.

``spec`` is the configuration. ``head.fleet`` and ``ledger`` are pure rules. ``prices``,
``ec2_api``, ``network`` and ``bootstrap`` send requests to AWS. ``head.reconciler`` and
``head.nodes`` apply the rules in the scheduler process, and ``machine.agent`` runs on each
instance. ``reaping`` removes leftovers, from any machine. This package is imported only when a pool
of this kind is used.
"""
