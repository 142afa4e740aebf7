"""The parent of forked children: it has imported everything, UCX too, and used nothing.

``python -m tests.ucxx.forking`` reads jobs from standard input, one JSON a line: ``{"job": 1, "call":
"package.module:function", "told": {...}}``. Each is an async function in a child of its own. It writes what children
say, when they are stopped, and how they ended: ``{"job": 1, "said": ...}``, ``{"job": 1, "stopped": true}``,
``{"job": 1, "ended": 0}`` (a negative number is a signal). It ends when its input does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
from typing import Any, Final, NoReturn

__all__ = ["serve"]

#: What children need, imported before they are forked: a child begins in milliseconds.
IMPORTED: Final = (
    "asyncdp.factory",
    "asyncdp.transports.ucxx.transport",
    "asyncdp.transports.ucxx.host.main",
    "asyncdp.transports.ucxx.client.directory_entry",
    "redis.asyncio",
    "tests.chaos.ucxx_rows",
)


def _tell(**told: Any) -> None:
    os.write(1, (json.dumps(told) + "\n").encode())


def _run(job: dict[str, Any]) -> NoReturn:
    """Be the child: run the job, and exit as any interpreter does."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.set_wakeup_fd(-1)
    module, _, name = job["call"].partition(":")
    work = getattr(importlib.import_module(module), name)
    asyncio.run(work(job["told"], lambda said: _tell(job=job["job"], said=said)))
    sys.exit(0)


def _reap(jobs: dict[int, int]) -> None:
    """Tell which children were stopped, or have ended."""
    while jobs:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if not pid:
            return
        if os.WIFSTOPPED(status):
            _tell(job=jobs[pid], stopped=True)
        else:
            _tell(job=jobs.pop(pid), ended=os.waitstatus_to_exitcode(status))


def serve() -> None:
    """Fork a child per job until the end of input; then kill those that still run."""
    for name in IMPORTED:
        importlib.import_module(name)
    if importlib.util.find_spec("ucxx") is not None:
        importlib.import_module("asyncdp.transports.ucxx.wire.engine")._load()
    faulthandler.enable()
    gc.collect()
    gc.freeze()  # else each child's end takes seconds: the collector looks at all of torch
    jobs: dict[int, int] = {}
    _tell(ready=True)
    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            came = os.read(0, 1 << 16)
            if not came:
                break
            *lines, pending = (pending + came).split(b"\n")
            for line in lines:
                job = json.loads(line)
                pid = os.fork()
                if not pid:
                    _run(job)
                jobs[pid] = job["job"]
                _tell(job=job["job"], pid=pid)
        _reap(jobs)
    for pid in jobs:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()
