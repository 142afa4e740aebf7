import pytest

from asyncdp import DataPlaneUnavailable, build_data_plane_client
from asyncdp.settings.urls import without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
        ("unix://:hush@/run/valkey.sock", "unix://:***@/run/valkey.sock"),
        ("rediss://me:hu:s@h@host:1/0", "rediss://me:***@host:1/0"),
        ("redis://host:1?password=hush&db=1", "redis://host:1?password=***&db=1"),
        ("redis://me:hu/s#h?@host:1", "redis://me:***@host:1"),
        ("redis://m/e:hush@host:1", "redis://***@host:1"),
        ("redis://me@host:1", "redis://me@host:1"),
        ("me:hush@host:1", "***@host:1"),
    ],
)
def test_urls_are_shown_without_their_password(url: str, shown: str) -> None:
    """Whatever is in it."""
    assert without_password(url) == shown


@pytest.mark.anyio
async def test_an_address_of_another_backend_is_shown_without_its_password() -> None:
    """A config of UCXX of which only impl was changed: the error does not repeat the password of its directory."""
    config = {"enabled": True, "impl": "memory", "controller_address": "redis://me:hush@host:1/0"}
    async with build_data_plane_client(config, bootstrap=False) as client:
        with pytest.raises(
            DataPlaneUnavailable, match=r"no memory plane answers at redis://me:\*\*\*@host:1/0"
        ) as raised:
            await client.ping()
        assert "redis://me:***@host:1/0" in str(raised.value)
        assert "hush" not in str(raised.value)
