"""Counts the work of a compiled program on every device, from the compiler's text.

XLA's own `cost_analysis()` counts the body of a loop once, and a Pallas call as zero. `walk` reads
the text of one device's optimized program from its entry. The body of a loop counts once per
iteration. The compiler, or else the caller, states the number of iterations. Without this number
the body counts once, and the report lists the loop. A conditional counts as its most expensive
branch: the branch with the most FLOPs, and among equal branches the one with the most bytes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TRIP_COUNT = r'"known_trip_count":\{"n":"(\d+)"'
# Instructions that move no data, or end a transfer that counts at its start.
_FREE = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
  *("partition-id", "replica-id", "optimization-barrier", "opt-barrier", "get-dimension-size"),
  *("add-dependency", "async-done", "async-update", "send-done", "recv-done"),
}
_FREE_CALLS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"}
_ASYNC_START, _ASYNC_DONE = (f'custom_call_target="AsyncCollective{x}"' for x in ("Start", "Done"))
_IN_PLACE = {"bitcast", "copy", "convert", "reshape"}  # ignored in the search for slices
_SAME_MEMORY = "output_to_operand_aliasing={{}: (0, {})}"  # a fusion that names other tiles
# Compilers write a matrix-vector product as a sum of elementwise products, and keep the product's
# name. Sums of a product's parts have this name too, but their FLOPs are already counted.
_SPLIT = "reduce_sub_computation"
_UNKNOWN_CYCLES = 2.0**62  # newer compilers write the largest integer if there is no estimate
_UNKNOWN_FORM = "cannot parse the compiler's program text, which has an unknown form"


class CostsError(ValueError):
  """The cost of a program cannot be determined."""


class Item(NamedTuple):
  """One instruction; bytes and operations are sums over all its runs."""

  part: str  # the part of the program, by the innermost of the given scopes, or `OTHER`
  opcode: str  # XLA's opcode, one of COLLECTIVES, or OPEN_LOOP: a loop of unknown length
  name: str
  times: int  # number of runs
  flops: float  # FLOPs of matrix products, 2·M·N·K each
  hbm_bytes: float  # bytes read and written outside of the chip's fast memory
  received_bytes: float  # bytes that a collective brings to each device from other devices
  dtype: str  # dtype of the result
  cycles: float  # the compiler's estimate
  target: str  # the target of a custom call, else ""
  op_name: str  # named scopes and operation
  shapes: tuple[str, ...]  # shapes of the operands


class LoopLength(NamedTuple):
  """The largest number of iterations of a loop."""

  at_most: int | None  # None: the number depends on the data
  is_fixed: bool  # whether the number is always the same: the host need not ask the device


def walk(
  text: str, parts: Mapping[str, str], lengths: Mapping[str, int] | None = None
) -> list[Item]:
  """Items of the instructions that cost something, and of the loops of unknown length.

  Args:
    text: optimized HLO of one device.
    parts: part of the program → pattern of a `jax.named_scope` or of a parameter's name.
    lengths: pattern of a loop's op_name → its iterations, if the compiler does not state them.
  Raises:
    CostsError: the text is not a program, or has an unknown form.
  """
  scopes = "|".join(f"(?P<{part}>{pattern})" for part, pattern in parts.items())
  with _of_known_form():
    program = _Program(text, re.compile(rf"\b(?:{scopes})\b"), lengths or {})
    return list(program.items(program.entry, 1, OTHER))


def find_loops(text: str, lengths: Mapping[str, int] | None = None) -> list[LoopLength]:
  """The lengths of all loops of a program, in the order in which they begin.

  Args:
    text, lengths: as for `walk`.
  """
  with _of_known_form():
    program = _Program(text, re.compile("$^"), lengths or {})
    return list(program.loops_within(program.entry))


@contextlib.contextmanager
def _of_known_form() -> Iterator[None]:
  """Context manager that turns errors in reading a program's text into CostsError."""
  try:
    yield
  except CostsError:
    raise
  except (IndexError, KeyError, ValueError) as error:
    raise CostsError(f"{_UNKNOWN_FORM}: {type(error).__name__}: {str(error)[:200]}") from error


