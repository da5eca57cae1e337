"""The program inside the sandbox: runs generated code and judges it, in separate processes.

Started by `sandbox.py`, under an interpreter with the standard library only. What it starts:

    launcher     one per sandbox. It enters namespaces with a small read-only root, or finds itself
    │            in those of bubblewrap, drops its rights and waits for items.
    └ supervisor one per item, like all below: fresh user, process, mount and IPC namespaces, an
      │          empty /tmp; kills everything in them when time is over or the caller has gone
      └ judge    first process in there. It holds the tests and the only way to a verdict
        └ program  the generated code, forked before the judge reads a test and started after: it
                 never has tests, expected values or the verdict's socket in its memory or among
                 its descriptors, and may neither trace the judge nor look into it

The judge evaluates tests itself. A name of the program that a test uses is a `Handle`; a call is
sent to the program, and what comes back is plain data, built anew here (`decode`). What is not
plain data stays in the program, as a `Handle`, which equals nothing but itself. So all that a
program can do is answer calls. An answer's type, its `__eq__`, a changed builtin, an early exit:
none of these exist on the judge's side.
"""

from __future__ import annotations

import atexit
import builtins
import collections
import collections.abc
import contextlib
import ctypes
import datetime
import decimal
import fractions
import gc
import importlib
import io
import itertools
import json
import math
import operator
import os
import platform
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# What programs import most: loaded once here, instead of in every program.
PRELOADED = ("bisect", "copy", "heapq", "random", "re", "statistics", "string", "typing")

MAX_MESSAGE = 16 * 2**20  # bytes from a program: one answer, or one case's output
MAX_OUTPUT = MAX_MESSAGE // 8  # bytes of a case: in JSON a byte may take six
MAX_TEXT = 500  # characters of a text that is there for a person
PROCESSES = 32  # of one item, threads included
OPEN_FILES = 128
STACK_MIB = 64
FILE_MIB = 16  # of one file
WATCH_S = 0.05  # between looks at the memory that an item takes
SCRATCH_MIB = 32  # /tmp
SHARED_MIB = 8  # /dev/shm
UNPRIVILEGED = 65534  # the user and group called nobody

_MAX_SETTINGS = 4096  # bytes of what comes with an item's socket


# --- messages -------------------------------------------------------------------------------------


def send(channel: socket.socket, message: Any) -> None:
  """Sends JSON, after its length in 8 bytes."""
  data = json.dumps(message).encode()
  channel.sendall(len(data).to_bytes(8, "big") + data)


def receive(channel: socket.socket, limit: int | None = None) -> Any:
  """The next message.

  Raises:
    EOFError: the other side has gone.
    ValueError: longer than `limit` bytes, or not JSON.
  """
  size = int.from_bytes(_receive_exactly(channel, 8), "big")
  if limit is not None and size > limit:
    raise ValueError(f"a message of {size} bytes, allowed are {limit}")
  return json.loads(_receive_exactly(channel, size))


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
  data = bytearray()
  while len(data) < size:
    # No more than what is asked for: the rest is for whoever reads next.
    part = channel.recv(min(size - len(data), 2**20))
    if not part:
      raise EOFError
    data += part
  return bytes(data)


# --- values ---------------------------------------------------------------------------------------

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
_MUTABLE = ("list", "set", "deque", "dict", "bytearray")
_PLAIN: tuple[type, ...] = (
  types.NoneType, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset,
  dict, range, object,
)  # fmt: skip
_TYPE_NAMES: dict[type, str] = {kind: kind.__name__ for kind in _PLAIN}
_TYPES = {name: kind for kind, name in _TYPE_NAMES.items()}
# Exact types first, so that a bool is no int; a subclass counts as the first it descends from.
_BASES: tuple[type, ...] = (
  bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict,
  collections.deque, fractions.Fraction, decimal.Decimal,
)  # fmt: skip


