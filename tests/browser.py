"""Chromium without a window, driven through its DevTools protocol; nothing but tornado is needed."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
LIMIT = 60  # seconds after which something hangs
KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Home": 36}


class Browser:
    """One tab. It keeps what went wrong in `errors` and what was asked of a network in `requests`."""

    def __init__(self) -> None:
        assert CHROMIUM
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **quiet)
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket = self._await(self._connect())
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._await(asyncio.sleep(0.05))
        self._process.terminate()
        self._process.wait(LIMIT)
        self._loop.close()
        self._folder.cleanup()

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, LIMIT))

    async def _connect(self) -> WebSocketClientConnection:
        place = Path(self._folder.name) / "DevToolsActivePort"
        while not place.is_file() or len(place.read_text().split()) < 2:
            assert self._process.poll() is None, "the browser ended"
            await asyncio.sleep(0.05)
        port, path = place.read_text().split()
        # The browser's own socket; a session of its first tab follows.
        request = HTTPRequest(f"ws://127.0.0.1:{port}{path}", request_timeout=LIMIT)
        socket = await websocket_connect(request, max_message_size=2**28)
        self._session = ""
        self._socket = socket
        found = []
        while not found:
            targets = (await self._call("Target.getTargets", {}))["targetInfos"]
            found = [target["targetId"] for target in targets if target["type"] == "page"]
        asked = {"targetId": found[0], "flatten": True}
        self._session = (await self._call("Target.attachToTarget", asked))["sessionId"]
        return socket

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the protocol."""
        return self._await(self._call(method, arguments))

    async def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.write_message(json.dumps(message))
        while True:
            text = await self._socket.read_message()
            assert text is not None, "the browser hung up"
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(json.dumps(about["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> float:
        """Opens a file; returns the seconds until its script was done."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        begun = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset?.ready === '1'")
        return time.monotonic() - begun

    def wait(self, true: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + LIMIT
        while not self.evaluate(true):
            assert time.monotonic() < deadline, f"never: {true}; {self.errors}"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Moves the mouse, or clicks."""
        if kind == "move":
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            return
        for step in ("mousePressed", "mouseReleased"):
            about = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=step, **about)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Takes a picture of the page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
