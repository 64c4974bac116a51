"""Addresses and ports at which members of a group listen. Runs in workers, in coordinators and in the TrainerActor."""

from __future__ import annotations

import socket


def address_family(node_ip: str) -> socket.AddressFamily:
    """Return the socket family of an IP address."""
    return socket.AF_INET6 if ":" in node_ip else socket.AF_INET


def loopback_of(node_ip: str) -> str:
    """Return the loopback address of a node.

    Who connects to a node's own address asks the name server for that address's name: torch's store does, in the resolver of
    the C library, and a name server that does not answer costs it five seconds.
    """
    return "::1" if ":" in node_ip else "127.0.0.1"


def find_interface(node_ip: str) -> str | None:
    """Return the name of the network interface that has this address, or None."""
    try:
        import psutil
    except ImportError:  # a checkout on a machine without raysgd's dependencies: the library chooses the interface
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            return str(name)
    return None


def reserve_port(node_ip: str) -> socket.socket:
    """Return a socket that has a free port and does not listen: nobody else gets the port while it is open."""
    reserved = socket.socket(address_family(node_ip), socket.SOCK_STREAM)
    reserved.bind((node_ip, 0))
    return reserved


def address_of(bound: socket.socket) -> str:
    """Return the address of a socket as ``host:port``."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_free_address(node_ip: str) -> str:
    """Return ``host:port`` with a free port, for a server that another library creates at once.

    The port cannot stay reserved until then, because the gRPC of TensorFlow and of JAX does not share ports. The kernel does
    not give the same port twice in a row, so another process is unlikely to get this one meanwhile.
    """
    with reserve_port(node_ip) as reserved:
        return address_of(reserved)