def encode(value: Any, refer: Callable[[Any], list]) -> Any:
  """Plain data as JSON: null, true, numbers and texts as they are, all else as [tag, content].

  Subclasses of plain types are taken for their base. `refer` gives the [tag, content] of what is
  no plain data.
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
  if name in _AS_PARTS and _AS_PARTS[name][0] is kind:
    return [name, [encode(getattr(value, part), refer) for part in _AS_PARTS[name][1]]]
  if kind is type and value in _TYPE_NAMES:
    return ["type", _TYPE_NAMES[value]]
  for base in _BASES:
    if isinstance(value, base) and not isinstance(value, Handle):
      return encode(str.__str__(value) if base is str else base(value), refer)
  return refer(value)


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
  """The value of `encode`'s JSON, made of exact plain types; `resolve` gives those of other tags.

  Raises:
    ValueError, TypeError: not what `encode` makes.
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
  if tag in _AS_PARTS:
    return _AS_PARTS[tag][0](*[decode(part, resolve) for part in content])
  if tag == "type":
    return _TYPES[content]
  return resolve(tag, content)


def describe(error: BaseException) -> str:
  """An exception for a person: its name and the start of its text."""
  try:
    text = str(error)[:MAX_TEXT]
  except BaseException:
    text = ""
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- the judge ------------------------------------------------------------------------------------


class UnsupportedTestError(Exception):
  """A test asks for what cannot cross over to the program; says nothing about the program."""


