"""Costs of a compiled program on every device, counted from its text, loops included.

XLA's own `cost_analysis()` counts the body of a loop once, and a Pallas call as zero. `walk` reads
the text of the optimized program (`jax.stages.Compiled.as_text()`, for one device) from its entry.
The body of a loop counts once for each of its maximum number of iterations. A conditional counts as
its most expensive branch: the one with the most FLOPs, then the most bytes. For a loop whose length
depends on the data, the caller gives the number of iterations; otherwise its body counts once, and
the loop is an item of its own.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlvr_jax.costs.hlo_text import (
  CostsError,
  Instruction,
  array_bytes,
  array_shapes,
  computed_shape,
  convolution_flops,
  dimensions,
  dtype,
  library_flops,
  parse_program,
)

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
)
OTHER = "other"  # part of instructions outside of all named scopes
OPEN_LOOP = "while"  # opcode of the item of a loop of unknown length

_TRIP_COUNT = r'"known_trip_count":\{"n":"(\d+)"'
_BRANCH = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)")
# Instructions that move no data, or whose transfer counts at the instruction that starts it.
_FREE = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
  *("partition-id", "replica-id", "optimization-barrier", "opt-barrier", "get-dimension-size"),
  *("add-dependency", "async-done", "async-update", "send-done", "recv-done"),
}
_ASYNC_START, _ASYNC_DONE = (f'custom_call_target="AsyncCollective{x}"' for x in ("Start", "Done"))
_FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"}
_SCALAR: dict[str, Callable[..., int]] = {
  **dict.fromkeys(("copy", "bitcast", "convert"), lambda x: x),
  **{"add": operator.add, "subtract": operator.sub, "multiply": operator.mul},
  **{"minimum": min, "maximum": max},
}
_IN_PLACE = {"bitcast", "copy", "convert", "reshape"}  # ignored in the search for slices
_SAME_MEMORY = "output_to_operand_aliasing={{}: (0, {})}"  # a fusion that names other tiles

# Compilers write a product with a single vector as a sum of elementwise products, which keeps its
# name. So do sums of a product's parts, whose FLOPs count already.
_SPLIT = "reduce_sub_computation"
_UNKNOWN_CYCLES = 2.0**62  # newer compilers write the largest integer if there is no estimate


class Item(NamedTuple):
  """One instruction; bytes and operations are sums over all its runs."""

  part: str  # the innermost of the given scopes, or `OTHER`
  opcode: str  # one of COLLECTIVES for a collective; OPEN_LOOP for a loop of unknown length
  name: str
  times: int  # number of runs
  flops: float  # of matrix products, 2·M·N·K each
  hbm_bytes: float  # read and written outside of the chip's fast memory
  received_bytes: float  # of a collective: received by each device from other devices
  dtype: str  # of the result
  cycles: float  # the compiler's estimate
  target: str  # of a custom call
  op_name: str  # named scopes and operation
  shapes: tuple[str, ...]  # of the operands


# Known integers among the elements of a tuple or the parameters of a fusion; None if unknown.
_Values = list[int | None]


class _Loop(NamedTuple):
  length: int | None  # iterations; None if it depends on the data
  constants: _Values  # elements of the loop's tuple that no iteration changes
  results: _Values  # elements of the loop's tuple after the last iteration


def walk(
  text: str, parts: Mapping[str, str], lengths: Mapping[str, int] | None = None
) -> list[Item]:
  """Lists every instruction of a program with a cost, and every loop of unknown length.

  Args:
    text: optimized HLO of one device.
    parts: part of the program → pattern of a `jax.named_scope` or of a parameter's name.
    lengths: iterations of loops whose length depends on the data, by a pattern of their op_name.
  Raises:
    CostsError: the text is not a program, or has replica groups of unknown form.
  """
  scopes = "|".join(f"(?P<{part}>{pattern})" for part, pattern in parts.items())
  with _of_known_form():
    program = _Program(text, re.compile(rf"\b(?:{scopes})\b"), lengths or {})
    return list(program.items(program.entry, 1, OTHER, None))


@contextlib.contextmanager
def _of_known_form() -> Iterator[None]:
  """Context that raises CostsError where a program cannot be read."""
  try:
    yield
  except CostsError:
    raise
  except (IndexError, KeyError, ValueError) as error:
    raise CostsError(
      "the compiler writes programs in a form that is not known:"
      f" {type(error).__name__}: {str(error)[:200]}"
    ) from error


class LoopLength(NamedTuple):
  """Iterations of a loop, at most."""

  at_most: int | None  # None: it depends on the data
  is_fixed: bool  # whether it never ends earlier, so that the host need not ask


def find_loops(text: str, lengths: Mapping[str, int] | None = None) -> list[LoopLength]:
  """All loops, in the order in which they begin.

  Args:
    text, lengths: as for `walk`.
  """
  with _of_known_form():
    program = _Program(text, re.compile("$^"), lengths or {})
    return list(program.loops_within(program.entry, None))


class _Program:
  """A parsed program, its parts, and the loops found so far."""

  def __init__(self, text: str, parts: re.Pattern[str], lengths: Mapping[str, int]):
    self.computations, self.entry = parse_program(text)
    self.parts, self.lengths = parts, lengths
    devices = re.search(r"num_partitions=(\d+)", text)
    self.devices = int(devices.group(1)) if devices else 1
    self.loops: dict[Any, _Loop] = {}

  # --- the walk -----------------------------------------------------------------------------------

  def items(self, computation: str, times: int, part: str, known: _Values | None) -> Iterator[Item]:
    """Yields the items of a computation that runs `times` times.

    Args:
      computation: name of the computation.
      times: number of runs.
      part: part of the program for instructions outside of all named scopes.
      known: known elements of the computation's tuple parameter; None if there are none.
    """
    for i in self.computations[computation].values():
      here = next((x.lastgroup for x in reversed([*self.parts.finditer(i.op_name)])), None) or part
      if i.opcode == "while":
        loop = self._loop(computation, i, known)
        body = i.attribute(r"body=%?([\w.\-]+)")
        if loop.length is None:
          yield Item(here, OPEN_LOOP, i.name, times, 0.0, 0.0, 0.0, "", 0.0, "", i.op_name, ())
        length = 1 if loop.length is None else loop.length
        yield from self.items(body, times * length, here, loop.constants)
      elif i.opcode == "conditional":
        branches = (list(self.items(branch, times, here, None)) for branch in _branches(i))
        yield from max(branches, key=_cost)
      elif i.opcode in ("call", "async-start") and i.calls:
        yield from self.items(i.calls, times, here, None)
      elif i.opcode not in _FREE and not i.opcode.endswith("-done"):
        yield from self._item(computation, i, times, here)

  def loops_within(self, computation: str, known: _Values | None) -> Iterator[LoopLength]:
    """Yields the loops of a computation, each before those of its body."""
    for i in self.computations[computation].values():
      if i.opcode == "while":
        loop = self._loop(computation, i, known)
        yield LoopLength(loop.length, bool(i.attribute(_TRIP_COUNT)))
        yield from self.loops_within(i.attribute(r"body=%?([\w.\-]+)"), loop.constants)
      elif i.opcode == "conditional":
        for branch in _branches(i):
          yield from self.loops_within(branch, None)
      elif i.opcode in ("call", "async-start") and i.calls:
        yield from self.loops_within(i.calls, None)

  def _item(self, computation: str, i: Instruction, times: int, part: str) -> Iterator[Item]:
    target = i.attribute(r'custom_call_target="([^"]*)"')
    if target in _FREE_CALLS:
      return
    flops = float(self._flops(computation, i))
    received = 0.0
    opcode = i.opcode.removesuffix("-start")
    for kind, count in self._collectives(computation, i):
      opcode, received = kind, received + count
    cycles = float(i.attribute(r'"estimated_cycles":"(\d+)"') or 0)
    if cycles >= _UNKNOWN_CYCLES:
      cycles = 0.0
    yield Item(
      part=part,
      opcode=opcode,
      name=i.name,
      times=times,
      flops=flops * times,
      hbm_bytes=float(self._hbm_bytes(computation, i)) * times,
      received_bytes=received * times,
      dtype=dtype(i.shape),
      cycles=cycles * times,
      target=target,
      op_name=i.op_name,
      shapes=tuple(self._shape(computation, name) for name in i.operands),
    )

  def _shape(self, computation: str, name: str) -> str:
    instruction = self.computations[computation].get(name)
    return instruction.shape if instruction else ""

  # --- FLOPs --------------------------------------------------------------------------------------

  def _flops(self, computation: str, i: Instruction) -> int:
    if i.opcode == "fusion":
      return sum(self._flops(i.calls, inner) for inner in self.computations[i.calls].values())
    if i.opcode == "custom-call":
      operands = [dimensions(self._shape(computation, name)) for name in i.operands]
      return library_flops(i, operands)
    if i.opcode == "reduce" and i.op_name.endswith("/dot_general") and _SPLIT not in i.calls:
      return 2 * math.prod(dimensions(self._shape(computation, i.operands[0])))
    if i.opcode not in ("dot", "convolution"):
      return 0
    left, right = (dimensions(self._shape(computation, name)) for name in i.operands[:2])
    out = dimensions(i.shape)
    if i.opcode == "dot":
      contracted = i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
      return 2 * math.prod(out) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    return convolution_flops(i, left, right, out)

  # --- collectives --------------------------------------------------------------------------------

  def _collectives(self, computation: str, i: Instruction) -> Iterator[tuple[str, float]]:
    """Yields (kind, bytes each device receives) for an instruction and those fused into it."""
    if i.opcode == "fusion":
      is_reduce_scatter = "all-reduce-scatter" in i.name + i.calls
      continued = self._continued_names(i.calls)
      for inner in self.computations[i.calls].values():
        if inner.name in continued:
          continue
        for kind, received in self._collectives(i.calls, inner):
          if is_reduce_scatter and kind == "all-reduce":
            kind, received = "reduce-scatter", received / 2
          yield kind, received
      return
    kind = i.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
      return
    sent = sum(array_bytes(self._shape(computation, name)) for name in i.operands)
    if kind == "collective-permute":
      yield kind, float(sent)
      return
    n = self._group_size(i)
    yield kind, sent * {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)

  def _continued_names(self, computation: str) -> set[str]:
    """Names of the collectives that a fusion continues or ends, besides its own work.

    Compilers for some TPUs run a collective piece by piece within the fusions between its start and
    its end. Each of these contains the complete instruction, which counts only at its start.
    """
    instructions = self.computations[computation].values()
    if any(_ASYNC_START in i.text for i in instructions):
      return set()
    return {i.name for i in instructions if "async_collective_fusion_config" in i.text}

  def _group_size(self, i: Instruction) -> int:
    """Number of devices in one group of a collective, in any of XLA's three notations."""
    if explicit := re.search(r"replica_groups=\{(?:\{([\d,]*)\})?", i.text):
      return len(explicit.group(1).split(",")) if explicit.group(1) else self.devices
    if iota := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", i.text):
      return int(iota.group(1))
    by_axes = re.search(r"replica_groups=@?mesh\w*\[([^\]]*)\][^{]*\{([^}]*)\}", i.text)
    if not by_axes:
      raise CostsError(f"replica groups of {i.name} have an unknown form: {i.text[:200]}")
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", by_axes.group(1))}
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", by_axes.group(2))
    return math.prod(int(part) if part else sizes[axis] for axis, part in axes)

  # --- memory -------------------------------------------------------------------------------------

  def _hbm_bytes(self, computation: str, i: Instruction) -> float:
    operands = [array_bytes(self._shape(computation, x), hbm=True) for x in i.operands]
    result = array_bytes(computed_shape(i), hbm=True)
    if i.opcode == "fusion":
      read, written = self._fused_bytes(i.calls)
      operands = [min(size, read.get(n, size)) for n, size in enumerate(operands)]
      results = [array_bytes(shape, hbm=True) for shape in array_shapes(i.shape)]
      return int(sum(operands) + sum(map(min, results, written)))
    if i.opcode in ("dynamic-slice", "slice", "gather"):  # reads only the slice
      return min(operands[0], array_bytes(i.shape)) + result
    if i.opcode == "dynamic-update-slice":
      return operands[1] + min(result, array_bytes(self._shape(computation, i.operands[1])))
    if i.opcode == "scatter":
      return sum(operands[1:]) + 2 * operands[-1]
    if i.opcode.endswith("-start"):  # the result contains the operands
      return result
    return result + sum(operands)

  def _fused_bytes(self, computation: str) -> tuple[dict[int, int], list[float]]:
    """Bytes that a fusion reads and writes.

    Returns:
      (index → bytes read, of each parameter that is read in part, upper bounds of the bytes written
      for each result).
    """
    instructions = self.computations[computation]
    continued = self._continued_names(computation)
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for i in instructions.values():
      for position, name in enumerate(i.operands):
        users.setdefault(name, []).append((i, position))

    def bytes_used(i: Instruction) -> int | None:
      """Bytes of a value that its users read; None for all."""
      total = 0
      for user, position in users.get(i.name, []):
        used = None
        if user.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
          used = array_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and position == 0:
          used = 0
        elif user.name in continued or (continued and user.root):  # passed on unread
          used = 0
        elif (user.opcode in _IN_PLACE or _SAME_MEMORY in user.text) and not user.root:
          used = bytes_used(user)
        elif user.opcode == "fusion":
          used = self._fused_bytes(user.calls)[0].get(position)
        if used is None:
          return None
        total += used
      return None if i.root else total

    read = {
      int(i.arguments): used
      for i in instructions.values()
      if i.opcode == "parameter" and (used := bytes_used(i)) is not None
    }
    root = next(i for i in instructions.values() if i.root)
    results = [instructions[x] for x in root.operands] if root.opcode == "tuple" else [root]
    written = []
    for result in results:
      while result.opcode in _IN_PLACE and result.operands:
        result = instructions[result.operands[0]]
      limit: float = math.inf
      if result.opcode == "dynamic-update-slice":
        limit = array_bytes(self._shape(computation, result.operands[1]))
      passed_on = result.name in continued or (continued and result.opcode == "parameter")
      if passed_on or _ASYNC_DONE in result.text:
        limit = 0
      written += [limit] * len(array_shapes(result.shape))
    return read, written

  # --- loops --------------------------------------------------------------------------------------

  def _loop(self, computation: str, i: Instruction, known: _Values | None) -> _Loop:
    """The length and results of a `while`; cached, since later loops may depend on them."""
    key = (computation, i.name, None if known is None else tuple(known))
    if key not in self.loops:
      before, after = self._first_iteration(computation, i, known)
      length = self._length(i, before, after)
      pairs = list(zip(before, after, strict=True))
      constants = [a if a == b else None for a, b in pairs]
      results = constants
      if length is not None:
        results = [None if a is None or b is None else a + (b - a) * length for a, b in pairs]
      self.loops[key] = _Loop(length, constants, results)
    return self.loops[key]

  def _length(self, i: Instruction, before: _Values, after: _Values) -> int | None:
    if trip_count := i.attribute(_TRIP_COUNT):
      return int(trip_count)
    condition = i.attribute(r"condition=%?([\w.\-]+)")
    for first, limit, step in self._bounds(condition, before, after):
      return max(0, -(-(limit - first) // step))
    return next((n for name, n in self.lengths.items() if re.search(name, i.op_name)), None)

  def _first_iteration(self, computation, i, known) -> tuple[_Values, _Values]:
    """The known elements of a loop's tuple before and after its first iteration."""
    body = i.attribute(r"body=%?([\w.\-]+)")
    root = next(x for x in self.computations[body].values() if x.root)
    before = self._elements(computation, i.operands[0], known)
    if root.opcode != "tuple":
      return before, [None] * len(before)
    before = before + [None] * (len(root.operands) - len(before))
    return before, [self._value(body, name, before) for name in root.operands]

  def _bounds(
    self, computation: str, before: _Values, after: _Values
  ) -> Iterator[tuple[int, int, int]]:
    """Yields (first, limit, step) for every comparison with a changing value in a condition."""
    for i in self.computations[computation].values():
      if i.opcode == "fusion":
        inner = [[self._value(computation, x, env) for x in i.operands] for env in (before, after)]
        yield from self._bounds(i.calls, *inner)
      if i.opcode != "compare":
        continue
      sides = [self._value(computation, x, env) for x in i.operands for env in (before, after)]
      numbers = [x for x in sides if x is not None]
      if len(numbers) < 4:
        continue
      a, a_next, b, b_next = numbers
      direction = i.attribute(r"direction=(\w+)")
      sign = 1 if direction in ("LT", "LE", "NE") else -1  # a grows to b, or falls to b
      step = sign * ((a_next - a) - (b_next - b))
      if step > 0:
        yield sign * a, sign * b + (direction in ("LE", "GE")), step

  def _elements(self, computation: str, name: str, known: _Values | None) -> _Values:
    """Known values of a tuple's elements."""
    i = self.computations[computation][name]
    if i.opcode == "tuple":
      return [self._value(computation, x, known) for x in i.operands]
    if i.opcode == "parameter":
      return known or []
    if i.opcode == "while":
      return self._loop(computation, i, known).results
    return self._elements(computation, i.operands[0], known) if i.opcode == "copy" else []

  def _value(self, computation: str, name: str, known: _Values | None) -> int | None:
    """The value of an integer scalar that does not depend on data; None if unknown."""
    i = self.computations[computation].get(name)
    if i is None or not re.match(r"[su]\d+\[\]", i.shape):
      return None
    if i.opcode == "constant":
      return int(i.arguments)
    if i.opcode == "get-tuple-element":
      elements = self._elements(computation, i.operands[0], known)
      index = int(i.attribute(r"index=(\d+)"))
      return elements[index] if index < len(elements) else None
    if i.opcode == "parameter":  # of a fusion; a computation has a tuple instead
      position = int(i.arguments)
      return known[position] if known and position < len(known) else None
    values = [self._value(computation, x, known) for x in i.operands]
    if i.opcode == "fusion":
      root = next(x for x in self.computations[i.calls].values() if x.root)
      return self._value(i.calls, root.name, values)
    numbers = [x for x in values if x is not None]
    if len(numbers) < len(values) or i.opcode not in _SCALAR:
      return None
    return _SCALAR[i.opcode](*numbers)


def _branches(conditional: Instruction) -> list[str]:
  """Names of the computations of a conditional."""
  listed = conditional.attribute(r"branch_computations=\{([^}]*)\}")
  return re.findall(r"[\w.\-]+", listed) or _BRANCH.findall(conditional.text)


def _cost(items: list[Item]) -> tuple[float, float]:
  return sum(i.flops for i in items), sum(i.hbm_bytes + i.received_bytes for i in items)
