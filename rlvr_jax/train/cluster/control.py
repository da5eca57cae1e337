"""Control messages between the processes of a run, over TCP instead of the devices' network.

Every process has a connection to the first process, which collects the values of an exchange and
sends all of them to each process. So a message does not wait for compiled programs that the devices
still run. The kernel closes the connections of a process that dies, so that the other processes
notice at once.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlvr_jax.storage.files import JSON

_HANDSHAKE_S = 10.0  # seconds to wait for the first line of a connection
_RERUN = "Rerun the same command on every host to resume from the last checkpoint"
# A host that loses power does not close its connections: it counts as dead after 40 s of silence.
# The last of these, in ms, is for a connection with a message on its way: it gets no probes.
_KEEP_ALIVE = {
  **{"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3},
  "TCP_USER_TIMEOUT": 40_000,
}


class ControlError(RuntimeError):
  """The processes of a run could not exchange a message."""


class Address(NamedTuple):
  """Address at which the first process listens; JSON."""

  hosts: list[str]  # names and IP addresses of that process's host, to be tried in this order
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

  def send(self, *message: JSON) -> None:
    """Sends a message; does nothing if the other process has ended, which `receive` reports."""
    line = json.dumps(message).encode() + b"\n"
    with self._sending, contextlib.suppress(OSError):
      self._socket.sendall(line)

  def receive(self) -> list[Any] | None:
    """Waits for the next message; None if the connection is closed."""
    try:
      line = self._lines.readline()
    except OSError:
      return None
    return json.loads(line) if line.endswith(b"\n") else None


class _Ended:
  """A set of the processes that are known to have ended; any thread may add processes."""

  def __init__(self) -> None:
    self._lock, self._processes = threading.Lock(), set[int]()

  def add(self, *processes: int, unless: int | None = None) -> bool:
    """Adds the processes; returns whether one of them, or `unless`, was already in the set."""
    with self._lock:
      known = not self._processes.isdisjoint({*processes, unless})
      self._processes |= {*processes}
    return known


class Channel:
  """The connections of a process to other processes; each connection has a thread that reads it.

  In a run of one process, the channel has no connections.
  """

  def __init__(
    self,
    process: int,
    count: int,
    connections: Mapping[int, _Connection],
    *,
    on_request: Callable[[], None] = lambda: None,
    on_loss: Callable[[str], None] = lambda message: None,
  ):
    """Starts the threads.

    Args:
      process: index of this process.
      count: number of processes.
      connections: connections by process: the first process has one to each other process, and the
        other processes have one to the first process.
      on_request: called in a thread when another process requests shutdown.
      on_loss: called in a thread with a message that names a process that has died or failed.
    """
    self.process, self.count = process, count
    self._phase = "the start"  # the phase of the last exchange that this process began
    self._connections = connections
    # Messages by sender: each maps processes to their (phase, value). A process sends its own pair
    # to the first process, which then sends the pairs of all processes to each process.
    self._arrived: dict[int, queue.SimpleQueue[dict[int, tuple[str, JSON]]]] = {
      other: queue.SimpleQueue() for other in connections
    }
    self._on_request, self._on_loss = on_request, on_loss
    self._ended = _Ended()
    for other, connection in connections.items():
      threading.Thread(
        target=self._read, args=(other, connection), name=f"control-{other}", daemon=True
      ).start()

  def exchange(self, value: JSON, phase: str, deadline_s: float) -> list[Any]:
    """Sends a value to all processes, and returns the values of all processes.

    One thread of each process calls this; all processes must call it equally often.

    Args:
      value: a JSON value; floats are exchanged exactly.
      phase: what the run is doing, for messages; it must be the same on all processes.
      deadline_s: seconds to wait for the other processes.
    Returns:
      The values of all processes, in order.
    Raises:
      ControlError: a process did not call in time, or called in another phase; the message names
        that process.
    """
    self._phase, deadline = phase, time.monotonic() + deadline_s
    found = {self.process: (phase, value)}
    if self.process:
      self._connections[0].send("values", [[self.process, phase, value]])
    for arrived in self._arrived.values():
      with contextlib.suppress(queue.Empty):
        found |= arrived.get(timeout=max(deadline - time.monotonic(), 0))
    if missing := sorted(set(range(self.count)) - found.keys()):
      raise ControlError(
        f"process {', '.join(map(str, missing))} of {self.count} did not reach {phase!r} within"
        f" {deadline_s:g} s; see the output of each missing process. {_RERUN}"
      )
    if not self.process:
      for connection in self._connections.values():
        connection.send("values", [[other, *entry] for other, entry in found.items()])
    if phases := {other: p for other, (p, _) in sorted(found.items()) if p != phase}:
      raise ControlError(
        f"process {self.process} of {self.count} is at {phase!r}, others are at {phases}: they do"
        f" not run the same program, or their configurations differ. {_RERUN}"
      )
    return [found[other][1] for other in range(self.count)]

  def request_shutdown(self) -> None:
    """Passes a shutdown request on to all processes."""
    for connection in self._connections.values():
      connection.send("request")

  def leave(self, failure: str = "") -> None:
    """Announces the end of this process; if it failed, the other processes report `failure`."""
    self._ended.add(*self._connections)
    for connection in self._connections.values():
      connection.send("leave", self.process, failure)

  def _read(self, other: int, connection: _Connection) -> None:
    """Handles the messages from one process until its connection closes; runs in a thread."""
    while (message := connection.receive()) is not None:
      kind, *content = message
      if kind == "values":
        (entries,) = content
        self._arrived[other].put({process: (phase, value) for process, phase, value in entries})
      elif kind == "request":
        self._on_request()
        self._forward(other, "request")
      else:
        self._handle_end(other, *content)
    self._handle_end(other, other, "has died or cannot be reached")

  def _handle_end(self, other: int, process: int, failure: str) -> None:
    """Handles the end of `process`, reported by `other`: by the first process or by `process`."""
    if self._ended.add(process, unless=other) or not failure:
      return
    self._forward(other, "leave", process, failure)
    self._on_loss(
      f"process {process} of {self.count} {failure}; process {self.process} was at"
      f" {self._phase!r}. See the output of the lost process. {_RERUN}"
    )

  def _forward(self, source: int, *message: JSON) -> None:
    """Forwards a message from `source` to all other processes; in the first process only."""
    for other, connection in self._connections.items():
      if other != source:
        connection.send(*message)


class Server:
  """Accepts the connections of all other processes; used in the first process."""

  def __init__(self, count: int, hosts: Sequence[str] = ()):
    """Listens on a free port.

    Args:
      count: number of processes of the run.
      hosts: further names by which the other processes may reach this host, best first.
    """
    self._count = count
    self._socket = socket.create_server(("", 0), backlog=count)
    port, token = self._socket.getsockname()[1], secrets.token_hex(8)
    self.address = Address([*hosts, *_host_addresses()], port, token)

  def accept(self, deadline_s: float) -> dict[int, _Connection]:
    """Accepts the connections of all other processes; returns them by process.

    Raises:
      ControlError: some processes did not connect in time.
    """
    connections: dict[int, _Connection] = {}
    deadline = time.monotonic() + deadline_s
    with self._socket:
      while len(connections) < self._count - 1:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
          connected, _ = self._socket.accept()
        except OSError as error:
          absent = sorted(set(range(1, self._count)) - connections.keys())
          raise ControlError(
            f"processes {absent} of {self._count} did not connect to process 0 at {self.address}"
            f" within {deadline_s:g} s ({error}): allow TCP connections between the hosts"
          ) from error
        other = _shake_hands(connected, self.address.token, 0)
        if other is None:
          connected.close()
        else:
          connections[other] = _Connection(connected)
    return connections


def connect(address: Address, process: int) -> _Connection:
  """Connects this process to the first process.

  Raises:
    ControlError: the first process cannot be reached.
  """
  failures = []
  for host in dict.fromkeys(address.hosts):
    try:
      connected = socket.create_connection((host, address.port), _HANDSHAKE_S)
    except OSError as error:
      failures.append(f"{host}: {error}")
      continue
    if _shake_hands(connected, address.token, process) == 0:
      return _Connection(connected)
    connected.close()
    failures.append(f"{host}: another program uses the port")
  raise ControlError(
    f"process {process} cannot reach process 0 at port {address.port} ({'; '.join(failures)}):"
    " allow TCP connections between the hosts"
  )


def _shake_hands(connected: socket.socket, token: str, process: int) -> int | None:
  """Sends this process's index; returns the peer's index, None if the peer is of another run."""
  connected.settimeout(_HANDSHAKE_S)
  line = b""
  with contextlib.suppress(OSError):
    connected.sendall(f"{token} {process}\n".encode())
    while not line.endswith(b"\n") and len(line) < 64 and (byte := connected.recv(1)):
      line += byte
  words = line.decode(errors="replace").split()
  is_of_run = len(words) == 2 and words[0] == token and words[1].isdigit()
  return int(words[1]) if is_of_run else None


def _host_addresses() -> list[str]:
  """Addresses of this host, best first; the last address works if all processes share a host."""
  addresses = [socket.gethostname(), "127.0.0.1"]
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
    probe.connect(("192.0.2.1", 9))  # sends nothing; chooses the interface to the outside
    addresses.insert(0, probe.getsockname()[0])
  return addresses
