"""Messages between processes, here between threads: what arrives, and who is named if not."""

import contextlib
import socket
import threading
import time
from concurrent import futures

import pytest

from rlvr_jax.train.cluster import control


class Ends:
  """The ends of the connections of one run, and what each was told."""

  def __init__(self, count):
    server = control.Server(count)
    self.sockets, self.lost, self.requests = {}, [[] for _ in range(count)], [0] * count
    with futures.ThreadPoolExecutor(count) as threads:
      accepted = threads.submit(server.accept, 60.0)
      others = [threads.submit(control.connect, server.address, k) for k in range(1, count)]
      connections = [accepted.result(), *({0: other.result()} for other in others)]
    self.connections = connections
    before = {*threading.enumerate()}
    self.channels = [self.channel(k, count, found) for k, found in enumerate(connections)]
    self.threads = {*threading.enumerate()} - before

  def channel(self, process, count, connections):
    def asked():
      self.requests[process] += 1

    return control.Channel(
      process, count, connections, on_request=asked, on_loss=self.lost[process].append
    )

  def all(self, action):
    """action(channel), in a thread for each; the results or errors."""
    with futures.ThreadPoolExecutor(len(self.channels)) as threads:
      running = [threads.submit(action, channel) for channel in self.channels]
    return [future.exception() or future.result() for future in running]

  def die(self, process):
    """What the kernel does with the connections of a process that is killed, which says nothing."""
    self.channels[process]._ended.add(*self.connections[process])
    for connection in self.connections[process].values():
      connection._socket.shutdown(socket.SHUT_RDWR)


def wait_until(condition):
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def test_all_get_the_values_of_all():
  ends = Ends(3)
  for number in range(20):
    value = lambda channel, n=number: {"process": channel.process, "x": 0.1 + n, "é": "é" * 9999}
    found = ends.all(lambda channel, value=value: channel.exchange(value(channel), "a test", 60.0))
    assert found == [[value(channel) for channel in ends.channels]] * 3


@pytest.mark.parametrize("process", [0, 2])
def test_a_request_reaches_all_others(process):
  ends = Ends(4)
  ends.channels[process].request_shutdown()
  expected = [int(k != process) for k in range(4)]
  wait_until(lambda: ends.requests == expected)


@pytest.mark.parametrize("killed", [0, 2])
def test_the_others_name_the_process_that_died_and_where_they_were(killed):
  ends = Ends(4)
  ends.all(lambda channel: channel.exchange(None, "grading", 60.0))
  ends.die(killed)
  survivors = [k for k in range(4) if k != killed]
  wait_until(lambda: all(ends.lost[k] for k in survivors))
  for k in survivors:
    (message,) = ends.lost[k]
    assert message.startswith(f"process {killed} of 4 has died or cannot be reached; process {k}")
    assert "was at 'grading'" in message and "Rerun the same command on every host" in message


def test_the_others_learn_why_one_has_failed():
  ends = Ends(3)
  ends.channels[1].leave("failed (OSError: the disk is full)")
  ends.die(1)
  wait_until(lambda: ends.lost[0] and ends.lost[2])
  for k in (0, 2):
    assert ends.lost[k][0].startswith("process 1 of 3 failed (OSError: the disk is full);")


def test_an_end_in_order_alarms_nobody():
  ends = Ends(3)
  for channel in ends.channels:
    channel.leave()
  for process in range(3):
    ends.die(process)
  wait_until(lambda: not any(thread.is_alive() for thread in ends.threads))
  assert ends.lost == [[], [], []]


def test_one_that_does_not_come_is_named_within_the_deadline():
  ends = Ends(3)
  silent = lambda channel: channel.process == 2 or channel.exchange(1, "an evaluation", 0.2)
  first, *_ = ends.all(silent)
  assert isinstance(first, control.ControlError)
  assert "process 2 of 3 did not reach 'an evaluation' within 0.2 s" in str(first)


def test_different_phases_are_an_error_everywhere():
  ends = Ends(2)
  names = ["generation", "grading"]
  errors = ends.all(lambda channel: channel.exchange(1, names[channel.process], 60.0))
  for error, name, other in zip(errors, names, reversed(names), strict=True):
    assert isinstance(error, control.ControlError)
    assert f"is at {name!r}, others are at {{" in str(error) and other in str(error)


def test_strangers_are_not_let_in():
  server = control.Server(2)
  with futures.ThreadPoolExecutor(2) as threads:
    accepted = threads.submit(server.accept, 60.0)
    for hello in (b"", b"GET / HTTP/1.1\n", b"0123456789abcdef 1\n"):
      stranger = socket.create_connection(("127.0.0.1", server.address.port))
      with contextlib.closing(stranger), contextlib.suppress(OSError):
        stranger.sendall(hello)
    own = threads.submit(control.connect, server.address, 1)
    assert own.result() and list(accepted.result()) == [1]
  elsewhere = server.address._replace(hosts=["127.0.0.1"])
  with pytest.raises(
    control.ControlError, match=r"process 1 cannot reach process 0 .*127\.0\.0\.1"
  ):
    control.connect(elsewhere, 1)


def test_a_process_that_never_connects_is_named():
  with pytest.raises(control.ControlError, match=r"processes \[1, 2\] of 3 did not connect"):
    control.Server(3).accept(0.1)
