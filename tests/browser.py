"""Debian's chromium, spoken to over a pipe in the protocol of its developer tools; nothing but the standard library."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")


class Browser:
    """A page in a browser without a window."""

    def __init__(self, folder: Path, page: Path):
        theirs, mine = os.pipe(), os.pipe()
        # The browser reads from descriptor 3 and writes to 4, which are perhaps those of these pipes.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], mine[1])]
        for end in (theirs[0], mine[1]):
            os.close(end)
        self._out, self._in, self._read, self._asked = theirs[1], mine[0], b"", 0
        # Without its sandbox, which wants rights that a container lacks: the page is our own.
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        command = f'exec {CHROMIUM} {options} --user-data-dir="$0" 3<&{ends[0]} 4>&{ends[1]}'
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(["bash", "-c", command, str(folder)], pass_fds=ends, **quiet)
        for end in ends:
            os.close(end)
        self._session: str | None = None
        try:
            self._show(page)
        except BaseException:
            self.__exit__()
            raise

    def _show(self, page: Path) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.navigate", url=page.as_uri())
        end = time.monotonic() + 60
        while not self.value("document.readyState === 'complete' && location.protocol === 'file:'"):
            assert time.monotonic() < end, f"{page} does not load"
            time.sleep(0.05)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for what it returns."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._asked:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], 60)[0], "the browser says nothing for a minute"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def value(self, script: str) -> Any:
        """What a line of JavaScript gives."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """In the middle of the element, where a person would."""
        found = f"document.querySelector({json.dumps(selector)})"
        script = f"(() => {{ {found}.scrollIntoView({{block: 'center'}}); const b = {found}.getBoundingClientRect();"
        x, y = self.value(f"{script} return [b.x + b.width / 2, b.y + b.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screen(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def scheme(self, name: str) -> None:
        """Prefer ``light`` or ``dark``."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])
