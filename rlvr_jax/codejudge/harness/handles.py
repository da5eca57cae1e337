"""The judge's side of the channel to the program, and handles to the program's objects."""

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
  """A test uses a value that cannot be sent to the program; the program was not judged."""


class Handle:
  """An object in the program. Using it sends a request; the answer is plain data or a handle.

  A handle has no comparison, arithmetic or `__contains__`: these would send expected values to the
  program and trust the program's answer.
  """

  def __init__(self, program: Program, number: int):
    object.__setattr__(self, "_program", program)
    object.__setattr__(self, "_number", number)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._program.call(self, args, kwargs)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return self._program.request("getattr", self, name)

  def __setattr__(self, name: str, value: Any) -> None:
    self._program.request("setattr", self, name, value)

  def __getitem__(self, key: Any) -> Any:
    return self._program.request("getitem", self, key)

  def __setitem__(self, key: Any, value: Any) -> None:
    self._program.request("setitem", self, key, value)

  def __iter__(self) -> Iterator[Any]:
    iterator = self._program.request("iter", self)
    while more := self._program.request("next", iterator):
      yield more[0]

  def __next__(self) -> Any:
    if more := self._program.request("next", self):
      return more[0]
    raise StopIteration

  def __len__(self) -> int:
    return self._program.request("len", self)

  def __bool__(self) -> bool:
    return self._program.request("bool", self)

  def __str__(self) -> str:
    return self._program.request("str", self)

  def __repr__(self) -> str:
    return self._program.request("repr", self)


class Program:
  """The judge's side of the channel to the program."""

  def __init__(self, channel: socket.socket):
    self._channel: socket.socket | None = channel
    self._handles: dict[int, Handle] = {}
    self._entry_numbers: set[int] = set()  # of the handles that tests name
    self._callbacks: list[Callable] = []  # functions of tests that were passed to the program
    self._has_program_types = False

  def wait_started(self) -> None:
    """Waits until the program's code has run; raises the exception that it raised, if any."""
    self._receive_answer()

  def look_up(self, names: Sequence[str]) -> dict[str, Any]:
    """Looks up names that the program defines; returns their values or handles."""
    definitions = self.request("define", list(names))
    values = {name: value for name, value in definitions.items() if name in names}
    self._entry_numbers |= {value._number for value in values.values() if isinstance(value, Handle)}
    return values

  def request(self, operation: str, *operands: Any) -> Any:
    """Sends a request; returns plain data or a `Handle`, or raises the program's exception."""
    self._send({"operation": operation, "operands": self._encode_results(operands)})
    return self._decode(self._receive_answer()["value"])

  def call(self, function: Handle, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function of the program; copies its changes of mutable arguments into `args`."""
    operands = [function, list(args), dict(kwargs)]
    # A test that has a type from the program can make objects that cannot be sent to the program.
    is_tests_own = function._number in self._entry_numbers and not self._has_program_types
    data = self._encode(operands) if is_tests_own else self._encode_results(operands)
    self._send({"operation": "call", "operands": data})
    answer = self._receive_answer()
    for index, change in answer["changed"]:
      _copy_into(args[index], self._decode(change))
    return self._decode(answer["value"])

  def run_case(self, text: str) -> dict[str, Any]:
    """Runs the program with `text` as its standard input; see `scripts.run_case`."""
    self._send({"input": text})
    return self._receive_answer()

  def _send(self, message: Any) -> None:
    if self._channel is None:
      raise EOFError("the program has ended")
    try:
      send(self._channel, message)
    except OSError as error:
      raise self._mark_ended("the program has ended") from error

  def _receive_answer(self) -> dict[str, Any]:
    """Receives an answer, and serves callbacks meanwhile; raises the program's exception."""
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
      raise self._mark_ended("the program has ended") from error
    except (ValueError, RecursionError, MemoryError) as error:
      raise self._mark_ended(f"the program's answer is unusable: {describe(error)}") from error
    if not isinstance(message, dict):
      raise self._mark_ended("the program's answer is unusable: not an object")
    return message

  def _mark_ended(self, reason: str) -> EOFError:
    """Stops using the channel; returns the exception to raise."""
    self._channel = None  # the next message would not answer the next request
    return EOFError(reason)

  def _call_back(self, message: Mapping[str, Any]) -> dict[str, Any]:
    try:
      arguments = [self._decode(data) for data in message["arguments"]]
      return {"value": self._encode(self._callbacks[message["callback"]](*arguments))}
    except Exception as error:
      return {"error": [type(error).__name__, str(error)]}

  def _encode(self, value: Any) -> Any:
    return encode(value, self._refer)

  def _encode_results(self, operands: Any) -> Any:
    """Encodes values that the program may have returned; raises TypeError if that fails."""
    try:
      return self._encode(operands)
    except UnsupportedTestError as error:
      raise TypeError(
        f"the program returned a value that is not plain data, and {error}"
      ) from error

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
      self._callbacks.append(value)
      return ["function", len(self._callbacks) - 1]
    raise UnsupportedTestError(
      f"a test passes a {type(value).__name__} to the program; allowed are plain data, "
      "callables, and objects of the program"
    )

  def _decode(self, data: Any) -> Any:
    return decode(data, self._resolve)

  def _resolve(self, tag: str, content: Any) -> Handle | type:
    if tag == "type":
      self._has_program_types = True
      return TYPES[content]
    if tag != "handle" or type(content) is not int:
      raise ValueError(f"the program's answer is unusable: the reference {tag!r:.50} is not valid")
    return self._handles.setdefault(content, Handle(self, content))


def _copy_into(old: Any, new: Any) -> None:
  """Copies the program's version of a mutable argument after a call into the argument."""
  if isinstance(old, (list, bytearray)):
    old[:] = new
  else:
    old.clear()
    (old.extend if isinstance(old, collections.deque) else old.update)(new)
