"""Detaches a forked child from the descriptors and native state of its parent.

A forked child shares its parent's sockets, pipes and epoll descriptors: what it writes, registers or removes there
(a finalizer is enough) affects the parent, and while it holds them, peers do not see that the parent closed its own.
So in the child each object that was registered with :func:`on_fork` replaces its descriptors by unconnected ones, and
keeps native state, whose destructors would act on the parent's resources, until the child ends. It does no I/O, does
not wait, and takes no lock.
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

__all__ = [
    "never_destroy",
    "on_fork",
    "on_fork_of_loop",
    "replace_by_never_readable",
    "replace_by_unconnected",
    "skip_exit_handlers",
]


class Forked(Protocol):
    """An object that has to be detached from the parent in a forked child."""

    def after_fork(self) -> None:
        """Detach from the parent's resources; called in the child, before anything else runs there."""


#: Objects and loops to handle in a child. They are module state since os.register_at_fork cannot be undone, so that one
#: hook has to serve all of them.
_HELD: weakref.WeakSet[Forked] = weakref.WeakSet()
_LOOPS: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_HOOKED: list[bool] = []
#: What exists while a fork is under way. Without these references, the garbage collector might run in the child before
#: the hook does, and destroy native state that only a reference cycle kept alive: its destructors act on the parent's.
_DURING_FORKS: list[list[object]] = []


def on_fork(held: Forked) -> None:
    """Have ``held.after_fork()`` called in each child that this process forks while ``held`` lives."""
    _hook()
    _HELD.add(held)


def on_fork_of_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Give the copy of an event loop in each forked child descriptors of its own.

    A child shares the epoll descriptor of asyncio's loops: if a transport is closed there, for example by the garbage
    collector, the parent's loop would stop watching the parent's socket. uvloop handles this itself.
    """
    _hook()
    _LOOPS.add(loop)


def _hook() -> None:
    if not _HOOKED:
        _HOOKED.append(True)
        os.register_at_fork(before=_before_fork, after_in_parent=_forked, after_in_child=_after_fork)


def _before_fork() -> None:
    _DURING_FORKS.append([*_HELD, *_LOOPS])


def _forked() -> None:
    del _DURING_FORKS[-1:]  # none, where the hook was registered during the fork


def _after_fork() -> None:
    held, loops = list(_HELD), list(_LOOPS)
    _HELD.clear()
    _LOOPS.clear()
    _DURING_FORKS.clear()
    for one in held:
        try:
            one.after_fork()
        except Exception:  # noqa: BLE001 - the other objects have to be handled all the same
            traceback.print_exc()
    for loop in loops:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # the loop is closed, or not one of asyncio
            _own_descriptors(loop)


def _own_descriptors(loop: Any) -> None:
    """Replace the shared epoll descriptor by a new one that watches the same descriptors, and the self-pipe too."""
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
    """Make ``fd`` refer to what ``by`` refers to, and close ``by``."""
    os.dup2(by, fd, inheritable=False)
    os.close(by)


def replace_by_unconnected(fd: int) -> None:
    """Replace a descriptor by a socket without a peer, so that operations on it have no effect outside the process."""
    if fd < 0:
        return
    near, far = socket.socketpair()
    far.close()
    with contextlib.suppress(OSError):
        _replace(fd, near.detach())


def replace_by_never_readable(fd: int) -> None:
    """Replace a descriptor that an event loop watches by one that never becomes readable."""
    with contextlib.suppress(OSError):
        _replace(fd, os.eventfd(0))


def never_destroy(held: object) -> None:
    """Keep an object from ever being destroyed, even at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def skip_exit_handlers() -> None:
    """Have this process end, with its exit code, without the handlers that C code has registered for its end so far.

    Some of them wait for threads that a forked child does not have. Python's own atexit handlers run as usual; what C
    code has buffered and not written is lost. Does nothing where the C library has no ``on_exit`` (glibc has it).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc["_exit"], None)  # handlers run in reverse order, so this one first; it gets the exit code
