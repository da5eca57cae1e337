"""Parses the text of a compiled program: computations, instructions, shapes, convolutions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")


class CostsError(ValueError):
  """What a program costs cannot be said."""


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction of a computation."""

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  arguments: str  # text between the brackets
  text: str  # from the opcode on
  root: bool  # whether it is the result of the computation

  def attribute(self, pattern: str) -> str:
    """The first group of a pattern in the text; "" without a match."""
    match = re.search(pattern, self.text)
    return match.group(1) if match else ""

  @property
  def op_name(self) -> str:
    return self.attribute(r'op_name="([^"]*)"')

  @property
  def calls(self) -> str:
    return self.attribute(r"(?:calls|to_apply)=%?([\w.\-]+)")


Computation = dict[str, Instruction]  # by name, in the order of execution


def parse_program(text: str) -> tuple[dict[str, Computation], str]:
  """Parses a program; returns its computations by name, and the name of the entry.

  Raises:
    CostsError: the text has no ENTRY computation, an open bracket, or an unknown operand.
  """
  computations: dict[str, Computation] = {}
  entry = ""
  current = None
  for line in _join_lines(text):
    if header := _COMPUTATION.match(line) if "->" in line else None:
      current = computations.setdefault(header.group(2), {})
      entry = header.group(2) if header.group(1) else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (match := _INSTRUCTION.match(line)):
      root, name, body = match.groups()
      instruction = _parse_instruction(name, body, bool(root))
      for operand in instruction.operands:
        _add_elements(current, operand)
      current[name] = instruction
  if not entry:
    raise CostsError("the text is not an HLO program: it has no ENTRY computation")
  return computations, entry


def _join_lines(text: str) -> list[str]:
  """Splits a text into lines, one per instruction; joins those that a Pallas call spans."""
  lines: list[str] = []
  for line in text.splitlines():
    if lines and line[:1] in ('"', "}") and line.rstrip() != "}":
      lines[-1] += line
    else:
      lines.append(line)
  return lines


def _parse_instruction(name: str, text: str, root: bool) -> Instruction:
  """Parses the text after the equals sign: shape, opcode, operands, attributes."""
  end = _find_closing_bracket(text, 0) + 1 if text.startswith("(") else text.index(" ")
  shape, rest = text[:end], text[end:].strip()
  opening = rest.index("(")
  arguments = rest[opening + 1 : _find_closing_bracket(rest, opening)]
  # Some versions print an operand's shape before its name.
  operands = re.findall(r"%([^\s,()]+)", arguments)
  return Instruction(name, shape, rest[:opening], tuple(operands), arguments, rest, root)


def _add_elements(computation: Computation, operand: str) -> None:
  """Adds the instruction that newer compilers leave out where an operand is an element, "name#1".

  Raises:
    CostsError: nothing before has the operand's name.
  """
  if operand in computation:
    return
  of, mark, index = operand.rpartition("#")
  if not (mark and index.isdigit()):
    raise CostsError(
      f"the program has an operand %{operand[:200]} that no instruction before it is: the compiler"
      " writes programs in a form that is not known"
    )
  _add_elements(computation, of)
  text = f"get-tuple-element(%{of}), index={index}"
  shape = _tuple_shapes(computation[of].shape)[int(index)]
  computation[operand] = _parse_instruction(operand, f"{shape} {text}", False)


def _tuple_shapes(shape: str) -> list[str]:
  """The shape of every element of a tuple, which may be tuples themselves."""
  shapes, depth, start = [], 0, 1
  for position, letter in enumerate(shape):
    depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
    if (depth == 1 and letter == ",") or depth == 0:
      shapes.append(shape[start:position].strip())
      start = position + 1
  return [re.sub(r"/\*.*?\*/", "", x) for x in shapes]


def _find_closing_bracket(text: str, opening: int) -> int:
  """Returns the position of the bracket that closes the one at `opening`."""
  depth = 0
  for position in range(opening, len(text)):
    depth += {"(": 1, ")": -1}.get(text[position], 0)
    if depth == 0:
      return position
  raise CostsError(f"a bracket does not close: {text[:200]}")


