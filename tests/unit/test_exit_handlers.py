"""The end of a forked child whose C libraries wait for threads of the parent."""

import subprocess
import sys
from pathlib import Path

FORKS = Path(__file__).parents[2] / "asyncdp" / "process" / "forks.py"
ENDS = """
import atexit, ctypes, os, runpy, sys
libc = ctypes.CDLL(None)
libc.on_exit(libc.pause, None)  # as the handler of a library does that waits for a thread which is not there
atexit.register(print, "as usual", flush=True)
runpy.run_path(sys.argv[1])["skip_exit_handlers"]()
sys.exit(3)
"""


def test_exit_handlers_of_c_can_be_left_out() -> None:
    """U3: the process ends although a handler would wait for ever; exit code and Python's own handlers are as usual."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(FORKS)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (3, "as usual\n"), done.stderr
