"""Spot machines of EC2 as a pool: launched, watched, paid for and taken down through boto3.

``spec`` says what is wanted. ``fleet`` and ``ledger`` decide and count, without any I/O.
``prices``, ``ec2``, ``network`` and ``bootstrap`` talk to AWS. ``reconciler`` and ``nodes`` bring
both together beside the coordinator. ``reaping`` finds what is left, from any machine, and
``policy`` prints what roles need. Nothing here is imported before a pool of this kind is asked for.
"""