# --- text -----------------------------------------------------------------------------------------


class Instruction(NamedTuple):
  """One instruction of a computation."""

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  text: str  # the text after the opcode's bracket: operands, then attributes
  is_root: bool  # whether it is the result of the computation

  def attribute(self, pattern: str) -> str:
    """The first group of a pattern in the text; "" without a match."""
    match = re.search(pattern, self.text)
    return match.group(1) if match else ""

  @property
  def number(self) -> int:
    """The number in the brackets of a parameter or a constant."""
    return int(self.text.partition(")")[0])

  @property
  def op_name(self) -> str:
    return self.attribute(r'op_name="([^"]*)"')

  @property
  def calls(self) -> str:
    return self.attribute(r"(?:calls|to_apply)=%?([\w.\-]+)")

  @property
  def body(self) -> str:
    """The computation that a loop repeats."""
    return self.attribute(r"body=%?([\w.\-]+)")

  @property
  def branches(self) -> list[str]:
    """The computations of a conditional."""
    listed = self.attribute(r"branch_computations=\{([^}]*)\}")
    return re.findall(r"[\w.\-]+", listed) or re.findall(
      r"(?:true_computation|false_computation)=%?([\w.\-]+)", self.text
    )

  @property
  def target(self) -> str:
    """The target of a custom call."""
    return self.attribute(r'custom_call_target="([^"]*)"')


Computation = dict[str, Instruction]  # by name, in order of execution


def parse_program(text: str) -> tuple[dict[str, Computation], str]:
  """The computations of a program by name, and the name of the entry.

  Raises:
    CostsError: the text has no ENTRY computation, or has a line that is not an instruction.
  """
  computations: dict[str, Computation] = {}
  entry, current = "", None
  for line in _join_lines(text):
    if header := _COMPUTATION.match(line):
      current = computations.setdefault(header.group(2), {})
      entry = header.group(2) if header.group(1) else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and " = " in line:
      match = _INSTRUCTION.match(line)
      if match is None:
        raise CostsError(f"{_UNKNOWN_FORM}: {line[:200]}")
      root, name, shape, opcode, rest = match.groups()
      # Some versions print an operand's shape before its name.
      operands = re.findall(r"%([^\s,()]+)", re.split(r"\)(?:, |$)", rest, maxsplit=1)[0])
      current[name] = Instruction(name, shape, opcode, tuple(operands), rest, bool(root))
  if not entry:
    raise CostsError("the text is not an HLO program: it has no ENTRY computation")
  return computations, entry


def _join_lines(text: str) -> list[str]:
  """The program's lines, one per instruction, even if attributes have line breaks."""
  lines: list[str] = []
  for line in text.splitlines():
    if lines and line[:1] in ('"', "}") and line.rstrip() != "}":
      lines[-1] += line
    else:
      lines.append(line)
  return lines


