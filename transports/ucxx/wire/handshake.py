"""Authentication of a connection: both sides prove that they know the shared secret, without sending it.

The proof is an HMAC-SHA256 over both nonces and the direction, so that it can be neither reflected nor replayed.
Without a secret (an empty key) it proves nothing; a host without a secret refuses peers from other machines.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from asyncdp.errors import DataPlaneUnavailable

from .failures import printable
from .messages import Answer, Challenge, Failed, Welcome, WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..slots.writer_process import Machine, Process
    from .control import Control

__all__ = ["Secret", "UnprovedError", "authenticate", "greet"]

_NONCE_BYTES = 32
_SAME = (
    "the environment variable ASYNCDP_SECRET (or ucxx.secret in the config) must be the same on both sides;"
    " unset it where the plane's own secret is random, which its directory tells"
)


class UnprovedError(WireError):
    """Raised where a peer at the port of a host refuses this client, or is not known to have the secret."""


class Secret:
    """A shared secret that appears in no repr, log or pickle.

    Args:
        text: The secret, empty for none; None: the environment variable ``ASYNCDP_SECRET``.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str | None = None) -> None:
        """Keep the secret as the key of the HMAC."""
        self._key = (os.environ.get("ASYNCDP_SECRET", "") if text is None else text).encode()

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return f"Secret({'set' if self._key else 'none'})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret is not pickled: set ASYNCDP_SECRET where the other process runs")

    def proof(self, who: bytes, first: bytes, second: bytes) -> bytes:
        """Return the HMAC over the direction ``who`` and two nonces."""
        return hmac.digest(self._key, who + first + second, "sha256")


def _is_local(peer: str) -> bool:
    try:
        return ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return False  # the address is not known


async def greet(control: Control, secret: Secret, welcome: Callable[[], Welcome]) -> Answer:
    """Authenticate a client, as the host; what ``welcome`` returns then is sent to it, completed by the proof.

    Raises:
        DataPlaneUnavailable: The client does not know the secret; it was sent an error, and the stream is closed.
        WireError, ConnectionResetError: The peer is no client of asyncdp, or has disconnected.
    """
    nonce = control.challenge or os.urandom(_NONCE_BYTES)
    if not control.challenge:
        await control.send(Challenge(nonce))
    answer = await control.expect(Answer)
    problem = None
    if not hmac.compare_digest(answer.proof, secret.proof(b"client", nonce, answer.nonce)):
        problem = f"the secret is not this host's: {_SAME}"
    elif not secret and not _is_local(control.peer):
        problem = "this host has no secret and serves its own machine only: set ASYNCDP_SECRET on both sides"
    if problem is not None:
        await control.send(Failed("DataPlaneBadRequest", problem))
        control.close()
        raise DataPlaneUnavailable(problem, host=control.peer)
    control.open_up()
    proof = secret.proof(b"host", answer.nonce, nonce)
    await control.send(replace(welcome(), proof=proof))
    return answer


async def authenticate(
    control: Control, secret: Secret, machine: Machine, process: Process, client: bytes = b"\0" * 16
) -> Welcome:
    """Authenticate to a host, as the client, and verify the host's proof.

    Args:
        control: The control stream.
        secret: The shared secret.
        machine: Machine of this process.
        process: Identity of this process.
        client: Id of this client on all its connections, 16 bytes that no other client knows.

    Raises:
        UnprovedError: The secrets of client and host differ, or the peer is no slot host. Whatever it says before its
            proof means no more, since any process may listen at the port of a host that has ended.
        WireError, ConnectionResetError: The peer is no slot host, or has disconnected.
    """
    challenge = await control.expect(Challenge)
    nonce = os.urandom(_NONCE_BYTES)
    proof = secret.proof(b"client", challenge.nonce, nonce)
    await control.send(Answer(nonce, proof, client, machine.boot_id, machine.pid_namespace, process.pid, process.start))
    reply = await control.receive()
    if isinstance(reply, Failed):
        raise UnprovedError(f"what answers at this port refuses this client: {printable(reply.text)}")
    if not isinstance(reply, Welcome):
        raise WireError(f"{type(reply).__name__} came where Welcome was expected")
    if not hmac.compare_digest(reply.proof, secret.proof(b"host", nonce, challenge.nonce)):
        raise UnprovedError(f"what answers at this port does not know the secret: {_SAME}")
    control.open_up()
    return reply
