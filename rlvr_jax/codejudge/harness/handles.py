"""The judge's end of the channel to the program, and handles to the program's objects."""

from __future__ import annotations

import builtins
import collections
import collections.abc
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .messages import MAX_MESSAGE, TYPES, as_builtin, decode, describe, encode, receive, send

_VIEWS = (collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)


class UnsupportedTestError(Exception):
  """A test uses something that cannot be sent to the program; says nothing about the program."""


class Handle:
  """An object in the program. Every use of it is a request, whose answer is plain data.

  There is deliberately no comparison, arithmetic or `__contains__`: these would send the expected
  values to the program, and trust its answer.
  """

  def __init__(self, program: Program, number: int):
    object.__setattr__(self, "_program", program)
    object.__setattr__(self, "_number", number)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._program.call(self, args, kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return self._program.ask("getattr", self, name)

  def __setattr__(self, name: str, value: Any) -> None:
    self._program.ask("setattr", self, name, value)

  def __getitem__(self, key: Any) -> Any:
    return self._program.ask("getitem", self, key)

  def __setitem__(self, key: Any, value: Any) -> None:
    self._program.ask("setitem", self, key, value)

  def __iter__(self) -> Iterator[Any]:
    iterator = self._program.ask("iter", self)
    while more := self._program.ask("next", iterator):
      yield more[0]

  def __next__(self) -> Any:
    if more := self._program.ask("next", self):
      return more[0]
    raise StopIteration

  def __len__(self) -> int:
    return self._program.ask("len", self)

  def __bool__(self) -> bool:
    return self._program.ask("bool", self)

  def __str__(self) -> str:
    return self._program.ask("str", self)

  def __repr__(self) -> str:
    return self._program.ask("repr", self)


class Program:
  """The judge's end of the channel to the program."""

  def __init__(self, channel: socket.socket):
    self._channel: socket.socket | None = channel
    self._handles: dict[int, Handle] = {}
    self._entries: set[int] = set()  # numbers of the handles that tests name
    self._lent: list[Callable] = []
    self._has_given_types = False

  def started(self) -> None:
    """Waits until the program's code has run; raises the exception that it raised."""
    self._answer()

  def define(self, names: Sequence[str]) -> dict[str, Any]:
    """Handles or values of those of the names that the program defines."""
    found = self.ask("define", list(names))
    values = {name: value for name, value in found.items() if name in names}
    self._entries |= {value._number for value in values.values() if isinstance(value, Handle)}
    return values

  def ask(self, operation: str, *operands: Any) -> Any:
    """Sends a request; returns plain data or a `Handle`, or raises the program's exception."""
    self._send({"operation": operation, "operands": self._sendable(operands)})
    return self._decode(self._answer()["value"])

  def call(self, function: Handle, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As `ask`, for a call; its changes of mutable arguments are applied to `args`."""
    operands = [function, list(args), dict(kwargs)]
    # With a type from the program, a test can make an object that cannot be sent back.
    of_tests = function._number in self._entries and not self._has_given_types
    sendable = self._encode(operands) if of_tests else self._sendable(operands)
    self._send({"operation": "call", "operands": sendable})
    answer = self._answer()
    for index, data in answer["changed"]:
      _assign(args[index], self._decode(data))
    return self._decode(answer["value"])

  def case(self, text: str) -> dict[str, Any]:
    """Runs the program with this standard input; see `run_case`."""
    self._send({"input": text})
    return self._answer()

  def _send(self, message: Any) -> None:
    if self._channel is None:
      raise EOFError("the program has ended")
    try:
      send(self._channel, message)
    except OSError as error:
      raise self._gone("the program has ended") from error

  def _answer(self) -> dict[str, Any]:
    while "callback" in (message := self._receive()):
      self._send(self._call_back(message))
    if "error" in message:
      raise as_builtin(*message["error"])
    return message

  def _receive(self) -> dict[str, Any]:
    if self._channel is None:
      raise EOFError("the program has ended")
    try:
      message = receive(self._channel, MAX_MESSAGE)
    except (EOFError, OSError) as error:
      raise self._gone("the program has ended") from error
    except (ValueError, RecursionError, MemoryError) as error:
      raise self._gone(f"the program's answer is unusable: {describe(error)}") from error
    if not isinstance(message, dict):
      raise self._gone("the program's answer is unusable: no object")
    return message

  def _gone(self, reason: str) -> EOFError:
    self._channel = None  # the next message would not answer the next request
    return EOFError(reason)

  def _call_back(self, message: Mapping[str, Any]) -> dict[str, Any]:
    try:
      arguments = [self._decode(data) for data in message["arguments"]]
      return {"value": self._encode(self._lent[message["callback"]](*arguments))}
    except Exception as error:
      return {"error": [type(error).__name__, str(error)]}

  def _encode(self, value: Any) -> Any:
    return encode(value, self._refer)

  def _sendable(self, operands: Any) -> Any:
    """As `_encode`, for a result of the program; raises TypeError if that is not plain data."""
    try:
      return self._encode(operands)
    except UnsupportedTestError as error:
      raise TypeError(f"the program returned no plain data, and {error}") from error

  def _refer(self, value: Any) -> list:
    if isinstance(value, Handle):
      return ["handle", value._number]
    if isinstance(value, collections.abc.Iterator):
      return ["iterator", [self._encode(element) for element in value]]
    if isinstance(value, _VIEWS):
      return ["list", [self._encode(element) for element in value]]
    name = getattr(value, "__name__", "")
    if isinstance(name, str) and getattr(builtins, name, None) is value:
      return ["builtin", name]
    if callable(value):
      self._lent.append(value)
      return ["function", len(self._lent) - 1]
    raise UnsupportedTestError(
      f"a test passes a {type(value).__name__} to the program; allowed are plain data, "
      "callables, and objects of the program"
    )

  def _decode(self, data: Any) -> Any:
    return decode(data, self._resolve)

  def _resolve(self, tag: str, content: Any) -> Handle | type:
    if tag == "type":
      self._has_given_types = True
      return TYPES[content]
    if tag != "handle" or type(content) is not int:
      raise ValueError(f"the program's answer is unusable: {tag!r:.50}")
    return self._handles.setdefault(content, Handle(self, content))


def _assign(old: Any, new: Any) -> None:
  """Makes a mutable argument equal to the program's copy of it after the call."""
  if isinstance(old, (list, bytearray)):
    old[:] = new
  else:
    old.clear()
    (old.extend if isinstance(old, collections.deque) else old.update)(new)
