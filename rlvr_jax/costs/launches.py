"""The launches of a program for a GPU, read from XLA's list of thunks.

A thunk is a kernel, a copy, a call of a library, a loop, or a command buffer. A command buffer
holds many kernels, which the host launches as one. If only the device knows the trip count of a
loop, the host waits for the device before every iteration.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlvr_jax.costs.hlo import LoopLength

_THUNK = re.compile(r"^ *\d+: k(\w+) ")
_BODY = re.compile(r"^ *body:$")
_CONDITION = re.compile(r"^ *condition:$")
_BUFFER, _LOOP = "CommandBuffer", "While"
_OF_OTHERS = ("Conditional", "DynamicSliceFusion")  # their launches are listed below them
_TO_HOST = re.compile(r"DeviceToHost|Outfeed|HostSend|HostExecute")


class Body(NamedTuple):
  """Counts of launches in one iteration of a loop, or in the program; inner loops are excluded."""

  depth: int  # number of enclosing loops; 0 for the program itself
  kernels: int  # kernels, copies and calls of libraries, in command buffers or not
  launches: int  # `kernels` outside of command buffers, plus all kernels of the loop's condition
  command_buffers: int
  copies_to_host: int
  iterations: int | None  # largest number of iterations; None: it depends on the data
  waits: bool  # whether the host reads the loop's condition from the device before each iteration
  runs: int  # times that the body runs; a loop of unknown length counts as one iteration


def read_launches(text: str, loops: Sequence[LoopLength]) -> list[Body]:
  """The launches of the program, then of each loop, in the order in which the loops begin.

  Args:
    text: XLA's dump of the thunks, "thunk_sequence_after_thunk_passes".
    loops: the result of `hlo.find_loops`, in the same order.
  Raises:
    ValueError: `loops` and the thunks have different numbers of loops.
  """
  counts = [collections.Counter[str]()]  # for the program, then for each loop's body, as they begin
  indents, outer = [-1], [-1]  # per body: indentation of its label; index of its outer body
  stack, pending = [0], list[int]()  # indices of open bodies; of loops whose body follows
  in_condition = False
  buffer_indent: int | None = None
  for line in text.splitlines():
    indent = len(line) - len(line.lstrip(" "))
    if _CONDITION.match(line):
      in_condition, buffer_indent = True, None
    elif _BODY.match(line):
      in_condition, buffer_indent = False, None
      stack.append(pending.pop())
      indents[stack[-1]] = indent
    elif thunk := _THUNK.match(line):
      kind = thunk.group(1)
      if in_condition:
        counts[pending[-1]]["launches"] += kind not in (_BUFFER, _LOOP)
        continue
      while indent <= indents[stack[-1]]:
        stack.pop()
      if buffer_indent is not None and indent <= buffer_indent:
        buffer_indent = None
      now = counts[stack[-1]]
      if kind == _LOOP:
        pending.append(len(counts))
        counts.append(collections.Counter())
        indents.append(indent)
        outer.append(stack[-1])
      elif kind == _BUFFER:
        now["command_buffers"] += 1
        buffer_indent = indent
      elif kind not in _OF_OTHERS:
        now["kernels"] += 1
        now["launches"] += buffer_indent is None
        now["copies_to_host"] += bool(_TO_HOST.search(kind))
  if len(counts) - 1 != len(loops):
    raise ValueError(
      f"the program's text has {len(loops)} loops, but the dump of its thunks has"
      f" {len(counts) - 1}; the two numbers must be equal"
    )
  bodies = list[Body]()
  for number, (count, around) in enumerate(zip(counts, outer, strict=True)):
    loop = loops[number - 1] if number else LoopLength(1, is_fixed=True)
    within = bodies[around] if number else Body(-1, 0, 0, 0, 0, 1, waits=False, runs=1)
    bodies.append(
      Body(
        depth=within.depth + 1,
        kernels=count["kernels"],
        launches=count["launches"],
        command_buffers=count["command_buffers"],
        copies_to_host=count["copies_to_host"],
        iterations=loop.at_most,
        waits=not loop.is_fixed,
        runs=within.runs * (1 if loop.at_most is None else loop.at_most),
      )
    )
  return bodies


def summarize(bodies: Sequence[Body]) -> dict[str, Any]:
  """Totals of a run of the program; JSON-serializable."""
  return {
    "kernels": sum(body.kernels * body.runs for body in bodies),
    "launches": sum((body.launches + body.command_buffers) * body.runs for body in bodies),
    "loops_that_wait": sum(body.waits for body in bodies),
    "copies_to_host": sum(body.copies_to_host * body.runs for body in bodies),
    "bodies": [body._asdict() for body in bodies],
  }
