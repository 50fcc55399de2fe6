"""Run an EC2 machine's agent: ``python -m etrain_jupyter.plugins.ec2.machine.agent S3_URL``.

The last line of the machine's user-data runs this. The agent identifies the machine, reads the
cluster's files from S3, serves, and finally turns the machine off.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etrain_jupyter.plugins.ec2.machine.base_agent import MachineAgent
from etrain_jupyter.plugins.ec2.machine.node_agent import NodeAgent
from etrain_jupyter.plugins.ec2.machine.redaction import redact_logs
from etrain_jupyter.process.entry import log_to_stderr


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until the machine is off."""
    parser = argparse.ArgumentParser(prog="etrain-agent")
    parser.add_argument("url", help="where the cluster's objects are: s3://bucket/prefix")
    parser.add_argument("--keys", required=True, help="folder of the certificates, below the url")
    parser.add_argument("--owner", default="", help="account that the bucket must belong to")
    options = parser.parse_args(arguments)
    log_to_stderr()
    redact_logs()
    # Otherwise, boto3 would request the role's credentials through a proxy.
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    os.environ["NO_PROXY"] = ",".join(filter(None, (known, "169.254.169.254")))
    folder = os.environ.get("ETRAIN_NODE_DIR") or tempfile.mkdtemp(prefix="etrain-node-")
    # The user-data of an older or newer launcher may name a role that this version lacks. Such a
    # machine must still turn itself off, so it gets a node's agent, which is never run.
    role = os.environ.get("ETRAIN_ROLE", "node")
    agent_class: type[MachineAgent] = NodeAgent
    if role == "head":
        # Imported here because it loads the scheduler, which a node does not need.
        from etrain_jupyter.plugins.ec2.machine.head_agent import HeadAgent

        agent_class = HeadAgent
    agent = agent_class(options.url, Path(folder), keys=options.keys, owner=options.owner)
    # The system sends SIGTERM when it shuts down for another reason. The workers then get STOP_S to
    # exit.
    signal.signal(signal.SIGTERM, agent.request_stop)
    is_known = role in ("node", "head")
    why = agent.run() if is_known else f"ETRAIN_ROLE={role} is unknown to this version"
    is_off = agent.turn_off(why)
    logging.shutdown()
    sys.stdout.flush()
    # Do not use sys.exit: threads that are blocked in a request to S3 or IMDS would keep the
    # process alive, and the last line of the user-data, `shutdown -h now`, would not run.
    os._exit(0 if is_off else 1)


if __name__ == "__main__":
    main()
