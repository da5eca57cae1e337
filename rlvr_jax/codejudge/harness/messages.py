"""Messages between two processes: a length, then JSON; and how values and errors become JSON."""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import json
import socket
import types
from collections.abc import Callable
from typing import Any

MAX_MESSAGE = 16 * 2**20  # bytes from a program: one answer, or one case's output
MAX_TEXT = 500  # characters of a text for humans
MAX_DIGITS = 50_000  # of an integer that is converted to or from text; as LiveCodeBench allows

_SEQUENCES: dict[str, type] = {
  kind.__name__: kind for kind in (list, tuple, set, frozenset, collections.deque)
}
_BYTES: dict[str, type] = {kind.__name__: kind for kind in (bytes, bytearray)}
_AS_TEXT: dict[str, type] = {
  kind.__name__: kind
  for kind in (
    fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.datetime
  )
}  # fmt: skip
_AS_PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
  "range": (range, ("start", "stop", "step")),
  "slice": (slice, ("start", "stop", "step")),
  "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
_PLAIN: tuple[type, ...] = (
  types.NoneType, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset,
  dict, range, object,
)  # fmt: skip
_TYPE_NAMES: dict[type, str] = {kind: kind.__name__ for kind in _PLAIN}
TYPES = {name: kind for kind, name in _TYPE_NAMES.items()}
# A subclass is encoded as the first type here that is its base, so bool comes before int.
_BASES: tuple[type, ...] = (
  bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict,
  collections.deque, fractions.Fraction, decimal.Decimal,
)  # fmt: skip


def send(channel: socket.socket, message: Any) -> None:
  """Sends a message: 8 bytes with the length of its JSON, then the JSON."""
  data = json.dumps(message).encode()
  channel.sendall(len(data).to_bytes(8, "big") + data)


def receive(channel: socket.socket, limit: int | None = None) -> Any:
  """Receives the next message.

  Raises:
    EOFError: the other side has closed the channel.
    ValueError: the message is longer than `limit` bytes, or not JSON.
  """
  size = int.from_bytes(receive_exactly(channel, 8), "big")
  if limit is not None and size > limit:
    raise ValueError(f"a message has {size} bytes, but at most {limit} are allowed")
  return json.loads(receive_exactly(channel, size))


def receive_exactly(channel: socket.socket, size: int) -> bytes:
  """Receives `size` bytes; raises EOFError if the other side closes the channel earlier."""
  data = bytearray()
  while len(data) < size:
    # Never receives more bytes, since the following bytes are for the next reader.
    part = channel.recv(min(size - len(data), 2**20))
    if not part:
      raise EOFError
    data += part
  return bytes(data)


def encode(value: Any, refer: Callable[[Any], list]) -> Any:
  """Encodes plain data as JSON: null, bools, numbers and texts unchanged, others as [tag, content].

  An object of a subclass of a plain type is encoded as the plain type. `refer` returns the [tag,
  content] of values that are not plain data.
  """
  kind = type(value)
  if value is None or kind in (bool, float, str):
    return value
  if kind is int:
    return value if abs(value) < 2**63 else ["int", hex(value)]
  name = kind.__name__
  if _SEQUENCES.get(name) is kind:
    return [name, [encode(element, refer) for element in value]]
  if kind is dict:
    return ["dict", [[encode(key, refer), encode(item, refer)] for key, item in value.items()]]
  if _BYTES.get(name) is kind:
    return [name, value.decode("latin-1")]
  if _AS_TEXT.get(name) is kind:
    return [name, str(value)]
  if kind is complex:
    return ["complex", [value.real, value.imag]]
  if kind is datetime.timezone:
    return [name, [encode(part, refer) for part in value.__getinitargs__()]]
  if name in _AS_PARTS and _AS_PARTS[name][0] is kind:
    return [name, [encode(getattr(value, part), refer) for part in _AS_PARTS[name][1]]]
  if kind is type and value in _TYPE_NAMES:
    return ["type", _TYPE_NAMES[value]]
  for base in _BASES:
    if isinstance(value, base):
      return encode(str.__str__(value) if base is str else base(value), refer)
  return refer(value)


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
  """Decodes the JSON of `encode` into exact plain types.

  `resolve` maps the tag and content of any other value to this value. A plain type itself has the
  tag "type", and its content is a name in `TYPES`.

  Raises:
    ValueError, TypeError: `data` is not a result of `encode`.
  """
  if data is None or isinstance(data, (bool, int, float, str)):
    return data
  if not isinstance(data, list):
    raise ValueError(f"not an encoded value: {type(data).__name__}")
  tag, content = data
  if tag in _SEQUENCES:
    return _SEQUENCES[tag]([decode(element, resolve) for element in content])
  if tag == "dict":
    return {decode(key, resolve): decode(item, resolve) for key, item in content}
  if tag == "int":
    return int(content, 16)
  if tag in _BYTES:
    return _BYTES[tag](content.encode("latin-1"))
  if tag in _AS_TEXT:
    return getattr(_AS_TEXT[tag], "fromisoformat", _AS_TEXT[tag])(content)
  if tag == "complex":
    return complex(*content)
  if tag == "timezone":
    return datetime.timezone(*[decode(part, resolve) for part in content])
  if tag in _AS_PARTS:
    return _AS_PARTS[tag][0](*[decode(part, resolve) for part in content])
  return resolve(tag, content)


def describe(error: BaseException) -> str:
  """Describes an exception for humans: its name and the start of its text."""
  try:
    text = str(error)[:MAX_TEXT]
  except BaseException:
    text = ""
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_message(error: BaseException) -> dict[str, Any]:
  """An exception as a message, from which `as_builtin` makes an exception."""
  names = [kind.__name__ for kind in type(error).__mro__]
  name = next((name for name in names if hasattr(builtins, name)), names[0])
  if name == "KeyError" and len(error.args) == 1 and isinstance(error.args[0], str):
    return {"error": [name, error.args[0][:MAX_TEXT]]}  # str(error) would add quotation marks
  text = describe(error)
  return {"error": [name, text.removeprefix(f"{name}: ") if text != name else ""]}


def as_builtin(name: Any, text: Any) -> Exception:
  """The builtin exception called `name`; RuntimeError for Stop(Async)Iteration and other names."""
  kind = getattr(builtins, str(name), None)
  ends_a_loop = (StopIteration, StopAsyncIteration)
  if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_a_loop):
    with contextlib.suppress(TypeError):
      return kind(str(text))
  return RuntimeError(f"{name}: {text}")
