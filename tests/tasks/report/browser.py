"""A headless Chromium, spoken to through pipes by the DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from megaswift.tasks.system.readable import readable

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--no-first-run",
)
PATIENCE = 60.0  # seconds for an answer


class Browser:
    """A tab, and all that its console said."""

    def __init__(self, profile: Path):
        assert CHROMIUM
        (to_browser, self._output), (self._input, from_browser) = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3, and writes answers to 4.
        script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.console: list[str] = []  # messages and errors
        self.requests: list[str] = []  # addresses
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._input)
        os.close(self._output)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._output, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert readable([self._input], PATIENCE), "Chromium does not answer"
            self._buffer += os.read(self._input, 2**20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(str([each.get("value") for each in parameters["args"]]))
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
        return message

    def open(self, file: Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> float:
        """Open a page. Return the seconds until its charts are drawn."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        start = time.perf_counter()
        self("Page.navigate", url=file.as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")
        self.frames()
        return time.perf_counter() - start

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, as JSON has it."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def frames(self) -> None:
        """Wait until two frames are drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def mouse(self, kind: str, x: float, y: float, **parameters: Any) -> None:
        self("Input.dispatchMouseEvent", type=kind, x=x, y=y, **parameters)

    def screenshot(self, *, whole: bool = True) -> bytes:
        return base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self("Page.printToPDF", printBackground=False)["data"])
