"""Control messages between the processes of a run, over TCP and without its devices.

Every process has a connection to the first one, which collects the values of an exchange and sends
all of them to each. So a message does not wait for what the devices compute. The kernel closes the
connections of a process that dies, so that the others notice at once.
"""

from __future__ import annotations

import collections
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_HELLO_S = 10.0  # for the first line of a connection
_RERUN = "Rerun the same command on every host to resume from the last checkpoint"
# A host that loses power closes nothing: after some 40 s without an answer it counts as dead.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class ControlError(RuntimeError):
  """The processes of a run could not exchange a message."""


class Address(NamedTuple):
  """Where the first process listens; JSON."""

  hosts: list[str]  # names and numbers of its host, to be tried in this order
  port: int
  token: str  # identifies the processes of this run


class _Connection:
  """Lines of JSON to and from one process; any thread may send."""

  def __init__(self, connected: socket.socket):
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEP_ALIVE.items():
      if hasattr(socket, name):  # Linux
        connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    self._socket, self._lines = connected, connected.makefile("rb")
    self._sending = threading.Lock()

  def send(self, *message: Any) -> None:
    """Sends a message; does nothing if the other process has ended, which `receive` notices."""
    line = json.dumps(message).encode() + b"\n"
    with self._sending, contextlib.suppress(OSError):
      self._socket.sendall(line)

  def receive(self) -> list[Any] | None:
    """The next message; None if there will be no more."""
    try:
      line = self._lines.readline()
    except OSError:
      return None
    return json.loads(line) if line.endswith(b"\n") else None


class _Exchanges:
  """Values of all processes by exchange; any thread may add to them.

  Attributes:
    phase: of the last exchange that this process began.
  """

  def __init__(self, count: int):
    """`count`: of all processes."""
    self.phase = "the start"
    self._count, self._number = count, 0
    self._changed = threading.Condition()  # guards `_said`
    self._said: dict[int, dict[int, tuple[str, Any]]] = collections.defaultdict(dict)

  def begin(self, phase: str) -> int:
    """The number of the next exchange."""
    self.phase, self._number = phase, self._number + 1
    return self._number

  def hear(self, number: int, said: Mapping[int, tuple[str, Any]]) -> None:
    """Adds (phase, value) by process to an exchange."""
    with self._changed:
      self._said[number].update(said)
      self._changed.notify_all()

  def wait(self, number: int, deadline_s: float) -> dict[int, tuple[str, Any]]:
    """(phase, value) of all processes, or of those that have come within the deadline."""
    with self._changed:
      self._changed.wait_for(lambda: len(self._said[number]) == self._count, deadline_s)
      return self._said.pop(number)


class Channel:
  """The connections of one process, and a thread for each that reads it."""

  def __init__(
    self,
    process: int,
    count: int,
    connections: Mapping[int, _Connection],
    *,
    on_request: Callable[[], None],
    on_loss: Callable[[str], None],
  ):
    """Starts to read.

    Args:
      process: number of this one.
      count: of all processes.
      connections: by process; of the first process to all others, of others to the first.
      on_request: called in a thread when another process has got a request for shutdown.
      on_loss: called in a thread with a message that names a process that has died or failed.
    """
    self.process, self.count = process, count
    self._connections = connections
    self._on_request, self._on_loss = on_request, on_loss
    self._exchanges = _Exchanges(count)
    self._left: set[int] = set()  # processes that have ended in order
    self._leaving = threading.Lock()  # guards `_left`
    for other, connection in connections.items():
      threading.Thread(
        target=self._read, args=(other, connection), name=f"control-{other}", daemon=True
      ).start()

  def exchange(self, value: Any, phase: str, deadline_s: float) -> list[Any]:
    """The values of all processes, in order; called by one thread, equally often on each.

    Args:
      value: a JSON value; floats are exchanged exactly.
      phase: what the run is doing, for messages; the same on all.
      deadline_s: seconds to wait for the others.
    Raises:
      ControlError: one did not call in time, or called in another phase; it is named.
    """
    number = self._exchanges.begin(phase)
    if self.process:
      self._connections[0].send("value", number, phase, value)
    else:
      self._exchanges.hear(number, {0: (phase, value)})
    heard = self._exchanges.wait(number, deadline_s)
    if silent := sorted(set(range(self.count)) - heard.keys() - {self.process}):
      raise ControlError(
        f"process {', '.join(map(str, silent))} of {self.count} did not reach {phase!r} within"
        f" {deadline_s:g} s; see what it printed. {_RERUN}"
      )
    said = [heard[process] for process in range(self.count)]
    for connection in self._connections.values() if not self.process else ():
      connection.send("values", number, said)
    if phases := {other: p for other, (p, _) in enumerate(said) if p != phase}:
      raise ControlError(
        f"process {self.process} of {self.count} is at {phase!r}, others are at {phases}: they do"
        f" not run the same program, or their configurations differ. {_RERUN}"
      )
    return [value for _, value in said]

  def request(self) -> None:
    """Sends all processes the request for shutdown that this one has got."""
    for connection in self._connections.values():
      connection.send("request")

  def leave(self, failure: str = "") -> None:
    """Announces that this process ends now, in order or with a failure that the others name."""
    with self._leaving:
      self._left |= self._connections.keys()
    for connection in self._connections.values():
      connection.send("leave", self.process, failure)

  def _read(self, other: int, connection: _Connection) -> None:
    """Runs in a thread: what one process says, until it has left."""
    while (message := connection.receive()) is not None:
      kind, *content = message
      if kind == "value":
        number, phase, value = content
        self._exchanges.hear(number, {other: (phase, value)})
      elif kind == "values":
        number, said = content
        self._exchanges.hear(number, dict(enumerate(map(tuple, said))))
      elif kind == "request":
        self._on_request()
        self._tell_others(other, "request")
      else:
        self._lost(other, *content)
    self._lost(other, other, "has died or cannot be reached")

  def _lost(self, other: int, process: int, failure: str) -> None:
    """A process has ended; `other` is the one that said so, or the process itself."""
    with self._leaving:
      known = bool({other, process} & self._left)
      self._left.add(process)
    if known or not failure:
      return
    self._tell_others(other, "leave", process, failure)
    self._on_loss(
      f"process {process} of {self.count} {failure}; process {self.process} was at"
      f" {self._exchanges.phase!r}. See what it printed. {_RERUN}"
    )

  def _tell_others(self, source: int, *message: Any) -> None:
    """Passes on what a process said; only the first is connected to others."""
    for other, connection in self._connections.items():
      if other != source:
        connection.send(*message)


