"""Process of the simulated cloud: ``python -m ...ec2.simulator.process SETTINGS``.

It prints one line of JSON as soon as it listens, and serves until its standard input closes or its
parent exits. Then it kills the cluster heads that use it, and switches off all instances. If it is
killed, a janitor removes its network and its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from etrain_jupyter.plugins.ec2.simulator.machine import python_script
from etrain_jupyter.plugins.ec2.simulator.networks import CABLE, SimulatedNetwork, make_network
from etrain_jupyter.testing.serving import make_wsgi_server, processes_with, serve_in_thread

END_S = 5.0
"""Timeout for ending the heads, in seconds."""


# The cleanup after each kind of end:
#
#   end of this process          instances                 network and folder
#   standard input closes        hypervisor.forget()       network.close(), then the janitor
#   parent is killed             the same                  the same
#   it is killed itself          each one: its own pipe    the janitor, whose pipe has closed, too
#                                to this process closes
def main(settings: dict[str, Any]) -> None:
    """Serve until the process must end, then clean up; see ``FakeAws`` for the settings."""
    network = make_network(settings["mode"])
    folder = Path(tempfile.mkdtemp(prefix="etrain-fakeaws-"))
    arguments = [str(folder)]
    if network.bridge:
        arguments += [network.bridge, f"{CABLE}{os.getpid()}n"]
    janitor = subprocess.Popen(
        python_script("janitor", *arguments), stdin=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    try:
        _serve(settings, network, folder)
    finally:
        network.close()
        assert janitor.stdin is not None
        janitor.stdin.close()
        # The janitor outlives this process, and may be removing the disks of many instances.
        with contextlib.suppress(subprocess.TimeoutExpired):
            janitor.wait(30)
    # Do not wait for threads with open connections.
    os._exit(0)


def _serve(settings: dict[str, Any], network: SimulatedNetwork, folder: Path) -> None:
    # moto uses boto3, which must not look for a metadata service on this machine.
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    from etrain_jupyter.plugins.ec2.simulator.api import CloudApi
    from etrain_jupyter.plugins.ec2.simulator.backend import Backend
    from etrain_jupyter.plugins.ec2.simulator.control import Control, with_control
    from etrain_jupyter.plugins.ec2.simulator.ec2 import Ec2
    from etrain_jupyter.plugins.ec2.simulator.hypervisor import Hypervisor
    from etrain_jupyter.plugins.ec2.simulator.market import Market

    backend = Backend()
    hypervisor = Hypervisor(
        backend=backend,
        network=network,
        folder=folder,
        minute_s=settings["minute_s"],
        boot_s=settings["boot_s"],
    )
    ec2 = Ec2(backend, Market(), hypervisor)
    api = CloudApi(DomainDispatcherApplication(create_backend_app), ec2, backend.iam)
    control = Control(
        backend=backend,
        hypervisor=hypervisor,
        ec2=ec2,
        api=api,
        zones=[f"{settings['region']}{letter}" for letter in "abc"],
        variables=settings["variables"],
    )
    app = with_control(api, control)
    # Do not add a date, because the application sends one, according to the cloud's clock.
    server = make_wsgi_server(app, dated=False)
    port = server.server_port
    servers = [server]
    if network.host_address != "127.0.0.1":
        servers.append(make_wsgi_server(app, host=network.host_address, port=port, dated=False))
    hypervisor.endpoint = f"http://{network.host_address}:{port}"
    for number, one in enumerate(servers):
        serve_in_thread(one, f"serve-{number}")
    facts = {
        "port": port,
        "mode": network.mode,
        "host_address": network.host_address,
        "bridge": network.bridge,
        "folder": str(folder),
    }
    print(json.dumps(facts), flush=True)
    wait_for_end(os.getppid())
    end_heads_at(hypervisor.endpoint)
    hypervisor.forget()


def end_heads_at(endpoint: str) -> None:
    """Kill the heads on this machine that use this cloud."""
    # With a real cloud, a head outlives its notebook by design. Here, the head's cloud disappears
    # as well.
    import psutil

    from etrain_jupyter.process.processes import MARKER, wait_until

    def kill_again() -> bool:
        # Repeat, because a keeper may have restarted a head in the meantime.
        found = []
        for process in processes_with(f"AWS_ENDPOINT_URL={endpoint}"):
            with contextlib.suppress(psutil.Error, OSError):
                # A local cluster only stores checkpoints there. Its jobs are not the cloud's.
                if not process.environ().get(MARKER, "local-").startswith("local-"):
                    found.append(process)
                    process.kill()
        return not found

    wait_until(kill_again, timeout_s=END_S)


def wait_for_end(parent: int) -> None:
    """Wait until standard input closes or the parent exits."""
    # Standard input alone is not enough, because a fork of the parent may hold the other end open.
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 0.2)[0] and not os.read(sys.stdin.fileno(), 1024):
            return


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
