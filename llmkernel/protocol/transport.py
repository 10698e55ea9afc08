"""Sockets: one factory for every ZMQ socket of the project."""

import os
from typing import Any, TypeVar

import zmq

from llmkernel.protocol.curve_key import CurveKey

__all__ = ["MAX_IPC_PATH", "bound_address", "make_zmq_socket"]

MAX_IPC_PATH = 100
"""Bytes that a socket's path may have; the system's own limit is 107 on Linux and 103 on macOS."""

_CONNECTING = frozenset({zmq.PUSH, zmq.SUB, zmq.XSUB})
_RECEIVING = frozenset({zmq.PULL, zmq.DEALER, zmq.ROUTER, zmq.PAIR})
_SENDING = frozenset({zmq.PUSH, zmq.DEALER, zmq.ROUTER, zmq.PAIR})
_LARGE_MEMORY = 32 * 2**30
_LARGE_BUFFER = 2**29

_Socket = TypeVar("_Socket", bound="zmq.Socket[Any]")


def make_zmq_socket(
    ctx: "zmq.Context[_Socket]",
    path: str,
    socket_type: int,
    *,
    bind: bool | None = None,
    identity: bytes | None = None,
    linger: int | None = None,
    hwm: int = 0,
    router_mandatory: bool = True,
    key: CurveKey | None = None,
) -> _Socket:
    """A socket of `ctx` (plain or asyncio), bound or connected to `path`; the caller owns it.

    bind: None = every type but PUSH, SUB and XSUB binds. identity: how a ROUTER at the other end addresses this socket.
    linger: milliseconds for which closing waits for unsent messages; None = ZMQ's default, without limit.
    hwm: messages that may wait in each direction, 0 = no limit; then the kernel's buffers are enlarged too, on
    machines with much memory. router_mandatory: a ROUTER raises EHOSTUNREACH when it sends to a peer that it does not
    know, instead of dropping the message. key: protects a tcp socket from the other users of this machine; not used
    elsewhere.

    Paths: ipc:// of at most MAX_IPC_PATH bytes, inproc://, and tcp:// on 127.0.0.1 only. ValueError for others.
    """
    _check_path(path)
    socket = ctx.socket(socket_type)
    try:
        _set_options(socket, socket_type, hwm)
        if socket_type == zmq.ROUTER and router_mandatory:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        if linger is not None:
            socket.setsockopt(zmq.LINGER, linger)
        binds = socket_type not in _CONNECTING if bind is None else bind
        if key is not None and path.startswith("tcp:"):
            key.protect(socket, bind=binds)
        if binds:
            socket.bind(path)
        else:
            socket.connect(path)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def bound_address(socket: "zmq.Socket[Any]") -> str:
    """Where `socket` is bound or connected; the real port of a `tcp://127.0.0.1:*`."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _set_options(socket: "zmq.Socket[Any]", socket_type: int, hwm: int) -> None:
    buffer = _LARGE_BUFFER if hwm == 0 and _memory_is_large() else -1
    if socket_type in _RECEIVING:
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.RCVBUF, buffer)
    if socket_type in _SENDING:
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.SNDBUF, buffer)


def _memory_is_large() -> bool:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return False
    return total > _LARGE_MEMORY and free > _LARGE_MEMORY // 2


def _check_path(path: str) -> None:
    scheme, _, place = path.partition("://")
    if scheme == "tcp" and place.rpartition(":")[0] == "127.0.0.1":
        return
    if scheme == "ipc" and len(os.fsencode(place)) > MAX_IPC_PATH:
        raise ValueError(f"The socket path {place!r} is longer than {MAX_IPC_PATH} bytes; use a shorter folder.")
    if scheme not in ("ipc", "inproc") or not place:
        raise ValueError(
            f"{path!r} is not a place for a socket; use ipc://PATH, inproc://NAME or tcp://127.0.0.1:PORT."
        )
