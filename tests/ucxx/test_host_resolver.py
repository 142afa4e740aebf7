"""Where a client thinks that hosts are."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")

from asyncdp.calls.slots import HostRef
from asyncdp.config import UcxxSettings
from asyncdp.errors import StaleSlotError
from asyncdp.transports.ucxx.client.host_resolver import HostAddress, HostResolver
from asyncdp.transports.ucxx.directory import HostInfo
from asyncdp.transports.ucxx.payload.objects import MsgpackCodec
from asyncdp.transports.ucxx.wire.handshake import Secret

pytestmark = pytest.mark.anyio


class Told:
    """Stands for the directory."""

    def __init__(self, *hosts: HostInfo, secret: str | None = None) -> None:
        self.answer = hosts
        self.secret = secret
        self.asked = 0

    async def hosts(self) -> tuple[HostInfo, ...]:
        """List."""
        self.asked += 1
        return self.answer

    async def shared_secret(self) -> str | None:
        """Tell."""
        return self.secret


def resolver(told: Told, secret: str = "known") -> HostResolver:
    """Made of it."""
    directory: Any = told
    return HostResolver(directory, UcxxSettings(), Secret(secret), MsgpackCodec())


def test_the_ports_of_a_former_life_are_taken_for_those_of_now() -> None:
    """A reference that was located before a host started again names its old ports."""
    place = HostAddress(HostInfo("h", 1, ports=(7, 8)))
    assert place.port(8) == 8
    assert place.port(None) is None
    assert {place.port(old) for old in (10, 11, 12)} == {7, 8}
    assert HostAddress(HostInfo("h", 1)).port(3) == 3


async def test_a_host_is_looked_up_once_until_it_does_not_answer() -> None:
    """Reads do not go to the directory for it; forgotten, it is looked up anew."""
    told = Told(HostInfo("h", 1, ports=(7,)))
    here = resolver(told)
    for _ in range(3):
        assert (await here.find(HostRef("h", 1, ()))).info.ports == (7,)
    assert told.asked == 1
    told.answer = (HostInfo("h", 1, ports=(9,)),)
    here.forget(HostRef("h", 1, ()))
    assert (await here.find(HostRef("h", 1, ()))).info.ports == (9,)


async def test_another_life_of_a_host_makes_its_old_references_stale() -> None:
    """One that is not registered at all may yet come back."""
    here = resolver(Told(HostInfo("h", 2)))
    with pytest.raises(StaleSlotError):
        await here.find(HostRef("h", 1, ()))
    assert await here.find(HostRef("g", 1, ())) is None


async def test_a_secret_is_asked_for_only_where_none_is_known() -> None:
    """The directory of an embedded plane tells it."""
    told = Told(HostInfo("h", 1), secret="told")
    for known, expected in (("", "told"), ("known", "known")):
        here = resolver(told, known)
        await here.find(HostRef("h", 1, ()))
        proofs = {secret.proof(b"c", b"1", b"2") for secret in (here._secret, Secret(expected))}
        assert len(proofs) == 1


def test_nothing_is_loaded_before_it_is_needed() -> None:
    """An engine costs half a second and, on a host's own machine, is never used."""
    from asyncdp.transports.ucxx.client.host_resolver import _EngineOnDemand

    made: list[Any] = []
    engine = _EngineOnDemand("lo")
    assert engine.made is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "asyncdp.transports.ucxx.client.host_resolver.Engine",
            lambda devices: made.append(devices) or SimpleNamespace(polls=7),
        )
        assert engine.next_tag() != engine.next_tag()
        assert made == []
        assert engine.polls == 7
        assert engine.polls == 7
    assert made == ["lo"]


async def test_the_secret_is_asked_for_whoever_told_where_hosts_are() -> None:
    """A ping lists hosts as well; the first request after it knows the secret all the same."""
    told = Told(HostInfo("h", 1, ports=(7,)), secret="told")
    made = resolver(told, secret="")
    made.know(told.answer)
    assert await made.find(HostRef("h", 1, ())) is not None
    assert made._secret.proof(b"a", b"b", b"c") == Secret("told").proof(b"a", b"b", b"c")
