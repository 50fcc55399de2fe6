"""Turn the machine off; because of its launch template, EC2 then terminates it."""

from __future__ import annotations

import logging
import math
import subprocess
import time
from pathlib import Path

from etrain_jupyter.plugins.ec2.machine import imds

logger = logging.getLogger("etrain.agent")

COMMAND_S = 10.0
"""Timeout of a command that turns the machine off, in seconds."""
RETRY_S = 5.0

LAST_RESORTS = (["systemctl", "poweroff", "--force"], ["poweroff", "-f"])
"""Commands to try on an EC2 machine if ``shutdown`` fails."""


def arm_timer(left_s: float) -> None:
    """Schedule a system shutdown, replacing any previous one."""
    # `shutdown` accepts whole minutes only. Round up: the agent itself ends the lifetime to the
    # second, and this timer is for an agent that hangs.
    minutes = max(1, math.ceil(left_s / 60))
    # If none is scheduled, this at worst logs a warning.
    _run(["shutdown", "-c"])
    _run(["shutdown", "-h", f"+{minutes}"])
    logger.info("this machine turns off in %d min at the latest", minutes)


def power_off(num_tries: int = 12) -> bool:
    """Turn the machine off; return whether a command succeeded."""
    # A failure may be temporary, and a machine that stays on is charged without limit.
    for number in range(num_tries):
        if number:
            time.sleep(RETRY_S)
        # The launch template has InstanceInitiatedShutdownBehavior "terminate", so a halt from
        # inside terminates the machine, and needs neither credentials nor a network.
        commands = [["shutdown", "-h", "now"], *(LAST_RESORTS if _is_ec2_machine() else ())]
        if any(_run(command) for command in commands):
            return True
    return False


def _is_ec2_machine() -> bool:
    """Return whether this is certainly an EC2 machine: never force a laptop off."""
    try:
        return Path(imds.VENDOR_FILE).read_text().strip() == "Amazon EC2"
    except OSError:
        return False


def _run(command: list[str]) -> bool:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, timeout=COMMAND_S, check=False, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        logger.error("%s: %s", " ".join(command), exc)
        return False
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        logger.warning("%s: exit code %d %s", " ".join(command), done.returncode, output)
    return done.returncode == 0
