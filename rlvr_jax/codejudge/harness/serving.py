"""Runs the program once; its functions and objects answer the judge's requests."""

from __future__ import annotations

import builtins
import operator
import socket
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .messages import TYPES, as_builtin, decode, encode, error_message, receive, send
from .processes import SOLUTION, execute, replace_streams

_MUTABLE = ("list", "set", "deque", "dict", "bytearray")


class Server:
  """The program's side of the channel, which answers the judge's requests."""

  def __init__(self, channel: socket.socket, namespace: Mapping[str, Any]):
    self._channel = channel
    self._namespace = namespace
    self._objects: list[Any] = []
    self._numbers: dict[int, int] = {}
    functions = (getattr, setattr, operator.getitem, operator.setitem, iter, len, bool, str, repr)
    self._operations: dict[str, Callable] = {function.__name__: function for function in functions}
    self._operations |= {"define": self._look_up, "next": self._next}

  def serve(self) -> None:
    """Answers requests until the judge ends this process."""
    send(self._channel, {"started": True})
    while True:
      send(self._channel, self._answer(receive(self._channel)))

  def _look_up(self, names: Sequence[str]) -> dict[str, Any]:
    return {name: self._namespace[name] for name in names if name in self._namespace}

  def _next(self, iterator: Iterator[Any]) -> list[Any]:
    try:
      return [next(iterator)]
    except StopIteration:
      return []

  def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
      operands = self._decode(request["operands"])
      if request["operation"] != "call":
        return {"value": self._encode(self._operations[request["operation"]](*operands))}
      function, args, kwargs = operands
      value = self._encode(function(*args, **kwargs))
      changed = self._changed_arguments(request["operands"][1][1][1], args)
      return {"value": value, "changed": changed}
    except BaseException as error:
      return error_message(error)

  def _changed_arguments(self, before: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The pair [index, content] of each mutable argument that a call has changed."""
    changed = []
    for index, (data, value) in enumerate(zip(before, args, strict=True)):
      if isinstance(data, list) and data[0] in _MUTABLE:
        new_data = self._encode(value)
        if new_data != data:
          changed.append([index, new_data])
    return changed

  def _encode(self, value: Any) -> Any:
    try:
      return encode(value, self._refer)
    except Exception:  # a circular value, or one that does not behave like its type
      return self._refer(value)

  def _refer(self, value: Any) -> list:
    number = self._numbers.setdefault(id(value), len(self._objects))
    if number == len(self._objects):
      self._objects.append(value)  # so that its id is not reused
    return ["handle", number]

  def _decode(self, data: Any) -> Any:
    return decode(data, self._resolve)

  def _resolve(self, tag: str, content: Any) -> Any:
    if tag == "function":
      return lambda *args: self._call_back(content, args)
    if tag == "builtin":
      return getattr(builtins, content)
    if tag == "type":
      return TYPES[content]
    if tag == "iterator":
      return iter([self._decode(element) for element in content])
    return self._objects[content]

  def _call_back(self, number: int, args: Sequence[Any]) -> Any:
    send(self._channel, {"callback": number, "arguments": [self._encode(arg) for arg in args]})
    while "operation" in (message := receive(self._channel)):
      send(self._channel, self._answer(message))  # the judge's function itself uses the program
    if "error" in message:
      raise as_builtin(*message["error"])
    return self._decode(message["value"])


def serve_calls(channel: socket.socket, sources: Sequence[str]) -> None:
  """Runs the program, then answers the judge's requests."""
  replace_streams(channel)
  module = types.ModuleType("solution")
  sys.modules["solution"] = module  # dataclasses and pickle look it up
  try:
    for source in sources:
      execute(source, SOLUTION, module.__dict__)
  except BaseException as error:
    send(channel, error_message(error))
    return
  Server(channel, module.__dict__).serve()