class Handle:
  """Something that lives in the program. Every use of it is a request, and its answer plain data.

  There is deliberately no comparison, arithmetic or `__contains__`: these would send what a test
  expects to the program, and believe its word.
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
    self._entries: set[int] = set()  # of handles: what tests name
    self._lent: list[Callable] = []

  def started(self) -> None:
    """Waits until the program's own code has run; raises what it has raised."""
    self._answer()

  def define(self, names: Sequence[str]) -> dict[str, Any]:
    """What those of the names stand for that the program defines."""
    found = self.ask("define", list(names))
    values = {name: value for name, value in found.items() if name in names}
    self._entries |= {value._number for value in values.values() if isinstance(value, Handle)}
    return values

  def ask(self, operation: str, *operands: Any) -> Any:
    """One request; plain data or a `Handle`. Raises what it raised in the program."""
    self._send({"operation": operation, "operands": self._sendable(operands)})
    return self._decode(self._answer()["value"])

  def call(self, function: Handle, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As `ask`; what the call changed in its mutable arguments is changed in `args`, too."""
    operands = [function, list(args), dict(kwargs)]
    named = function._number in self._entries
    sendable = self._encode(operands) if named else self._sendable(operands)
    self._send({"operation": "call", "operands": sendable})
    answer = self._answer()
    for index, data in answer["changed"]:
      _assign(args[index], self._decode(data))
    return self._decode(answer["value"])

  def case(self, text: str) -> dict[str, Any]:
    """One run of the program with that standard input; see `run_case`."""
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
      raise _as_builtin(*message["error"])
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
    self._channel = None  # what would come next is no answer to what is asked next
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
    """As `_encode`, for what a program has returned: had it been data, nothing would be sent."""
    try:
      return self._encode(operands)
    except UnsupportedTestError as error:
      raise TypeError(f"the program returned no plain data, and {error}") from error

  def _refer(self, value: Any) -> list:
    if isinstance(value, Handle):
      return ["handle", value._number]
    if isinstance(value, types.FunctionType):
      self._lent.append(value)
      return ["function", len(self._lent) - 1]
    if isinstance(value, collections.abc.Iterator):
      return ["iterator", [self._encode(element) for element in value]]
    name = getattr(value, "__name__", "")
    if getattr(builtins, name, None) is value:
      return ["builtin", name]
    raise UnsupportedTestError(
      f"a test hands a {type(value).__name__} to the program; allowed are plain data, functions, "
      "builtins and what the program itself has made"
    )

  def _decode(self, data: Any) -> Any:
    return decode(data, self._resolve)

  def _resolve(self, tag: str, content: Any) -> Handle:
    if tag != "handle" or type(content) is not int:
      raise ValueError(f"the program's answer is unusable: {tag!r:.50}")
    return self._handles.setdefault(content, Handle(self, content))


def _assign(old: Any, new: Any) -> None:
  """Makes a mutable argument equal to what the program has made of its copy."""
  if isinstance(old, (list, bytearray)):
    old[:] = new
  else:
    old.clear()
    (old.extend if isinstance(old, collections.deque) else old.update)(new)


def _as_builtin(name: Any, text: Any) -> Exception:
  """The builtin exception of that name; RuntimeError for others, and for those that end loops."""
  kind = getattr(builtins, str(name), None)
  ends_a_loop = (StopIteration, StopAsyncIteration)
  if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_a_loop):
    with contextlib.suppress(TypeError):
      return kind(str(text))
  return RuntimeError(f"{name}: {text}")


def judge(program: Program, task: Mapping[str, Any]) -> dict[str, Any]:
  """Runs the tests of one item.

  Args:
    program: freshly started.
    task: "style" and its fields, see `_checks`; "stop": whether the first failure ends it.
  Returns:
    "passed" and "total" tests, and "failure", a text on the first failure.
  """
  try:
    program.started()
    checks = _checks(program, task)
  except UnsupportedTestError:
    raise
  except Exception as error:
    return {"passed": 0, "total": task["total"], "failure": f"program: {describe(error)}"}
  passed, failure = 0, ""
  for number, (label, check) in enumerate(checks, 1):
    try:
      check()
      passed += 1
    except UnsupportedTestError:
      raise
    except BaseException as error:  # a test that exits has not passed
      failure = failure or f"test {number} of {task['total']}, {label}: {describe(error)}"
      if task["stop"]:
        break
  return {"passed": passed, "total": task["total"], "failure": failure}


def _checks(program: Program, task: Mapping[str, Any]) -> list[tuple[str, Callable[[], None]]]:
  """Label and function of each test; the function raises where the program fails."""
  if task["style"] == "stdin":
    return [(_label(case), _stdin_check(program, case)) for case in task["cases"]]
  if task["style"] == "function":
    entry = _entry(program, task["entry_point"])
    return [(_label(case), _call_check(entry, case)) for case in task["cases"]]
  namespace: dict[str, Any] = {"__name__": "tests"}
  for module in task["modules"]:
    namespace[module] = importlib.import_module(module)
  for text in task["prelude"]:
    _execute(text, "<prelude>", namespace)
  namespace |= program.define(task["names"])
  if task["style"] == "asserts":
    return [(_short(text), _text_check(text, namespace)) for text in task["tests"]]
  return [(task["entry_point"], _candidate_check(task, namespace))]


def _label(case: Mapping[str, Any]) -> str:
  return f"input {_short(case['input'])}"


def _short(value: Any) -> str:
  text = value if isinstance(value, str) else repr(value)
  return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _execute(source: str, name: str, namespace: dict[str, Any]) -> None:
  exec(compile(source, name, "exec", dont_inherit=True), namespace)


def _text_check(text: str, namespace: dict[str, Any]) -> Callable[[], None]:
  return lambda: _execute(text, "<test>", namespace)


def _candidate_check(task: Mapping[str, Any], namespace: dict[str, Any]) -> Callable[[], None]:
  def check() -> None:
    candidate = _defined(namespace, task["entry_point"])
    _execute(task["test"], "<test>", namespace)
    namespace["check"](candidate)

  return check


def _defined(values: Mapping[str, Any], name: str) -> Any:
  if name not in values:
    raise NameError(f"the program does not define {name!r}")
  return values[name]


def _entry(program: Program, entry_point: str) -> Callable[..., Any]:
  """What a case calls: a function, or "Class.method" of a new object each time.

  A program without the class may define the method's name as a function.
  """
  owner, _, method = entry_point.rpartition(".")
  values = program.define([owner, method])
  if owner in values:
    return lambda *args: getattr(values[owner](), method)(*args)
  return _defined(values, method)


def _call_check(entry: Callable[..., Any], case: Mapping[str, Any]) -> Callable[[], None]:
  def check() -> None:
    got = entry(*json.loads(json.dumps(case["input"])))  # a copy: a program may change its input
    if not _same(got, case["output"]):
      raise AssertionError(f"got {_short(got)}, expected {_short(case['output'])}")

  return check


def _same(got: Any, expected: Any) -> bool:
  """Equality of JSON values; a tuple counts as a list, floats may differ by rounding.

  That is by 1e-9 of what is expected, or by 1e-9 from 0.
  """
  if isinstance(got, (list, tuple)) and isinstance(expected, list):
    return len(got) == len(expected) and all(map(_same, got, expected))
  if isinstance(got, dict) and isinstance(expected, dict):
    # JSON has text keys only
    got = {key if isinstance(key, str) else json.dumps(key): value for key, value in got.items()}
    return got.keys() == expected.keys() and all(_same(got[key], expected[key]) for key in got)
  if isinstance(got, float) and isinstance(expected, (int, float)):
    return math.isclose(got, expected, rel_tol=1e-9, abs_tol=0.0 if expected else 1e-9)
  return got == expected


def _stdin_check(program: Program, case: Mapping[str, Any]) -> Callable[[], None]:
  def check() -> None:
    result = program.case(case["input"])
    got, status = str(result["output"]), result["status"]
    if status != 0:
      raise RuntimeError(f"exit status {status}: {str(result['stderr']).strip()}")
    if not same_output(got, case["output"]):
      raise AssertionError(f"got {_short(got)!r}, expected {_short(case['output'])!r}")

  return check


def same_output(got: str, expected: str) -> bool:
  """LiveCodeBench's rule: equal line by line, each stripped, or else as exact decimal numbers."""
  lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (got, expected))
  return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(got: str, expected: str) -> bool:
  if got == expected:
    return True
  numbers = _decimals(got)
  return numbers is not None and numbers == _decimals(expected)


