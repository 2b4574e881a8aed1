"""Ports for peers on this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import launch.quick
from crad_p2p.errors import UsageError
from launch.quick import free_ports


def test_ports_are_different_and_not_those_of_connections_that_go_out() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text().split()[0]) if path.exists() else 49152
    assert max(ports) < first


def test_a_port_on_which_somebody_listens_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(launch.quick, "_PORTS", [port, *free_ports(1)])
        assert port not in free_ports(1)
        with pytest.raises(UsageError, match=r"2 peers need as many ports of 127\.0\.0\.1, and 1 are free"):
            free_ports(2)
