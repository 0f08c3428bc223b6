"""Browser: headless Chromium through the DevTools protocol over pipes, without a driver or a library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
CHROMIUM = shutil.which("chromium")
# A promise of whether a condition holds, which is checked at each change of the document.
_WAIT = """new Promise((resolve) => {
  const check = () => { try { if (%(condition)s) resolve(true); } catch {} };
  const everything = { subtree: true, childList: true, attributes: true, characterData: true };
  new MutationObserver(check).observe(document, everything);
  setTimeout(() => resolve(false), %(timeout_ms)d);
  check();
})"""


class Browser:
    """One page of a running Chromium.

    Attributes:
        console: messages of errors and of the console.
    """

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: dict[str, str] = {}
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        call_id = next(self._ids)
        message = {"id": call_id, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while (reply := self._next_message(deadline)).get("id") != call_id:
            if reply.get("method") in (
                "Runtime.exceptionThrown",
                "Log.entryAdded",
                "Runtime.consoleAPICalled",
            ):
                self.console.append(json.dumps(reply["params"]))
        assert "error" not in reply, f"{method}: {reply['error']}"
        return dict(reply["result"])

    def open(self, url: str, *, width: int = 1240, height: int = 1000, dark: bool = False) -> None:
        """Load a page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise its result."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, which the page checks whenever it changes."""
        met = self.evaluate(_WAIT % {"condition": condition, "timeout_ms": 500 * DEADLINE_S})
        assert met, f"not within {DEADLINE_S / 2:g} s: {condition}; console: {self.console}"

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next_message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"Chromium did not answer in {DEADLINE_S:g} s"
            chunk = os.read(self._replies, 1 << 16)
            assert chunk, "Chromium has ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run Chromium with a profile of its own."""
    assert CHROMIUM is not None, "chromium is not installed"
    (from_here, commands), (replies, to_here) = os.pipe(), os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    command = [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # Chromium reads commands from descriptor 3 and writes replies to 4.
    moved = f'exec 3<&{from_here} 4>&{to_here}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", moved, "chromium", *command], pass_fds=(from_here, to_here), stderr=subprocess.DEVNULL
    )
    os.close(from_here)
    os.close(to_here)
    try:
        browser = Browser(commands, replies)
        yield browser
        with suppress(AssertionError):
            browser.call("Browser.close")
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(replies)
