"""Headless Chromium, driven by its own protocol over two pipes: no driver, no server, nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PROGRAM", "Page", "chromium"]

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
#: Seconds that a page may take to show what is waited for.
PATIENCE_S = 60.0


@contextmanager
def chromium() -> Iterator[Page]:
    """Run Chromium with one page of nothing; it has no sandbox, so it is for pages of our own only."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="asyncdp-chromium-", ignore_cleanup_errors=True) as folder:
        words = (PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        words = (*words, "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}")
        browser = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *map(str, words)],
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "HOME": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            with os.fdopen(ours_in, "rb") as answers, os.fdopen(ours_out, "wb", buffering=0) as asked:
                page = Page(answers, asked)
                yield page
                page.end()
                browser.wait(PATIENCE_S)
        finally:
            browser.kill()
            browser.wait()


class Page:
    """One page of a browser.

    Args:
        answers, asked: Pipes from and to the browser.
    """

    def __init__(self, answers: Any, asked: Any) -> None:
        self._answers = answers
        self._asked = asked
        self._number = 0
        self._session = ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str, width: int, *, scale: float = 1.0, until: str = "true") -> None:
        """Open a page in a window so many CSS pixels wide, and wait until a JavaScript expression is true."""
        size = {"width": width, "height": 800, "deviceScaleFactor": scale, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Page.navigate", url=url)
        end = time.monotonic() + PATIENCE_S
        while self.value(f'document.readyState == "complete" && Boolean({until})') is not True:
            if time.monotonic() > end:
                raise TimeoutError(f"{url} does not show: {until}")
            time.sleep(0.1)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; None if it raises."""
        return self._ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, of: str = "document.documentElement") -> bytes:
        """Return a PNG of an element, however tall it is."""
        at = json.loads(self.value(f"JSON.stringify(({of}).getBoundingClientRect())"))
        clip = {name: at[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
        return base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"])

    def end(self) -> None:
        """Tell the browser to end."""
        self._session = ""
        self._ask("Browser.close")

    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        question = {"id": self._number, "method": method, "params": params}
        if self._session:
            question["sessionId"] = self._session
        self._asked.write(json.dumps(question).encode() + b"\0")
        while True:
            answer = json.loads(self._next())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self) -> bytes:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            text += byte
        return bytes(text)
