"""An earlier release under the module names of this one: ``python -m tests.attack.earlier MODULE ARGUMENT ...``.

``make attack ARGS="--against PATH"`` runs by this what it attacks a release with whose modules had other names.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import runpy
import sys
from typing import Final

__all__ = ["program"]

#: Names of now and then; what a release has under neither is left out.
THEN: Final = {
    "asyncdp.calls.slots": "asyncdp.slots",
    "asyncdp.cli.main": "asyncdp.cli",
    "asyncdp.transports.ucxx.client.connection_pool": "asyncdp.transports.ucxx.pool",
    "asyncdp.transports.ucxx.host.main": "asyncdp.transports.ucxx.host",
    "asyncdp.transports.ucxx.payload.objects": "asyncdp.transports.ucxx.objects",
    "asyncdp.transports.ucxx.slots.arena": "asyncdp.transports.ucxx.arena",
    "asyncdp.transports.ucxx.slots.writer_process": "asyncdp.transports.ucxx.process",
    "asyncdp.transports.ucxx.wire.control": "asyncdp.transports.ucxx.control",
    "asyncdp.transports.ucxx.wire.engine": "asyncdp.transports.ucxx.engine",
    "asyncdp.transports.ucxx.wire.handshake": "asyncdp.transports.ucxx.handshake",
    "asyncdp.transports.ucxx.wire.messages": "asyncdp.transports.ucxx.wire",
}

#: Names of functions now and then, by the module that has them.
FUNCTIONS_THEN: Final = {"asyncdp.transports.ucxx.wire.handshake": {"authenticate": "knock"}}


def _name_of(name: str) -> str:
    """Return the name that a module has in the release that comes first on the path."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # what is a package now was a module then
        spec = None
    return THEN[name] if spec is None else spec.name


def program(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, of the release that comes first on the path."""
    if name.startswith("asyncdp."):
        return [sys.executable, "-m", _name_of(name), *arguments]
    return [sys.executable, "-m", "tests.attack.earlier", name, *arguments]


def main(name: str) -> None:
    """Run a module of the tests, for which the modules of an earlier release have the names of now."""
    for now in THEN:
        if (then := _name_of(now)) != now:
            with contextlib.suppress(ModuleNotFoundError):
                sys.modules[now] = module = importlib.import_module(then)
                for name_now, name_then in FUNCTIONS_THEN.get(now, {}).items():
                    if hasattr(module, name_then):
                        setattr(module, name_now, getattr(module, name_then))
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    del sys.argv[0]
    main(sys.argv[0])