def _decimals(line: str) -> list[decimal.Decimal] | None:
  try:
    return [decimal.Decimal(word) for word in line.split()]
  except decimal.InvalidOperation:
    return None


# --- the program ----------------------------------------------------------------------------------


class Server:
  """The program's end of the channel: answers what the judge asks."""

  def __init__(self, channel: socket.socket, namespace: Mapping[str, Any]):
    self._channel, self._namespace = channel, namespace
    self._objects: list[Any] = []
    self._numbers: dict[int, int] = {}
    plain = (getattr, setattr, operator.getitem, operator.setitem, iter, len, bool, str, repr)
    self._operations: dict[str, Callable] = {function.__name__: function for function in plain}
    self._operations |= {"define": self._define, "next": self._next}

  def serve(self) -> None:
    send(self._channel, {"started": True})
    while True:
      send(self._channel, self._answer(receive(self._channel)))

  def _define(self, names: Sequence[str]) -> dict[str, Any]:
    return {name: self._namespace[name] for name in names if name in self._namespace}

  def _next(self, iterator: Iterator[Any]) -> list[Any]:
    return list(itertools.islice(iterator, 1))

  def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
      operands = self._decode(request["operands"])
      if request["operation"] != "call":
        return {"value": self._encode(self._operations[request["operation"]](*operands))}
      function, args, kwargs = operands
      value = self._encode(function(*args, **kwargs))
      return {"value": value, "changed": self._changed(request["operands"][1][1][1], args)}
    except BaseException as error:
      return error_message(error)

  def _changed(self, before: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """[position, contents] of the mutable arguments that a call has changed."""
    found = []
    for index, (data, value) in enumerate(zip(before, args, strict=True)):
      if isinstance(data, list) and data[0] in _MUTABLE:
        now = self._encode(value)
        if now != data:
          found.append([index, now])
    return found

  def _encode(self, value: Any) -> Any:
    try:
      return encode(value, self._refer)
    except Exception:  # circular, or lying about itself
      return self._refer(value)

  def _refer(self, value: Any) -> list:
    number = self._numbers.setdefault(id(value), len(self._objects))
    if number == len(self._objects):
      self._objects.append(value)  # kept, so that its id stays its own
    return ["handle", number]

  def _decode(self, data: Any) -> Any:
    return decode(data, self._resolve)

  def _resolve(self, tag: str, content: Any) -> Any:
    if tag == "function":
      return lambda *args: self._call_back(content, args)
    if tag == "builtin":
      return getattr(builtins, content)
    if tag == "iterator":
      return iter([self._decode(element) for element in content])
    return self._objects[content]

  def _call_back(self, number: int, args: Sequence[Any]) -> Any:
    send(self._channel, {"callback": number, "arguments": [self._encode(arg) for arg in args]})
    while "operation" in (message := receive(self._channel)):
      send(self._channel, self._answer(message))  # the function itself uses the program
    if "error" in message:
      raise _as_builtin(*message["error"])
    return self._decode(message["value"])


def error_message(error: BaseException) -> dict[str, Any]:
  """What `Program` raises again on the other side."""
  names = [kind.__name__ for kind in type(error).__mro__]
  name = next((name for name in names if hasattr(builtins, name)), names[0])
  text = describe(error)
  return {"error": [name, text.removeprefix(f"{name}: ") if text != name else ""]}


def serve_calls(channel: socket.socket, sources: Sequence[str]) -> None:
  """Runs the program, then answers the judge."""
  _take_streams(channel)
  module = types.ModuleType("solution")
  sys.modules["solution"] = module  # where dataclasses and pickle look
  try:
    for source in sources:
      _execute(source, "<solution>", module.__dict__)
  except BaseException as error:
    send(channel, error_message(error))
    return
  Server(channel, module.__dict__).serve()


def serve_cases(channel: socket.socket, sources: Sequence[str]) -> None:
  """Runs the program once per request, each time in a process of its own."""
  _take_streams(channel)
  send(channel, {"started": True})
  while True:
    send(channel, run_case(receive(channel)["input"], sources))


def run_case(text: str, sources: Sequence[str]) -> dict[str, Any]:
  """Runs the program as a script.

  Returns:
    "output": its standard output; "status": 0 if it ended well; "stderr": the end of that.
  """
  stdin = os.memfd_create("stdin")
  with open(stdin, "wb", closefd=False) as file:
    file.write(text.encode())
  os.lseek(stdin, 0, os.SEEK_SET)
  output_end, output = os.pipe()
  error_end, error = os.pipe()
  process = os.fork()
  if not process:
    with _never_returning():
      _take_streams(None, stdin, output, error)
      _run_script(sources)
  for descriptor in (stdin, output, error):
    os.close(descriptor)
  try:
    printed, complained = _read_until_exit(process, output_end, error_end)
  finally:
    os.close(output_end)
    os.close(error_end)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
  if len(printed) > MAX_OUTPUT:
    status, complained = -1, b"more than the output limit was printed"
  return {
    "output": printed[:MAX_OUTPUT].decode(errors="replace"),
    "status": status,
    "stderr": complained[-MAX_TEXT:].decode(errors="replace"),
  }


def _read_until_exit(process: int, output: int, error: int) -> tuple[bytes, bytes]:
  """What a process writes to two pipes, until it ends or prints too much."""
  printed, complained = bytearray(), bytearray()
  watch = os.pidfd_open(process)
  poll = select.poll()
  for descriptor in (watch, output, error):
    poll.register(descriptor, select.POLLIN)
  for descriptor in (output, error):
    os.set_blocking(descriptor, False)
  ended = False
  while len(printed) <= MAX_OUTPUT:
    ready = [descriptor for descriptor, _ in poll.poll(0 if ended else None)]
    if ended and not ready:
      break
    if watch in ready:
      ended = True
      poll.unregister(watch)
    for descriptor, kept in ((output, printed), (error, complained)):
      if descriptor in ready:
        part = os.read(descriptor, 2**16)
        kept += part
        if not part:
          poll.unregister(descriptor)
    del complained[:-MAX_TEXT]
  os.close(watch)
  return bytes(printed), bytes(complained)


def _run_script(sources: Sequence[str]) -> None:
  """Runs sources as `__main__`, and ends the process as an interpreter would."""
  module = types.ModuleType("__main__")
  sys.modules["__main__"] = module
  status = 0
  try:
    for source in sources:
      _execute(source, "<solution>", module.__dict__)
  except SystemExit as stop:
    status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
  except BaseException as error:
    _print_error(error)
    status = 1
  for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
      thread.join()
  atexit._run_exitfuncs()
  _flush()
  module.__dict__.clear()  # files that the program has left open are written out
  gc.collect()
  _flush()
  os._exit(status & 0xFF)


def _print_error(error: BaseException) -> None:
  """The end of a traceback, without what of it is ours."""
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_globals is globals():
    trace = trace.tb_next
  traceback.print_exception(type(error), error, trace, limit=-3)


def _flush() -> None:
  for stream in filter(None, (sys.stdout, sys.__stdout__, sys.stderr)):
    with contextlib.suppress(Exception):  # it has been closed, or put out of order
      stream.flush()


def _take_streams(
  channel: socket.socket | None, stdin: int | None = None, output: int | None = None,
  error: int | None = None,
) -> None:  # fmt: skip
  """Leaves only the given descriptors open: as standard streams (null for None), and a channel."""
  os.setsid()
  null = os.open(os.devnull, os.O_RDWR)
  for number, descriptor in enumerate((stdin, output, error)):
    os.dup2(null if descriptor is None else descriptor, number)
  kept = 2 if channel is None else channel.fileno()
  os.closerange(3, kept)
  os.closerange(kept + 1, 1024)
  sys.argv[:] = ["solution.py"]
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    file = open(number, "wb" if number else "rb", closefd=False)
    stream = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape")
    vars(sys).update({name: stream, f"__{name}__": stream})


# --- processes, rights and limits -----------------------------------------------------------------

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NAMES, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USERS, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_RECURSIVE_BIND, _PRIVATE, _DETACH = 0x5000, 0x44000, 2
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 36, 38
_CAPABILITIES_VERSION = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442  # of every architecture
_AT_RECURSIVE = 0x8000


def _checked(result: int, action: str) -> None:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{action}: {os.strerror(number)}")


def _system_call(number: int, action: str, *arguments: Any) -> None:
  _checked(_LIBC.syscall(ctypes.c_long(number), *arguments), action)


def _prctl(option: int, value: int) -> None:
  rest = [ctypes.c_ulong(0)] * 3
  _checked(_LIBC.prctl(option, ctypes.c_ulong(value), *rest), f"prctl {option}")


def _unshare(flags: int) -> None:
  _checked(_LIBC.unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
  encoded = [text.encode() if text else None for text in (source, target, kind)]
  arguments = (ctypes.c_ulong(flags), options.encode() or None)
  _checked(_LIBC.mount(*encoded, *arguments), f"mount {source} on {target}")


def _mount_scratch(target: str, mebibytes: int) -> None:
  options = f"size={mebibytes}m,nr_inodes=4096,mode=1777"
  _mount("tmpfs", target, "tmpfs", _NO_SETUID | _NO_DEVICES, options)


def _write(path: str, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)


def _read(path: str) -> str:
  with open(path) as file:
    return file.read()


@contextlib.contextmanager
def _never_returning() -> Iterator[None]:
  """A forked child's whole life is within: it never goes back into the code of its parent."""
  try:
    yield
  except BaseException:
    with contextlib.suppress(BaseException):
      traceback.print_exc()
  finally:
    os._exit(1)


def _new_user_namespace(flags: int, inside: int) -> None:
  """Enters new namespaces in which the present user is called `inside`, with all rights there."""
  user, group = os.geteuid(), os.getegid()
  _unshare(_NEW_USERS | flags)
  _write("/proc/self/setgroups", "deny")
  _write("/proc/self/uid_map", f"{inside} {user} 1")
  _write("/proc/self/gid_map", f"{inside} {group} 1")


def _become_nobody() -> None:
  os.setgroups([])
  os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
  os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
  _prctl(_SET_DUMPABLE, 1)  # lost with the user; /proc/self belongs to root without it


def enter_namespaces(paths: Sequence[str]) -> None:
  """Puts this process, as a fork of itself, into a small world of its own; returns in there.

  No network, no other processes, an empty root with `paths` in it, all read-only, and the rights of
  an ordinary user, also where started by root.
  """
  flags = _NEW_MOUNTS | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC | _NEW_NAMES
  as_root = os.geteuid() == 0
  if as_root:
    try:
      _unshare(flags)
    except PermissionError:  # root of a container, with few rights
      as_root = False
      _become_nobody()
  if not as_root:
    _new_user_namespace(flags, os.geteuid())
  first = os.fork()
  if first:
    with _never_returning():
      os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
  _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
  _build_root(paths)
  if as_root:
    _become_nobody()
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # lost with the user


def _build_root(paths: Sequence[str]) -> None:
  """Makes an empty file system with `paths` of the present one the root, and drops the rest."""
  root = "/sys"  # there everywhere, and not needed
  _mount("none", "/", None, _PRIVATE)
  _mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
  for path in paths:
    _show(path, root)
  for directory in ("/proc", "/tmp", "/dev/shm"):
    os.makedirs(root + directory, exist_ok=True)
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
  _mount("proc", root + "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
  os.chdir(root)
  number = _PIVOT_ROOT.get(platform.machine())
  if number is None:
    raise OSError(f"pivot_root is not known for {platform.machine()!r}: {sorted(_PIVOT_ROOT)}")
  _system_call(number, "pivot_root", b".", b".")
  _checked(_LIBC.umount2(b".", _DETACH), "umount the old root")
  os.chdir("/")
  _set_mount_attributes("/", _READ_ONLY | _NO_SETUID, recursive=False)


def _show(path: str, root: str) -> None:
  """Makes one path of the present file system visible below `root`, read-only."""
  target = root + path
  os.makedirs(os.path.dirname(target), exist_ok=True)
  if os.path.islink(path):
    os.symlink(os.readlink(path), target)
    return
  if os.path.isdir(path):
    os.makedirs(target, exist_ok=True)
  else:
    _write(target, "")
  _mount(path, target, None, _RECURSIVE_BIND)
  is_device = path.startswith("/dev/")
  _set_mount_attributes(target, _NO_SETUID | (0 if is_device else _READ_ONLY | _NO_DEVICES))


def _set_mount_attributes(path: str, attributes: int, recursive: bool = True) -> None:
  """Adds attributes to a mount, and to all below it; Linux 5.12 and later."""
  wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
  flags = _AT_RECURSIVE if recursive else 0
  arguments = (ctypes.c_int(-100), path.encode(), ctypes.c_uint(flags), wanted)
  _system_call(_MOUNT_SETATTR, "mount_setattr", *arguments, ctypes.c_size_t(32))


def _isolate() -> None:
  """For the first process in an item's own namespaces: nothing of other items is there."""
  with contextlib.suppress(OSError):  # no namespaces within namespaces, where we have a say
    _write("/proc/sys/user/max_user_namespaces", "0")
  try:
    _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
  except OSError:  # not allowed where parts of the outer one are hidden
    _mount("tmpfs", "/proc", "tmpfs", _READ_ONLY)
  _mount_scratch("/tmp", SCRATCH_MIB)
  _mount_scratch("/dev/shm", SHARED_MIB)
  os.chdir("/tmp")


def _limit(memory_mib: int, seconds: float) -> None:
  """Limits of each process from here on, and no way to more rights."""
  limits = {
    resource.RLIMIT_AS: memory_mib * 2**20,
    resource.RLIMIT_CPU: math.ceil(seconds) + 1,
    resource.RLIMIT_FSIZE: FILE_MIB * 2**20,
    resource.RLIMIT_NPROC: PROCESSES,
    resource.RLIMIT_NOFILE: OPEN_FILES,
    resource.RLIMIT_STACK: STACK_MIB * 2**20,
    resource.RLIMIT_CORE: 0,
  }
  for kind, value in limits.items():
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # Programs may raise their stack's, as contestants do: it counts as address space.
    resource.setrlimit(kind, (value, hard if kind == resource.RLIMIT_STACK else value))
  with contextlib.suppress(OSError):
    _write("/proc/self/oom_score_adj", "1000")  # where memory runs out, the first to go
  _prctl(_SET_NO_NEW_PRIVILEGES, 1)
  header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
  _system_call(_CAPSET[platform.machine()], "capset", header, (ctypes.c_uint32 * 6)())
  # Neither the program, forked from here, nor anything it starts can trace this process, read its
  # memory, or open its descriptors.
  _prctl(_SET_DUMPABLE, 0)


def _judge_item(item: socket.socket, settings: Mapping[str, Any]) -> None:
  """Life of the judge: from the program's text to the verdict.

  The program can take memory from the judge. So once it runs, whatever goes wrong here counts
  against it, and nothing is read any more.
  """
  started = False
  try:
    if settings["isolated"]:
      _isolate()
    _limit(settings["memory_mib"], settings["time_limit_s"])
    program = receive(item)
    channel, far_end = socket.socketpair()
    if not os.fork():
      with _never_returning():
        _receive_exactly(far_end, 1)
        {"calls": serve_calls, "cases": serve_cases}[program["mode"]](far_end, program["sources"])
    far_end.close()
    task = receive(item)
    started = True
    channel.sendall(b"g")
    verdict = judge(Program(channel), task)
  except BaseException as error:
    if started and not isinstance(error, UnsupportedTestError):
      os._exit(1)  # "died": a verdict that needs no memory
    verdict = {"broken": describe(error)}
  send(item, verdict)


def _supervise(item: socket.socket, settings: Mapping[str, Any]) -> None:
  """Starts an item's judge, and sees to it that nothing of it is left when this returns."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  if settings["isolated"]:
    _new_user_namespace(_NEW_MOUNTS | _NEW_PROCESSES | _NEW_IPC, UNPRIVILEGED)
  else:
    _prctl(_SET_CHILD_SUBREAPER, 1)
  _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
  first = os.fork()
  if not first:
    with _never_returning():
      _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
      os.setsid()
      _judge_item(item, settings)
      os._exit(0)
  verdict = _watch(first, item, settings)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(first, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
  # The first process of its namespace takes all others along, and is gone only after them.
  status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
  if not settings["isolated"]:
    _kill_children()
  if verdict is None and status:
    verdict = {"died": status}
  if verdict is not None:
    send(item, verdict)


def _watch(
  first: int, item: socket.socket, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Waits until the judge ends or its caller hangs up; a verdict where neither comes in time."""
  poll = select.poll()
  poll.register(os.pidfd_open(first), select.POLLIN)
  poll.register(item, 0)  # hanging up is always reported
  deadline = time.monotonic() + settings["time_limit_s"]
  while (left := deadline - time.monotonic()) > 0:
    if poll.poll(1000 * min(left, WATCH_S)):
      return None
    if settings["isolated"] and _resident_mib() > settings["memory_mib"]:
      return {"memory": True}
  return {"timeout": True}


def _resident_mib() -> float:
  """Memory of all processes that this one sees, that of files apart, MiB."""
  pages = 0
  for process in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):  # it has just ended
      _, resident, shared, *_ = map(int, _read(f"/proc/{process}/statm").split())
      pages += resident - shared
  return pages * resource.getpagesize() / 2**20


def _kill_children() -> None:
  """Without a namespace of processes: kills those that have become children of this process."""
  while children := _read(f"/proc/self/task/{os.getpid()}/children").split():
    for child in map(int, children):
      with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)


def launch(control: socket.socket, mechanism: str, paths: Sequence[str]) -> None:
  """Life of the launcher: prepares, says so, and starts items until the caller has gone.

  An item comes as its settings, a JSON object, with a socket for the program, the tests and the
  verdict, in this order.
  """
  os.umask(0o022)
  vars(builtins).update(exit=sys.exit, quit=sys.exit)  # usually there by the module site
  for name in PRELOADED:
    importlib.import_module(name)
  if mechanism == "namespaces":
    enter_namespaces(paths)
  elif mechanism == "bubblewrap" and os.geteuid() == 0:
    _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    _become_nobody()
  control.send(json.dumps({"ready": True}).encode())
  for signal_number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signal_number, signal.SIG_DFL)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need not be waited for
  gc.freeze()
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, _MAX_SETTINGS, 1)
    if not message:
      return
    with socket.socket(fileno=descriptors[0]) as item:
      if not os.fork():
        with _never_returning():
          control.close()
          _supervise(item, json.loads(message))
          os._exit(0)


def main() -> None:
  descriptor, mechanism, *paths = sys.argv[1:]
  control = socket.socket(fileno=int(descriptor))
  try:
    launch(control, mechanism, paths)
  except Exception as error:
    control.send(json.dumps({"error": describe(error)}).encode())


if __name__ == "__main__":
  main()