class Server:
  """Where the first process waits for the connections of the others."""

  def __init__(self, count: int, hosts: Sequence[str] = ()):
    """Listens on a free port.

    Args:
      count: of the run's processes.
      hosts: further names by which the others may know this host, best first.
    """
    self._count = count
    self._socket = socket.create_server(("", 0), backlog=count)
    port, token = self._socket.getsockname()[1], secrets.token_hex(8)
    self.address = Address([*hosts, *_names()], port, token)

  def accept(self, deadline_s: float) -> dict[int, _Connection]:
    """The connections of all others, by process.

    Raises:
      ControlError: some did not come in time.
    """
    found: dict[int, _Connection] = {}
    deadline = time.monotonic() + deadline_s
    with self._socket:
      while len(found) < self._count - 1:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
          connected, _ = self._socket.accept()
        except OSError as error:
          absent = sorted(set(range(1, self._count)) - found.keys())
          raise ControlError(
            f"processes {absent} of {self._count} did not connect to process 0 at {self.address}"
            f" within {deadline_s:g} s ({error}): allow TCP connections between the hosts"
          ) from error
        other = _introduced(connected, self.address.token, 0)
        if other is None:
          connected.close()
        else:
          found[other] = _Connection(connected)
    return found


def connect(address: Address, process: int) -> _Connection:
  """The connection of a process to the first one.

  Raises:
    ControlError: it cannot be reached.
  """
  failures = []
  for host in dict.fromkeys(address.hosts):
    try:
      connected = socket.create_connection((host, address.port), _HELLO_S)
    except OSError as error:
      failures.append(f"{host}: {error}")
      continue
    if _introduced(connected, address.token, process) == 0:
      return _Connection(connected)
    connected.close()
    failures.append(f"{host}: another program uses the port")
  raise ControlError(
    f"process {process} cannot reach process 0 at port {address.port} ({'; '.join(failures)}):"
    " allow TCP connections between the hosts"
  )


def _introduced(connected: socket.socket, token: str, process: int) -> int | None:
  """Says which process this is; the number of the other one, None if it is none of this run."""
  connected.settimeout(_HELLO_S)
  line = b""
  with contextlib.suppress(OSError):
    connected.sendall(f"{token} {process}\n".encode())
    while not line.endswith(b"\n") and len(line) < 64 and (byte := connected.recv(1)):
      line += byte
  words = line.decode(errors="replace").split()
  ours = len(words) == 2 and words[0] == token and words[1].isdigit()
  return int(words[1]) if ours else None


def _names() -> list[str]:
  """Addresses of this host, best first; the last one serves where all processes share a host."""
  found = [socket.gethostname(), "127.0.0.1"]
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
    probe.connect(("192.0.2.1", 9))  # sends nothing: it asks which interface leads outside
    found.insert(0, probe.getsockname()[0])
  return found
