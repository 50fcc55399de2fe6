"""The process of the fake cloud: ``python -m etrain_jupyter.testing.fakeaws.process SETTINGS``.

It prints one line of JSON when it listens, serves until its standard input or its parent ends, then
ends the clusters' heads that live on it, and switches all instances off. A janitor removes its
network and its folder if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from etrain_jupyter.testing.fakeaws.machine import python_script
from etrain_jupyter.testing.fakeaws.networks import CABLE, SimulatedNetwork, make_network
from etrain_jupyter.testing.fakeaws.settings import Settings

END_S = 5.0
"""How long to try to end what lives on the cloud."""


def main(word: str) -> None:
    """Serve."""
    settings = Settings(**json.loads(word))
    network = make_network(settings.mode)
    folder = Path(tempfile.mkdtemp(prefix="etrain-fakeaws-"))
    words = [str(folder)]
    if network.bridge:
        words += [network.bridge, f"{CABLE}{os.getpid()}n"]
    janitor = subprocess.Popen(
        python_script("janitor", *words), stdin=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    try:
        _serve(settings, network, folder)
    finally:
        network.close()
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(30)
    # Threads of connections that are open still are no reason to stay.
    os._exit(0)


def _serve(settings: Settings, network: SimulatedNetwork, folder: Path) -> None:
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    from etrain_jupyter.testing.fakeaws.api import CloudApi
    from etrain_jupyter.testing.fakeaws.backend import Backend
    from etrain_jupyter.testing.fakeaws.control import Control, with_control
    from etrain_jupyter.testing.fakeaws.ec2 import Ec2
    from etrain_jupyter.testing.fakeaws.hypervisor import Hypervisor
    from etrain_jupyter.testing.fakeaws.market import Market

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # else every upload waits a second for "100 Continue"

        def log(self, *_: Any) -> None:
            """Print nothing."""

        def send_response(self, code: int, message: str | None = None) -> None:
            """Send no date: the application does, by the cloud's clock."""
            self.send_response_only(code, message)

    backend = Backend()
    hypervisor = Hypervisor(
        backend=backend,
        network=network,
        folder=folder,
        minute_s=settings.minute_s,
        boot_s=settings.boot_s,
    )
    ec2 = Ec2(backend, Market(), hypervisor)
    api = CloudApi(DomainDispatcherApplication(create_backend_app), ec2)
    control = Control(
        backend=backend,
        hypervisor=hypervisor,
        ec2=ec2,
        api=api,
        zones=[f"{settings.region}{letter}" for letter in "abc"],
        variables=settings.variables,
    )
    app = with_control(api, control)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Handler)
    port = server.server_port
    servers = [server]
    if network.host_address != "127.0.0.1":
        servers.append(
            make_server(network.host_address, port, app, threaded=True, request_handler=Handler)
        )
    hypervisor.endpoint = f"http://{network.host_address}:{port}"
    for number, one in enumerate(servers):
        threading.Thread(target=one.serve_forever, name=f"serve-{number}", daemon=True).start()
    told = {
        "port": port,
        "mode": network.mode,
        "host_address": network.host_address,
        "bridge": network.bridge,
        "folder": str(folder),
    }
    print(json.dumps(told), flush=True)
    wait_for_end(os.getppid())
    end_heads_at(hypervisor.endpoint)
    hypervisor.close()


def end_heads_at(endpoint: str) -> None:
    """SIGKILL the heads on this machine whose cloud is that one: what they live on goes.

    A head outlives its notebook, as it should where the cloud is real.
    """
    import psutil

    from etrain_jupyter.process.processes import MARKER, wait_until

    def kill_again() -> bool:
        # Again, because a keeper may have started a head since the last look.
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_other = process.uids().real != os.getuid()
                if is_other or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                known = process.environ()
                if MARKER in known and known.get("AWS_ENDPOINT_URL") == endpoint:
                    found.append(process)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not found

    wait_until(kill_again, timeout_s=END_S)


def wait_for_end(parent: int) -> None:
    """Wait until standard input ends, or the parent: a fork of it may hold the other end open."""
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 0.2)[0] and not os.read(sys.stdin.fileno(), 1024):
            return


if __name__ == "__main__":
    main(sys.argv[1])