def array_bytes(shape: str, *, hbm: bool = False) -> int:
  """Bytes of all arrays in a shape; with `hbm`, only of arrays in main memory, S(0)."""
  total = 0
  for kind, sizes, layout in _SHAPE.findall(shape):
    elements = math.prod(_sizes(sizes))
    if not (hbm and re.search(r"S\([1-9]", layout)):
      total += -(-elements * _bits(kind) // 8)
  return total


def array_shapes(shape: str) -> list[str]:
  """The shape of every array in a shape."""
  return [match.group() for match in _SHAPE.finditer(shape)]


def dtype(shape: str) -> str:
  """Dtype of the first array in a shape; "" if there is none."""
  match = _SHAPE.search(shape)
  return match.group(1) if match else ""


def dimensions(shape: str) -> list[int]:
  """Sizes of the first array in a shape; [] if there is none."""
  match = _SHAPE.search(shape)
  return _sizes(match.group(2)) if match else []


def _sizes(text: str) -> list[int]:
  return [int(size.removeprefix("<=")) for size in text.split(",") if size]


def _bits(kind: str) -> int:
  """Bits of one element: the number in its dtype's name, as in bf16, s4, c64 and f8e4m3fn."""
  digits = re.match(r"[a-z]+(\d+)", kind)
  return int(digits.group(1)) if digits else {"pred": 8}.get(kind, 0)


def convolution_flops(i: Instruction, left: list[int], right: list[int], out: list[int]) -> int:
  """FLOPs of a convolution: 2 · batch · output features · input features per group · tap pairs.

  TPU compilers write batch dimensions of a matrix product as spatial ones, dilated so that each
  output meets one input. A tap pairs with an input; taps on holes or padding do not count.
  """
  lhs, rhs, result = re.split(r"_|->", i.attribute(r"dim_labels=([\w>\-]+)"))
  window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attribute(r"window=\{([^}]*)\}")))

  def window_field(name: str, spatial: int) -> int:
    default = "0" if name == "pad" else "1"
    values = window[name].split("x") if name in window else [default] * (spatial + 1)
    return int(values[spatial].split("_")[0])

  pairs = 1
  for digit in sorted(set(result) - {"b", "f"}):
    settings = [
      window_field(name, int(digit)) for name in ("stride", "rhs_dilate", "lhs_dilate", "pad")
    ]
    sizes = (x[labels.index(digit)] for x, labels in ((left, lhs), (right, rhs), (out, result)))
    pairs *= _count_pairs(*sizes, *settings)
  batch = out[result.index("b")]
  features = out[result.index("f")]
  return 2 * batch * features * right[rhs.index("i")] * pairs


@functools.cache
def _count_pairs(
  inputs: int, taps: int, outputs: int, stride: int, dilation: int, base_dilation: int, pad: int
) -> int:
  """Counts the pairs (output, tap) along one dimension that meet an input, no hole or padding."""
  end = (inputs - 1) * base_dilation
  return sum(
    0 <= (position := y * stride + k * dilation - pad) <= end and position % base_dilation == 0
    for y in range(outputs)
    for k in range(taps)
  )


def computed_shape(i: Instruction) -> str:
  """The shape of an instruction's result, without the workspace of cuBLAS and cuDNN."""
  if not i.attribute(r'custom_call_target="([^"]*)"').startswith("__cu"):
    return i.shape
  return re.sub(r", [su]8\[\d+\][^,]*\)$", ")", i.shape)


def library_flops(i: Instruction, operands: Sequence[list[int]]) -> int:
  """FLOPs of a call of cuBLAS or of cuDNN's attention; 0 of other calls.

  Args:
    i: a custom call.
    operands: the sizes of its operands. Of attention queries [B, T, N, H] and keys [B, S, K, H],
      whose scores count up to each query's own key if they are causal.
  """
  target = i.attribute(r'custom_call_target="([^"]*)"')
  if target.startswith("__cublas$"):
    contracted = i.attribute(r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    depth = math.prod(operands[0][int(d)] for d in re.findall(r"\d+", contracted))
    return 2 * math.prod(dimensions(i.shape)) * depth
  if target.startswith("__cudnn$fmha"):
    (rows, queries, heads, width), keys = operands[0], operands[1][1]
    products = 5 if target.endswith("Backward") else 2
    scores = rows * heads * queries * ((keys + 1) / 2 if '"CAUSAL"' in i.text else keys)
    return int(2 * products * scores * width)
  return 0
