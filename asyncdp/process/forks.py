"""What a fork does to what this process holds: the child keeps a copy that reaches nobody.

A forked child shares its parent's sockets, pipes and epoll descriptors: what it writes, registers or removes there (a
finalizer is enough) happens to the parent, and while it holds them, no peer sees that the parent closed its own.
So in the child each object that was registered by :func:`on_fork` replaces its descriptors by dead ones, and keeps
native state, whose destructors would act for the parent, for the rest of its life. It asks nobody, waits for nothing,
and takes no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import traceback
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Forked", "keep_for_ever", "on_fork", "on_fork_of_loop", "sever", "silence"]


class Forked(Protocol):
    """Something that has to change in a forked child."""

    def after_fork(self) -> None:
        """Let go of what is the parent's; called in the child, before anything else runs there."""


#: What has to be told. Module state because os.register_at_fork cannot be undone: one hook serves all.
_HELD: weakref.WeakSet[Forked] = weakref.WeakSet()
_LOOPS: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_HOOKED: list[bool] = []


def on_fork(held: Forked) -> None:
    """Have ``held.after_fork()`` called in each child that this process forks while ``held`` lives."""
    _hook()
    _HELD.add(held)


def on_fork_of_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Give each child's copy of an event loop descriptors of its own.

    The epoll descriptor of asyncio's loops is shared with a child: a transport that is closed there, if only by the
    collector, would stop the parent's loop from watching its own socket. uvloop sees to that itself.
    """
    _hook()
    _LOOPS.add(loop)


def _hook() -> None:
    if not _HOOKED:
        _HOOKED.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    held, loops = list(_HELD), list(_LOOPS)
    _HELD.clear()
    _LOOPS.clear()
    for one in held:
        try:
            one.after_fork()
        except Exception:  # noqa: BLE001 - the others have to be told all the same
            traceback.print_exc()
    for loop in loops:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # closed, or not asyncio's own
            _own_descriptors(loop)


def _own_descriptors(loop: Any) -> None:
    """Put a new epoll descriptor, which watches the same, in the place of the shared one; the self-pipe as well."""
    selector, reading, writing = loop._selector, loop._ssock, loop._csock  # noqa: SLF001 - there is no public way
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)  # noqa: FBT003 - there is no keyword
    _replace(reading.fileno(), near.detach())
    _replace(writing.fileno(), far.detach())
    epoll = select.epoll()
    for key in selector.get_map().values():
        events = (select.EPOLLIN if key.events & 1 else 0) | (select.EPOLLOUT if key.events & 2 else 0)
        with contextlib.suppress(OSError):
            epoll.register(key.fd, events)
    os.dup2(epoll.fileno(), selector.fileno(), inheritable=False)
    epoll.close()


def _replace(fd: int, by: int) -> None:
    """Put one descriptor in the place of another."""
    os.dup2(by, fd, inheritable=False)
    os.close(by)


def sever(fd: int) -> None:
    """Put a socket without a peer in the place of a descriptor: what is done with it from now on reaches nobody."""
    if fd < 0:
        return
    near, far = socket.socketpair()
    far.close()
    with contextlib.suppress(OSError):
        _replace(fd, near.detach())


def silence(fd: int) -> None:
    """Put one that never has news in the place of a descriptor that an event loop watches."""
    with contextlib.suppress(OSError):
        _replace(fd, os.eventfd(0))


def keep_for_ever(held: object) -> None:
    """Keep an object from ever being destroyed, at the end of the interpreter either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
