"""Strangers and relays are refused before the first tensor is sent.

Review S3.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etrain_jupyter.trainer.group import authentication
from etrain_jupyter.trainer.group.gloo_device import GlooDevice
from etrain_jupyter.trainer.group.process_group import BroadcastStore, CommunicationError, RankGroup
from tests.unit.trainer.group.strangers import Stranger, stranger, uid_of_stranger
from tests.unit.trainer.peers import HOST, linked_stores

NUMBERS = [struct.pack("=Q", number) for number in range(4)]
"""Numbers of a pair in 8 bytes, by which gloo identifies ranks."""

HOSTS = ["127.0.0.1", "::1"]

Attack = Callable[[int, GlooDevice], None]


@pytest.fixture
def attacker() -> Iterator[Stranger]:
    with stranger() as process:
        yield process


def end_of(device: GlooDevice) -> tuple[str, int]:
    with device.listener() as listener:
        host, port = listener.getsockname()[:2]
        return host, port


class Attacked:
    """Groups that are attacked after they listen and before they publish their address.

    A real stranger has to be fast enough; here it always is.
    """

    def __init__(self, count: int, attack: Attack, *, host: str = HOST, **keys: Any) -> None:
        self._attack, self._attacked = attack, set()
        self.groups = [
            RankGroup(
                generation=1,
                rank=rank,
                world_size=count,
                store=BroadcastStore(lambda key, value, rank=rank: self._publish(rank, key, value)),
                host=host,
                **keys,
            )
            for rank in range(count)
        ]
        self.swapped: dict[bytes, bytes] = {}
        """Replacements in the published addresses."""

    def _publish(self, rank: int, key: str, value: bytes) -> None:
        if rank not in self._attacked:
            self._attacked.add(rank)
            self._attack(rank, self.groups[rank]._device)
        for old, new in self.swapped.items():
            value = value.replace(old, new)
        for other in self.groups:
            if other.rank != rank:
                other._store.put(key, value)

    def connect(self) -> list[Exception | None]:
        """Connect all groups; return the exception of each. A failure aborts all of them."""

        num_done = 0

        def attempt(group: RankGroup) -> Exception | None:
            nonlocal num_done
            try:
                group.connect()
            except CommunicationError as exc:
                num_done += 1
                # The other ranks may also fail by themselves; some are stuck inside gloo.
                deadline = time.monotonic() + 1
                while num_done < len(self.groups) and time.monotonic() < deadline:
                    time.sleep(0.01)
                for each in self.groups:
                    each.abort()
                return exc
            num_done += 1
            return None

        with ThreadPoolExecutor(len(self.groups)) as ranks:
            return list(ranks.map(attempt, self.groups))

    def sums(self) -> list[list[float]]:
        """Sum a tensor over the ranks, and return the result of each rank."""
        tensors = [torch.full((2,), float(group.rank + 1)) for group in self.groups]

        def add(group: RankGroup) -> None:
            group.sum_on_host(tensors[group.rank])

        with ThreadPoolExecutor(len(self.groups)) as ranks:
            list(ranks.map(add, self.groups))
        return [tensor.tolist() for tensor in tensors]

    def close(self) -> None:
        for group in self.groups:
            group.close()


@contextlib.contextmanager
def attacked(count: int, attack: Attack, **keys: Any) -> Iterator[Attacked]:
    found = Attacked(count, attack, **keys)
    try:
        yield found
    finally:
        found.close()


def take_places(attacker: Stranger, *, then: str = "hold") -> Attack:
    """Return an attack that sends every number to every rank."""

    def attack(_: int, device: GlooDevice) -> None:
        for number in NUMBERS:
            attacker.connect(end_of(device), number, then=then)
        time.sleep(0.05)  # gloo reads in its own thread

    return attack


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("count", [2, 3])
def test_stranger_that_takes_a_place_is_refused_by_all_ranks_and_gets_no_byte(
    attacker, host, count
):
    with attacked(count, take_places(attacker), host=host) as ranks:
        errors = ranks.connect()
        assert [type(error) for error in errors] == [CommunicationError] * count
        assert len({str(error) for error in errors}) == 1
        text = str(errors[0])
        assert text.startswith("an unknown process connects to this job's ports (rank ")
        assert f"(uid {uid_of_stranger()})" in text
        assert attacker.num_received() == 0


def test_refusal_names_the_port_and_the_strangers_end(attacker):
    ports = {}

    def attack(rank: int, device: GlooDevice) -> None:
        ports[rank] = end_of(device)[1]
        take_places(attacker)(rank, device)

    with attacked(2, attack) as ranks:
        text = str(ranks.connect()[0])
    found = re.search(r"rank (\d), port (\d+): a connection from 127\.0\.0\.1:(\d+)", text)
    assert found is not None
    assert int(found[2]) == ports[int(found[1])]


class Relayed:
    """An attack on two ranks: the connecting rank gets the port of a relay, not of the other rank.

    A real attacker would have to redirect packets, because the addresses are authenticated.
    """

    def __init__(self, attacker: Stranger) -> None:
        self._attacker = attacker
        self._both = threading.Barrier(2)
        self._ends: dict[int, tuple[str, int]] = {}
        self.swapped: dict[bytes, bytes] = {}

    def __call__(self, rank: int, device: GlooDevice) -> None:
        self._ends[rank] = end_of(device)
        if self._both.wait(10) == 0:
            # gloo compares the bytes of the ports in memory order.
            host, port = min(self._ends.values(), key=lambda end: socket.htons(end[1]))
            relay = self._attacker.relay((host, port))
            self.swapped[struct.pack("!H", port)] = struct.pack("!H", relay)
        self._both.wait(10)


@pytest.mark.parametrize("host", HOSTS)
def test_relay_in_place_of_a_rank_is_refused_and_passes_no_tensor(attacker, host):
    relayed = Relayed(attacker)
    with attacked(2, relayed, host=host) as ranks:
        ranks.swapped = relayed.swapped
        errors = ranks.connect()
        assert all(isinstance(error, CommunicationError) for error in errors)
        assert "an unknown process connects to this job's ports" in str(errors[0])
        assert "does not reach a rank" in str(errors[0])
        assert attacker.num_received() == len(NUMBERS[0])  # it relayed a number, nothing else


@pytest.mark.parametrize("then", ["hold", "fin", "rst"])
def test_garbage_does_not_keep_the_ranks_from_forming(attacker, then):
    def attack(_: int, device: GlooDevice) -> None:
        for data in (b"", b"\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
            attacker.connect(end_of(device), data, then=then)

    with attacked(2, attack) as ranks:
        assert ranks.connect() == [None, None]
        assert ranks.sums() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("then", ["fin", "rst"])
def test_stranger_that_takes_a_place_and_ends_the_connection_breaks_the_group_at_once(
    attacker, then
):
    with attacked(2, take_places(attacker, then=then)) as ranks:
        errors = ranks.connect()
        assert all(isinstance(error, CommunicationError) for error in errors)
        assert not any("in time" in str(error) for error in errors)
        assert attacker.num_received() == 0


def test_connected_ranks_refuse_further_connections(attacker):
    with attacked(2, lambda *_: None) as ranks:
        assert ranks.connect() == [None, None]
        before = len(os.listdir("/proc/self/fd"))
        for group in ranks.groups:
            assert attacker.flood(end_of(group._device), 5) == 0
        assert len(os.listdir("/proc/self/fd")) == before
        assert ranks.sums() == [[3.0, 3.0], [3.0, 3.0]]


def test_listener_of_a_failed_group_is_sealed_even_if_a_thread_is_stuck_in_gloo(attacker):
    with attacked(2, lambda *_: None) as ranks:
        assert ranks.connect() == [None, None]
        group = ranks.groups[0]
        group.abort("enough")
        assert attacker.flood(end_of(group._device), 2) == 0


def test_flood_while_ranks_connect_is_refused_before_it_uses_up_all_descriptors(
    attacker, monkeypatch
):
    monkeypatch.setattr(authentication, "MAX_UNCLAIMED", 40)
    group = RankGroup(
        generation=1, rank=0, world_size=2, store=BroadcastStore(lambda *_: None), host=HOST
    )
    with ThreadPoolExecutor(1) as rank, contextlib.ExitStack() as stack:
        forming = rank.submit(group.connect)  # the other rank never connects
        stack.callback(group.close)
        stack.callback(group.abort)
        while group._device is None:
            time.sleep(0.001)
        end = end_of(group._device)
        assert attacker.flood(end, 60) > 40
        with pytest.raises(
            CommunicationError, match=r"opened \d+ connections .* \d+ more"
        ) as error:
            forming.result(20)
        assert f"(uid {uid_of_stranger()})" in str(error.value)
        assert attacker.flood(end, 1) == 0


def test_rank_that_cannot_connect_notifies_the_other_ranks(monkeypatch):
    first, second = linked_stores()
    group = RankGroup(generation=1, rank=0, world_size=2, store=first, host=HOST)

    def fail(*_: Any) -> None:
        raise RuntimeError("[gloo] connection refused\nwith a trace")

    monkeypatch.setattr("etrain_jupyter.trainer.group.forming.connect_gloo", fail)
    with pytest.raises(CommunicationError, match="connection refused"):
        group.connect()
    device = GlooDevice(HOST)
    with pytest.raises(CommunicationError, match=r"^rank 0: \[gloo\] connection refused$"):
        authentication.authenticate(device, second, rank=1, world_size=2, secret=b"")
    group.close()


def test_system_that_does_not_list_sockets_is_refused(monkeypatch):
    with attacked(2, lambda *_: None) as ranks:
        monkeypatch.setattr("etrain_jupyter.trainer.group.gloo_device._find_epoll", lambda _: None)
        ranks._attack = lambda *_: None
        errors = ranks.connect()
    assert "cannot check who is connected to this rank: /proc/self/fdinfo" in str(errors[0])
    assert "Train with one worker, or on Linux" in str(errors[0])


def test_gloo_marks_the_connections_that_have_no_rank(attacker):
    """``EPOLLONESHOT`` is an implementation detail of gloo; without it every group is refused."""
    before, marks = {}, []

    def attack(rank: int, device: GlooDevice) -> None:
        attacker.connect(end_of(device))  # sends nothing
        attacker.connect(end_of(device), b"\0\0")  # not a whole number
        attacker.connect(end_of(device), b"\xff" * 8)  # the number of no rank
        time.sleep(0.05)
        before[rank] = [each.is_claimed for each in device.connections()]

    with attacked(3, attack) as ranks:
        assert ranks.connect() == [None] * 3
        for group in ranks.groups:
            marks.append(sorted(each.is_claimed for each in group._device.connections()))
            assert group._device.num_unclaimed() == 3
    assert list(before.values()) == [[False] * 3] * 3
    assert marks == [[False] * 3 + [True] * 2] * 3


@pytest.mark.parametrize("count", [2, 4])
def test_gloo_makes_one_connection_per_pair_of_ranks(count):
    with attacked(count, lambda *_: None) as ranks:
        assert ranks.connect() == [None] * count
        pairs = [each.pair for group in ranks.groups for each in group._device.connections()]
        assert len(pairs) == len(set(pairs)) == count * (count - 1)
        assert {(far, near) for near, far in pairs} == set(pairs)


def test_connections_are_made_while_forming_regardless_of_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with attacked(2, lambda *_: None) as ranks:
        assert ranks.connect() == [None, None]


def test_plain_gloo_gives_a_rank_s_place_to_a_stranger(attacker):
    """Control: the attack succeeds on gloo alone, so the tests above test the defense."""
    stores = linked_stores()
    devices = [GlooDevice(HOST), GlooDevice(HOST)]
    for rank, device in enumerate(devices):
        take_places(attacker)(rank, device)

    def connect(rank: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [devices[rank].device]
        return dist.ProcessGroupGloo(stores[rank], rank, 2, options)

    with ThreadPoolExecutor(2) as ranks:
        backends = list(ranks.map(connect, range(2)))
    tensors = [torch.ones(64), torch.ones(64)]
    works = [b.allreduce([t]) for b, t in zip(backends, tensors, strict=True)]
    deadline = time.monotonic() + 10
    while not (count := attacker.num_received()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count > 0
    for device in devices:
        device.shut_down()
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()


def test_abort_ends_the_wait_for_a_rank_that_does_not_publish():
    mine, its = linked_stores()
    group = RankGroup(generation=1, rank=0, world_size=2, store=mine, host=HOST)
    device = GlooDevice(HOST)

    def connect_only() -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [device.device]
        dist.ProcessGroupGloo(its, 1, 2, options)
        group.abort("rank 1 is lost")

    peer = threading.Thread(target=connect_only)
    peer.start()
    with pytest.raises(CommunicationError, match="rank 1 is lost"):
        group.connect()
    peer.join(10)
    group.close()
