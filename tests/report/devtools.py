"""A headless Chromium, driven through its DevTools protocol over a pipe: no driver, no package, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
]  # fmt: skip
PATIENCE = 60  # seconds; machines may be busy


class Browser:
    """One page at a time; what it says on its console and what it asks the network for is kept."""

    def __init__(self, folder: Path) -> None:
        (theirs_in, self.out), (self.into, theirs_out) = os.pipe(), os.pipe()
        command = " ".join(["exec", shutil.which("chromium") or "chromium", *FLAGS, f"--user-data-dir='{folder}'"])
        self.process = subprocess.Popen(
            ["bash", "-c", f"{command} about:blank 3<&{theirs_in} 4>&{theirs_out}"], pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.number, self.session = b"", 0, None
        self.console: list[str] = []
        self.requests: dict[str, str] = {}
        self.dialogs: list[str] = []
        self.events: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        try:
            self.session = None
            self.ask("Browser.close")
        except (OSError, RuntimeError, TimeoutError):
            self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self.out)
        os.close(self.into)

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the protocol, and wait for its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": given}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self.read(until)
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def read(self, until: float) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self.buffer:
            if not select.select([self.into], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("chromium does not answer")
            piece = os.read(self.into, 1 << 20)
            if not piece:
                raise RuntimeError("chromium has gone")
            self.buffer += piece
        one, self.buffer = self.buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(one)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, event: str, given: dict[str, Any]) -> None:
        self.events.append(event)
        if event == "Runtime.consoleAPICalled":
            self.console.append(str([one.get("value") for one in given["args"]]))
        elif event == "Runtime.exceptionThrown":
            self.console.append(str(given["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.console.append(given["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests[given["requestId"]] = given["request"]["url"]
        elif event == "Network.loadingFailed" and given.get("blockedReason") == "csp":  # asked for, and never sent
            self.requests.pop(given["requestId"], None)
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(given["message"])
            self.number += 1
            answer = {"id": self.number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self.out, json.dumps({**answer, "sessionId": self.session}).encode() + b"\0")

    def open(self, path: Path, *, wide: int = 1280, high: int = 720, scripts: bool = True, media: str = "",
             phone: bool = False, **features: str) -> Browser:  # fmt: skip
        """Show a file; features as in `prefers_color_scheme="dark"`."""
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.ask("Emulation.setDeviceMetricsOverride", width=wide, height=high, deviceScaleFactor=1, mobile=phone)
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.ask("Emulation.setEmulatedMedia", media=media, features=named)
        for kept in (self.console, self.requests, self.dialogs, self.events):
            kept.clear()
        self.ask("Page.navigate", url=path.as_uri())
        until = time.monotonic() + PATIENCE
        while "Page.loadEventFired" not in self.events:
            self.read(until)
        return self

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; also where the page's own scripts are off."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def outside(self, own: Path) -> list[str]:
        """What was asked for besides the page itself."""
        return [url for url in self.requests.values() if url != own.as_uri()]

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def pdf(self) -> bytes:
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=True)["data"])