def array_bytes(shape: str, *, hbm: bool = False) -> int:
  """Bytes of all arrays in a shape; with `hbm`, only of arrays in main memory, XLA's S(0)."""
  return sum(
    -(-math.prod(_sizes(sizes)) * _bits(kind) // 8)
    for kind, sizes, layout in _SHAPE.findall(shape)
    if not (hbm and re.search(r"S\([1-9]", layout))
  )


def dimensions(shape: str) -> list[int]:
  """Sizes of the first array in a shape; [] if there is none."""
  match = _SHAPE.search(shape)
  return _sizes(match.group(2)) if match else []


def _sizes(text: str) -> list[int]:
  return [int(size.removeprefix("<=")) for size in text.split(",") if size]


def _bits(kind: str) -> int:
  """The bits of one element: the number in its dtype's name, as in bf16, s4, c64 and f8e4m3fn."""
  digits = re.match(r"[a-z]+(\d+)", kind)
  return int(digits.group(1)) if digits else {"pred": 8}.get(kind, 0)


def _element(shape: str, index: int) -> str:
  """The shape of one element of a tuple, which may be a tuple itself."""
  depth, elements = 0, [""]
  for letter in re.sub(r"/\*.*?\*/", "", shape)[1:-1]:
    depth += (letter in "([{") - (letter in ")]}")
    if depth == 0 and letter == ",":
      elements.append("")
    else:
      elements[-1] += letter
  return elements[index].strip()


# --- the walk -------------------------------------------------------------------------------------


class _Program:
  """A parsed program, with the names of its parts and the lengths of its loops."""

  def __init__(self, text: str, parts: re.Pattern[str], lengths: Mapping[str, int]):
    self.computations, self.entry = parse_program(text)
    self.parts, self.lengths = parts, lengths
    devices = re.search(r"num_partitions=(\d+)", text)
    self.devices = int(devices.group(1)) if devices else 1

  def items(self, computation: str, times: int, part: str) -> Iterator[Item]:
    """Yields the items of a computation that runs `times` times; `part` is the default part."""
    for i in self.computations[computation].values():
      here = next((x.lastgroup for x in reversed([*self.parts.finditer(i.op_name)])), None) or part
      if i.opcode == "while":
        length = self._length(computation, i)
        if length is None:
          yield Item(here, OPEN_LOOP, i.name, times, 0.0, 0.0, 0.0, "", 0.0, "", i.op_name, ())
        yield from self.items(i.body, times * (1 if length is None else length), here)
      elif i.opcode == "conditional":
        branches = (list(self.items(branch, times, here)) for branch in i.branches)
        yield from max(branches, key=_cost)
      elif i.opcode in ("call", "async-start") and i.calls:
        yield from self.items(i.calls, times, here)
      elif i.opcode in _FREE or i.opcode.endswith("-done") or i.target in _FREE_CALLS:
        continue
      else:
        yield self._item(computation, i, times, here)

  def loops_within(self, computation: str) -> Iterator[LoopLength]:
    """Yields the loops of a computation, each before the loops within its body."""
    for i in self.computations[computation].values():
      if i.opcode == "while":
        yield LoopLength(self._length(computation, i), bool(i.attribute(_TRIP_COUNT)))
        yield from self.loops_within(i.body)
      elif i.opcode == "conditional":
        for branch in i.branches:
          yield from self.loops_within(branch)
      elif i.opcode in ("call", "async-start") and i.calls:
        yield from self.loops_within(i.calls)

  def _length(self, computation: str, i: Instruction) -> int | None:
    """Iterations of a loop; None if neither the compiler nor the caller states them."""
    if stated := i.attribute(_TRIP_COUNT):
      return int(stated)
    if (counted := self._counted_length(computation, i)) is not None:
      return counted
    return next((n for name, n in self.lengths.items() if re.search(name, i.op_name)), None)

  def _counted_length(self, computation: str, i: Instruction) -> int | None:
    """Iterations of a loop whose counter rises by one from one constant to another; else None.

    jax makes such loops, and the compiler for TPUs does not state their lengths.
    """
    condition = self.computations[i.attribute(r"condition=%?([\w.\-]+)")]
    before = self.computations[computation]
    start = before.get(i.operands[0])
    for outer in condition.values():
      inner = self.computations[outer.calls] if outer.opcode == "fusion" else {outer.name: outer}
      for compare in inner.values():
        if compare.opcode != "compare" or "direction=LT" not in compare.text:
          continue
        of_fusion = {
          name: outer.operands[inner[name].number]
          for name in compare.operands
          if name in inner and inner[name].opcode == "parameter"
        }
        counter, limit = (of_fusion.get(name, name) for name in compare.operands)
        index = _element_index(condition, counter)
        last = _constant(condition if limit in condition else inner, limit)
        if index is not None and last is not None and start is not None and start.opcode == "tuple":
          first = _constant(before, start.operands[index])
          return None if first is None else max(0, last - first)
    return None

  def _item(self, computation: str, i: Instruction, times: int, part: str) -> Item:
    opcode, received = i.opcode.removesuffix("-start"), 0.0
    for kind, count in self._collectives(computation, i):
      opcode, received = kind, received + count
    cycles = float(i.attribute(r'"estimated_cycles":"(\d+)"') or 0)
    first = _SHAPE.search(i.shape)
    return Item(
      part=part,
      opcode=opcode,
      name=i.name,
      times=times,
      flops=float(self._flops(computation, i)) * times,
      hbm_bytes=float(self._hbm_bytes(computation, i)) * times,
      received_bytes=received * times,
      dtype=first.group(1) if first else "",
      cycles=cycles * times if cycles < _UNKNOWN_CYCLES else 0.0,
      target=i.target,
      op_name=i.op_name,
      shapes=tuple(self._shapes(computation, i)),
    )

  def _shapes(self, computation: str, i: Instruction) -> list[str]:
    """The shapes of an instruction's operands."""
    return [self._shape(computation, name) for name in i.operands]

  def _shape(self, computation: str, name: str) -> str:
    """The shape of a value; newer compilers write "name#1" for an element of a tuple."""
    if instruction := self.computations[computation].get(name):
      return instruction.shape
    of, mark, index = name.rpartition("#")
    if not mark:
      raise CostsError(f"{_UNKNOWN_FORM}: no earlier instruction defines the operand %{name[:200]}")
    return _element(self._shape(computation, of), int(index))

  # --- FLOPs --------------------------------------------------------------------------------------

  def _flops(self, computation: str, i: Instruction) -> int:
    if i.opcode == "fusion":
      return sum(self._flops(i.calls, inner) for inner in self.computations[i.calls].values())
    is_sum = i.opcode == "reduce" and i.op_name.endswith("/dot_general") and _SPLIT not in i.calls
    if not is_sum and i.opcode not in ("dot", "convolution", "custom-call"):
      return 0
    operands = [dimensions(shape) for shape in self._shapes(computation, i)]
    if i.opcode == "custom-call":
      return _library_flops(i, operands)
    if is_sum:
      return 2 * math.prod(operands[0])
    out = dimensions(i.shape)
    if i.opcode == "dot":
      contracted = i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
      return 2 * math.prod(out) * math.prod(operands[0][int(d)] for d in contracted.split(",") if d)
    return _convolution_flops(i, operands[0], operands[1], out)

  # --- collectives --------------------------------------------------------------------------------

  def _collectives(self, computation: str, i: Instruction) -> Iterator[tuple[str, float]]:
    """Yields (kind, bytes each device receives) of the collectives in an instruction or fusion."""
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
    sent = sum(map(array_bytes, self._shapes(computation, i)))
    if kind == "collective-permute":
      yield kind, float(sent)
      return
    n = self._group_size(i)
    yield kind, sent * {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)

  def _continued_names(self, computation: str) -> set[str]:
    """Names of the collectives that a fusion continues or ends, but does not start.

    Compilers for some TPUs run a collective piece by piece within the fusions between its start and
    its end. Each of these fusions contains the complete instruction, which counts only at the
    start.
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
    shapes = self._shapes(computation, i)
    operands = [array_bytes(shape, hbm=True) for shape in shapes]
    result = array_bytes(_written_shape(i), hbm=True)
    if i.opcode == "fusion":
      read, written = self._fused_bytes(i.calls)
      operands = [min(size, read.get(n, size)) for n, size in enumerate(operands)]
      results = [array_bytes(x.group(), hbm=True) for x in _SHAPE.finditer(i.shape)]
      return int(sum(operands) + sum(map(min, results, written)))
    if i.opcode in ("dynamic-slice", "slice", "gather"):  # reads only the slice
      return min(operands[0], array_bytes(i.shape)) + result
    if i.opcode == "dynamic-update-slice":
      return operands[1] + min(result, array_bytes(shapes[1]))
    if i.opcode == "scatter":
      return sum(operands[1:]) + 2 * operands[-1]
    if i.opcode.endswith("-start"):  # the result contains the operands
      return result
    return result + sum(operands)

  def _fused_bytes(self, computation: str) -> tuple[dict[int, int], list[float]]:
    """Bytes that a fusion reads and writes.

    Returns:
      A mapping from the index of each parameter that is read only in part to the bytes read, and a
      list of upper bounds of the bytes written, one for each result array.
    """
    instructions = self.computations[computation]
    continued = self._continued_names(computation)
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for i in instructions.values():
      for position, name in enumerate(i.operands):
        users.setdefault(name, []).append((i, position))

    def bytes_used(i: Instruction) -> int | None:
      """Bytes of a value that its users read; None if they read all."""
      total = 0
      for user, position in users.get(i.name, []):
        used = None
        if user.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
          used = array_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and position == 0:
          used = 0
        elif user.name in continued or (continued and user.is_root):  # passed on unread
          used = 0
        elif (user.opcode in _IN_PLACE or _SAME_MEMORY in user.text) and not user.is_root:
          used = bytes_used(user)
        elif user.opcode == "fusion":
          used = self._fused_bytes(user.calls)[0].get(position)
        if used is None:
          return None
        total += used
      return None if i.is_root else total

    read = {
      i.number: used
      for i in instructions.values()
      if i.opcode == "parameter" and (used := bytes_used(i)) is not None
    }
    root = next(i for i in instructions.values() if i.is_root)
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
      written += [limit] * len(_SHAPE.findall(result.shape))
    return read, written


def _element_index(computation: Computation, name: str) -> int | None:
  """The index of a value that is an element of a tuple parameter; None for any other value."""
  of, _, index = name.rpartition("#")
  if name in computation and computation[name].opcode == "get-tuple-element":
    of, index = computation[name].operands[0], computation[name].attribute(r"index=(\d+)")
  is_element = of in computation and computation[of].opcode == "parameter"
  return int(index) if is_element else None


def _constant(computation: Computation, name: str) -> int | None:
  """The number of an integer constant, or of a copy of one; None for other values."""
  i = computation.get(name)
  while i is not None and i.opcode == "copy":
    i = computation.get(i.operands[0])
  is_integer = i is not None and i.opcode == "constant" and re.match(r"[su]\d+\[\]", i.shape)
  return i.number if i is not None and is_integer else None


def _cost(items: list[Item]) -> tuple[float, float]:
  return sum(i.flops for i in items), sum(i.hbm_bytes + i.received_bytes for i in items)


def _convolution_flops(
  i: Instruction, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> int:
  """FLOPs of a matrix product that a TPU's compiler writes as a convolution.

  Each spatial dimension of the convolution is a dimension of the product: it has the same size in
  two or all three of the arrays, and size 1 in the others. Multiplications by the zeros of
  padding, or by those between the elements of a dilated array, do not count.
  """
  lhs, rhs, result = re.split(r"_|->", i.attribute(r"dim_labels=([\w>\-]+)"))
  pairs = math.prod(
    max(left[lhs.index(d)], right[rhs.index(d)], out[result.index(d)])
    for d in set(result) - {"b", "f"}
  )
  return 2 * out[result.index("b")] * out[result.index("f")] * right[rhs.index("i")] * pairs


def _written_shape(i: Instruction) -> str:
  """The shape of an instruction's result, without the workspace buffer of cuBLAS or cuDNN."""
  return re.sub(r", [su]8\[\d+\][^,]*\)$", ")", i.shape) if i.target.startswith("__cu") else i.shape


def _library_flops(i: Instruction, operands: Sequence[Sequence[int]]) -> int:
  """FLOPs of a call of cuBLAS or of cuDNN's attention; 0 for other calls.

  If attention is causal, a query's scores with later keys are not counted.

  Args:
    i: a custom call.
    operands: the sizes of its operands; attention has queries [B, T, N, H], keys [B, S, K, H], ….
  """
  if i.target.startswith("__cublas$"):
    contracted = i.attribute(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    depth = math.prod(operands[0][int(d)] for d in re.findall(r"\d+", contracted))
    return 2 * math.prod(dimensions(i.shape)) * depth
  if i.target.startswith("__cudnn$fmha"):
    (rows, queries, heads, width), keys = operands[0], operands[1][1]
    products = 5 if i.target.endswith("Backward") else 2
    scores = rows * heads * queries * ((keys + 1) / 2 if '"CAUSAL"' in i.text else keys)
    return int(2 * products * scores * width)
  return 0
