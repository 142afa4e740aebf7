"""Takes the pictures of docs/operations.md: ``asyncdp top`` beside a demo of processes, some of which are killed.

``make pictures``, or ``python -m tests.docs.pictures FOLDER``: needs tmux and chromium (apt-get install tmux chromium
fonts-dejavu-core) and the extras ucxx and embedded. The demo kills a rollout worker, a port and a slot host, which it
starts again; the other slot host is killed here, and stays away.
"""

# ruff: noqa: T201 - it says what it does
from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cli.chromium import PROGRAM, Page, chromium

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
ASYNCDP = (sys.executable, "-m", "asyncdp.cli.main")
#: Columns and lines of the terminals; width in CSS pixels of the pages.
TERMINALS, PAGES = {"top-80": (80, 36), "top-120": (120, 40)}, {"top-page": 1280, "top-phone": 390}
#: Seconds of the demo; and until something that is waited for has to be seen.
DEMO_S, PATIENCE_S = 150, 240.0
#: Trainer, controller and two rollout workers.
CLIENTS = 4
#: In a namespace with only loopback, where root runs it, since a UCX listener binds everywhere.
INSIDE = "ASYNCDP_PICTURES_INSIDE"
UNSHARED = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
SHEET = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; background: {background}; }}
pre {{ display: inline-block; margin: 0; padding: 10px; font: 14px/1.25 "DejaVu Sans Mono", monospace;
color: {foreground}; background: {background}; }}</style><pre>{code}</pre>"""


def main(folder: Path = PICTURES) -> None:
    """Take all pictures into a folder."""
    for program in ("tmux", "chromium"):
        if shutil.which(program) is None and not (program == "chromium" and PROGRAM):
            raise SystemExit(f"pictures need {program}: apt-get install {program}")
    if os.geteuid() == 0 and INSIDE not in os.environ:
        words = (*UNSHARED, sys.executable, "-m", "tests.docs.pictures", str(folder))
        raise SystemExit(subprocess.run(words, env={**os.environ, INSIDE: "1"}, check=False).returncode)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncdp-pictures-")))
        config = own / "plane.json"
        demo = ("demo", "--transport", "ucxx", "--chaos", "--seconds", str(DEMO_S), "--config", str(config))
        running = stack.enter_context(_running(*ASYNCDP, *demo))
        _until(config.exists)
        served = (*ASYNCDP, "top", "--web", "--port", "0", "--config", str(config))
        web = stack.enter_context(_running(*served, heard=True))
        assert web.stdout is not None
        url = web.stdout.readline().split()[0]
        terminals = {name: stack.enter_context(Terminal(own / name, *TERMINALS[name], config)) for name in TERMINALS}
        page = stack.enter_context(chromium())
        _until(lambda: len(_seen(url)["clients"]) == CLIENTS and _seen(url)["ops"])
        print(f"killed for good: slot host, process {_kill_last_host(running.pid)}", flush=True)
        _until(lambda: any("does not answer" in line for line in _seen(url)["wrong"]))
        time.sleep(3)  # both views look every two seconds
        for name, terminal in terminals.items():
            shown = own / f"{name}.html"
            shown.write_text(terminal.as_html())
            page.open(shown.as_uri(), 1600)
            _write(folder / f"{name}.png", page.picture('document.querySelector("pre")'))
        for name, width in PAGES.items():
            _write(folder / f"{name}.png", _of_page(page, url, width))


def _of_page(page: Page, url: str, width: int) -> bytes:
    page.open(url, width, until='document.querySelector("table")')
    return page.picture("document.documentElement")


class Terminal:
    """``asyncdp top`` in a terminal of tmux, on a server of its own."""

    def __init__(self, socket: Path, columns: int, lines: int, config: Path) -> None:
        self._tmux = ("tmux", "-S", str(socket), "-f", "/dev/null")
        self._size, self._config = (columns, lines), config

    def __enter__(self) -> Self:
        size = ("-x", str(self._size[0]), "-y", str(self._size[1]))
        command = (*ASYNCDP, "top", "--config", str(self._config))
        subprocess.run([*self._tmux, "new-session", "-d", *size, *command], check=True)
        subprocess.run([*self._tmux, "set-option", "-g", "status", "off"], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=True)

    def as_html(self) -> str:
        """Return what the terminal shows, with its colours."""
        from rich.console import Console
        from rich.terminal_theme import MONOKAI
        from rich.text import Text

        shown = subprocess.run([*self._tmux, "capture-pane", "-p", "-e"], check=True, capture_output=True, text=True)
        out = Console(record=True, width=self._size[0], file=io.StringIO(), force_terminal=True)
        out.print(Text.from_ansi(shown.stdout.rstrip()))
        return out.export_html(theme=MONOKAI, code_format=SHEET, inline_styles=True)


def _kill_last_host(demo: int) -> int:
    """Kill the slot host that the demo leaves alone; return its process id."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    (pid,) = (
        child.pid
        for child in psutil.Process(demo).children(recursive=True)
        if '"host_id":"host-1"' in "".join(child.cmdline()).replace(" ", "")
    )
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def _seen(url: str) -> Any:
    with urllib.request.urlopen(f"{url}state.json", timeout=PATIENCE_S) as got:
        return json.load(got)


def _until(true: Any) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the demo did not come to what is to be shown")
        time.sleep(0.5)
    return True


@contextmanager
def _running(*words: str, heard: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a process, which is ended with the block, in order if it can; what it prints may be heard."""
    out = subprocess.PIPE if heard else None
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _write(file: Path, png: bytes) -> None:
    """Write a picture in few colours: text needs no more, and is then a third of the size."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as whole:
        whole.convert("RGB").quantize(48, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size >> 10} KiB", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
