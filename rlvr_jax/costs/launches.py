"""What a program for a GPU launches, read from XLA's list of its thunks.

A thunk is a kernel, a copy, a library's product, a loop, or a command buffer: many kernels that the
host launches as one. Where the trip count of a loop is known on the device only, the host waits for
it in every iteration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlvr_jax.costs.hlo import LoopLength

_THUNK = re.compile(r"^ *\d+: k(\w+) ")
_BODY = re.compile(r"^( *)body:$")
_CONDITION = re.compile(r"^ *condition:$")
_BUFFER, _LOOP = "CommandBuffer", "While"
_OF_OTHERS = ("Conditional", "DynamicSliceFusion")  # what they launch is listed below them
_TO_HOST = re.compile(r"DeviceToHost|Outfeed|HostSend|HostExecute")


class Body(NamedTuple):
  """What one iteration of a loop, or the program itself, launches; inner loops left out."""

  depth: int  # 0: the program itself
  kernels: int  # kernels, copies and products of libraries, in command buffers or not
  launches: int  # of these, those outside of command buffers, and those of the loop's condition
  command_buffers: int
  copies_to_host: int
  iterations: int | None  # at most; None: the data say
  waits: bool  # whether the host asks the device before every iteration if there is another
  runs: int  # of the body in the program; a loop of unknown length counts as one iteration


def read_launches(text: str, loops: Sequence[LoopLength]) -> list[Body]:
  """The program and its loops, in the order in which they begin.

  Args:
    text: XLA's dump of the thunks, "thunk_sequence_after_thunk_passes".
    loops: from `hlo.find_loops`, in the same order.
  Raises:
    ValueError: the program has another number of loops.
  """
  bodies = [_Counts(depth=0, indent=-1)]
  stack = [bodies[0]]
  pending: list[_Counts] = []  # loops whose body has not begun
  buffer_indent: int | None = None
  in_condition: _Counts | None = None
  for line in text.splitlines():
    indent = len(line) - len(line.lstrip(" "))
    if _CONDITION.match(line):
      in_condition, buffer_indent = pending[-1], None
      continue
    if body := _BODY.match(line):
      entered = pending.pop()
      entered.indent, in_condition, buffer_indent = len(body.group(1)), None, None
      stack.append(entered)
      continue
    if not (thunk := _THUNK.match(line)):
      continue
    kind = thunk.group(1)
    if in_condition is not None:
      in_condition.launches += kind not in (_BUFFER, _LOOP)
      continue
    while indent <= stack[-1].indent:
      stack.pop()
    if buffer_indent is not None and indent <= buffer_indent:
      buffer_indent = None
    now = stack[-1]
    if kind == _LOOP:
      loop = _Counts(depth=len(stack), indent=indent, outer=now)
      bodies.append(loop)
      pending.append(loop)
    elif kind == _BUFFER:
      now.command_buffers += 1
      buffer_indent = indent
    elif kind not in _OF_OTHERS:
      now.kernels += 1
      now.launches += buffer_indent is None
      now.copies_to_host += bool(_TO_HOST.search(kind))
  if len(bodies) - 1 != len(loops):
    raise ValueError(f"the program has {len(loops)} loops, its list of thunks {len(bodies) - 1}")
  for body, loop in zip(bodies[1:], loops, strict=True):
    assert body.outer is not None  # only the program itself has none
    body.iterations, body.waits = loop.at_most, not loop.is_fixed
    body.runs = body.outer.runs * (1 if loop.at_most is None else loop.at_most)
  return [body.finish() for body in bodies]


class _Counts:
  """A `Body` that is being counted."""

  def __init__(self, depth: int, indent: int, outer: _Counts | None = None):
    self.depth, self.indent, self.outer = depth, indent, outer
    self.kernels = self.launches = self.command_buffers = self.copies_to_host = 0
    self.iterations: int | None = 1
    self.waits = False
    self.runs = 1

  def finish(self) -> Body:
    return Body(**{name: getattr(self, name) for name in Body._fields})


def innermost_step(bodies: Sequence[Body]) -> Body:
  """Of a burst, the body of the loop on the token: the one with most kernels."""
  return max((body for body in bodies if body.depth), key=lambda body: body.kernels)


def summarize(bodies: Sequence[Body]) -> dict[str, Any]:
  """Totals of a run of the program; JSON-serializable."""
  return {
    "kernels": sum(body.kernels * body.runs for body in bodies),
    "launches": sum((body.launches + body.command_buffers) * body.runs for body in bodies),
    "loops_that_wait": sum(body.waits for body in bodies),
    "copies_to_host": sum(body.copies_to_host * body.runs for body in bodies),
    "bodies": [body._asdict() for body in bodies],
  }
