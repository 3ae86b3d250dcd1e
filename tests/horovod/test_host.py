# SPDX-License-Identifier: Apache-2.0
"""Horovod as the host: ranks find each other under each launcher, through the right interface."""

from __future__ import annotations

import socket

import bitopk.hosts
import pytest
from jobs_support import horovodrun, mpirun_job


def check(done, size, interface):
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(size):
        assert f"rank {rank}: groups are right" in done.stdout
        # Two groups and an optimizer.
        line = f"rank {rank} of {size}: Horovod, all {size} ranks, interface {interface}"
        assert done.stdout.count(line) == 3, done.stdout


def test_ranks_meet_through_horovod_and_its_interface():
    check(horovodrun(2, "init.py"), 2, "lo (127.0.0.1)")


def test_ranks_of_one_machine_meet_on_loopback_under_mpi():
    check(mpirun_job(3, "init.py"), 3, "lo (127.0.0.1)")


def test_an_interface_of_the_environment_comes_first():
    done = horovodrun(2, "init.py", env={"BITOPK_IFACE": "nowhere0"})
    assert done.returncode != 0
    assert 'got "nowhere0"' in done.stdout + done.stderr


class Resolver:
    """Stands for the names and routes of a network."""

    def __init__(self, addresses, routes):
        self._addresses = addresses
        self._routes = routes

    def getaddrinfo(self, name, port, type=0):
        if name not in self._addresses:
            raise socket.gaierror(f"{name} is unknown")
        address = self._addresses[name]
        return [(socket.AF_INET, type, 0, "", (address, port))]

    def own_address(self, family, kind, address):
        return self._routes.get(address[0], "")


@pytest.fixture
def network(monkeypatch):
    resolver = Resolver(
        {"here": "127.0.1.1", "near": "10.0.0.2", "far": "192.168.7.9"},
        {"127.0.1.1": "127.0.0.1", "10.0.0.2": "10.0.0.1"},
    )
    monkeypatch.setattr(bitopk.hosts.socket, "getaddrinfo", resolver.getaddrinfo)
    monkeypatch.setattr(bitopk.hosts, "_own_address", resolver.own_address)


@pytest.mark.parametrize(
    ("names", "address"),
    [
        (["near"], "10.0.0.1"),
        (["unknown", "far", "near"], "10.0.0.1"),  # no such name, no route
        (["here", "far"], ""),  # loopback leads to no other machine
        ([], ""),
    ],
)
def test_the_route_to_a_peer_chooses_the_address(network, names, address):
    assert bitopk.hosts._address_towards(names) == address


def test_a_route_is_asked_of_the_system():
    address = ("127.0.0.1", 9)
    assert bitopk.hosts._own_address(socket.AF_INET, socket.SOCK_DGRAM, address) == "127.0.0.1"
