"""A headless Chromium, driven through the pipes of its DevTools."""

import base64
import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import time

CHROMIUM = os.environ.get("CHROMIUM", "")
TIMEOUT_S = 30.0
_FLAGS = (
  *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
  *("--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank"),
)


class Browser:
  """One page of a browser."""

  def __init__(self):
    with contextlib.ExitStack() as stack:
      self._folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
      to_read, self._out = os.pipe()
      self._in, to_write = os.pipe()
      # The browser reads its commands from descriptor 3 and writes answers to 4.
      redirected = f'exec {shlex.quote(CHROMIUM)} "$@" 3<&{to_read} 4>&{to_write}'
      command = ["bash", "-c", redirected, "-", f"--user-data-dir={self._folder}", *_FLAGS]
      self._process = subprocess.Popen(
        command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
      )
      os.close(to_read)
      os.close(to_write)
      self._buffer, self._number, self.errors = b"", 0, []
      target = self.call("Target.createTarget", session=None, url="about:blank")["targetId"]
      self._session = None
      attached = self.call("Target.attachToTarget", session=None, targetId=target, flatten=True)
      self._session = attached["sessionId"]
      for domain in ("Page", "Runtime", "Log"):
        self.call(f"{domain}.enable")
      self._stack = stack.pop_all()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._process.terminate()
    self._process.wait(TIMEOUT_S)
    os.close(self._in)
    os.close(self._out)
    self._stack.close()

  def call(self, method, session="page", **parameters):
    """The result of a method of DevTools; errors of the page are kept in `errors`."""
    self._number += 1
    message = {"id": self._number, "method": method, "params": parameters}
    if session:
      message["sessionId"] = self._session
    os.write(self._out, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._receive()
      if answer.get("method") == "Runtime.exceptionThrown":
        self.errors.append(answer["params"]["exceptionDetails"])
      if answer.get("method") == "Log.entryAdded":
        self.errors.append(answer["params"]["entry"])
      if answer.get("id") == self._number:
        if "error" in answer:
          raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

  def _receive(self):
    while b"\0" not in self._buffer:
      data = os.read(self._in, 2**20)
      if not data:
        raise RuntimeError("the browser has ended")
      self._buffer += data
    line, _, self._buffer = self._buffer.partition(b"\0")
    return json.loads(line)

  def run(self, script):
    """The value of an expression in the page; awaits a promise."""
    found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
    if "exceptionDetails" in found:
      raise RuntimeError(f"{script}: {found['exceptionDetails']}")
    return found["result"].get("value")

  def wait(self, condition):
    """Waits until an expression is true."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
      if self.run(f"Boolean({condition})"):
        return
      time.sleep(0.02)
    raise TimeoutError(f"{condition} stays false: {self.run('document.body.innerText')[:500]}")

  def open(self, url):
    """Opens a page and waits until it is drawn; returns the seconds that took."""
    began = time.monotonic()
    self.call("Page.navigate", url=url)
    self.wait("document.getElementById('main')?.dataset.drawn !== undefined")
    return time.monotonic() - began

  def go(self, place):
    """Goes to a place of the page, such as #batch/0/3."""
    self.run(f"location.hash = {place!r}")
    self.wait(f"document.getElementById('main').dataset.drawn === {place!r}")

  def click(self, selector):
    """Clicks into the middle of an element, as a person does."""
    self.wait(f"document.querySelector({selector!r}) !== null")
    x, y = self.run(
      f"(() => {{ const e = document.querySelector({selector!r});"
      " e.scrollIntoView({block: 'center'});"
      " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    for kind in ("mousePressed", "mouseReleased"):
      self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

  def choose(self, label, value):
    """Chooses an option of a select by the select's label."""
    self.run(
      f"(() => {{ const e = document.querySelector('select[aria-label={json.dumps(label)}]');"
      f" e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})()"
    )

  def press(self, key):
    """Presses a key."""
    text = key if len(key) == 1 else ""
    self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
    self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

  def resize(self, width, height, *, dark=False, phone=False):
    """Sets the size of the view, the theme, and whether it is a phone's."""
    self.call(
      "Emulation.setDeviceMetricsOverride",
      width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone,
    )  # fmt: skip
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    self.call("Emulation.setEmulatedMedia", features=theme)

  def picture(self, path):
    """Writes a PNG of what is in view."""
    time.sleep(0.3)  # until what came into view is drawn
    data = self.call("Page.captureScreenshot", format="png")["data"]
    path.write_bytes(base64.b64decode(data))
