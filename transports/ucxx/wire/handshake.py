"""The door of a host: both sides prove that they know the secret, neither tells it.

The proof is an HMAC-SHA256 over both nonces and the direction, so that it cannot be sent back or used again. Without a
secret (an empty key) the proof proves nothing; a host without one refuses peers from other machines.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import TYPE_CHECKING

from asyncdp.errors import DataPlaneBadRequest, DataPlaneUnavailable

from .messages import Answer, Challenge, Failed, Welcome, WireError

if TYPE_CHECKING:
    from ..slots.writer_process import Machine, Process
    from .control import Control

__all__ = ["Secret", "greet", "knock"]

_NONCE_BYTES = 32
_SAME = "the environment variable ASYNCDP_SECRET (or ucxx.secret in the config) must be the same on both sides"


class Secret:
    """A shared secret that shows in no repr, log or pickle.

    Args:
        text: The secret; None: that of the environment variable ``ASYNCDP_SECRET``, else none.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str | None = None) -> None:
        """Keep it."""
        self._key = (os.environ.get("ASYNCDP_SECRET", "") if text is None else text).encode()

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return f"Secret({'set' if self._key else 'none'})"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret is not pickled: set ASYNCDP_SECRET where the other process runs")

    def proof(self, who: bytes, first: bytes, second: bytes) -> bytes:
        """Return the HMAC over two nonces."""
        return hmac.digest(self._key, who + first + second, "sha256")


def _is_local(peer: str) -> bool:
    try:
        return ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return not peer  # a unix socket has no address


async def greet(control: Control, secret: Secret, welcome: Welcome) -> Answer:
    """Let a client in, as the host; ``welcome`` lacks only the proof.

    Raises:
        DataPlaneUnavailable: It does not know the secret; it was told so, and the stream is closed.
        WireError, ConnectionResetError: It is none of ours, or gone.
    """
    nonce = os.urandom(_NONCE_BYTES)
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
    values = {name: getattr(welcome, name) for name in welcome.__struct_fields__}
    await control.send(Welcome(**{**values, "proof": proof}))
    return answer


async def knock(
    control: Control, secret: Secret, machine: Machine, process: Process, client: bytes = b"\0" * 16
) -> Welcome:
    """Ask to be let in, as the client.

    Args:
        control: The stream.
        secret: What the host knows too.
        machine: This one.
        process: This one.
        client: Stands for this client on all its connections; nobody else knows it.

    Raises:
        DataPlaneBadRequest: The secret is not the host's, or the host's is not ours.
        WireError, ConnectionResetError: What answers is no slot host, or is gone.
    """
    challenge = await control.expect(Challenge)
    nonce = os.urandom(_NONCE_BYTES)
    proof = secret.proof(b"client", challenge.nonce, nonce)
    await control.send(Answer(nonce, proof, client, machine.boot_id, machine.pid_namespace, process.pid, process.start))
    reply = await control.receive()
    if isinstance(reply, Failed):
        raise DataPlaneBadRequest(reply.text)
    if not isinstance(reply, Welcome):
        raise WireError(f"{type(reply).__name__} came where Welcome was expected")
    if not hmac.compare_digest(reply.proof, secret.proof(b"host", nonce, challenge.nonce)):
        raise DataPlaneBadRequest(f"what answers at this port does not know the secret: {_SAME}")
    control.open_up()
    return reply
