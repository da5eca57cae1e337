"""The text of a compiled program as data: computations, instructions, shapes, products."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  arguments: str  # the text between the brackets
  text: str  # from the opcode on
  root: bool

  def attribute(self, pattern: str) -> str:
    found = re.search(pattern, self.text)
    return found.group(1) if found else ""

  @property
  def op_name(self) -> str:
    return self.attribute(r'op_name="([^"]*)"')

  @property
  def calls(self) -> str:
    return self.attribute(r"(?:calls|to_apply)=%?([\w.\-]+)")


Computation = dict[str, Instruction]  # in the order of execution


def parsed(text: str) -> tuple[dict[str, Computation], str]:
  """(computations by name, the entry's name)."""
  computations: dict[str, Computation] = {}
  entry, current = "", None
  for line in _lines(text):
    if header := _COMPUTATION.match(line) if "->" in line else None:
      current = computations.setdefault(header.group(2), {})
      entry = header.group(2) if header.group(1) else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (found := _INSTRUCTION.match(line)):
      current[found.group(2)] = _instruction(found.group(2), found.group(3), bool(found.group(1)))
  if not entry:
    raise ValueError("the text is not an HLO program: it has no ENTRY computation")
  return computations, entry


def _lines(text: str) -> list[str]:
  """Splits a text into lines, one per instruction: attributes of a Pallas call span several."""
  lines: list[str] = []
  for line in text.splitlines():
    if lines and line[:1] in ('"', "}") and line.rstrip() != "}":
      lines[-1] += line
    else:
      lines.append(line)
  return lines


def _instruction(name: str, text: str, root: bool) -> Instruction:
  """Parses the text after the equals sign: shape, opcode, operands, attributes."""
  end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
  shape, rest = text[:end], text[end:].strip()
  opening = rest.index("(")
  arguments = rest[opening + 1 : _closing(rest, opening)]
  # Some versions print an operand's shape before its name.
  operands = re.findall(r"%([\w.\-]+)", arguments)
  return Instruction(name, shape, rest[:opening], tuple(operands), arguments, rest, root)


def _closing(text: str, opening: int) -> int:
  """The position of the bracket that closes the one at `opening`."""
  depth = 0
  for position in range(opening, len(text)):
    depth += {"(": 1, ")": -1}.get(text[position], 0)
    if depth == 0:
      return position
  raise ValueError(f"a bracket does not close: {text[:200]}")


def array_bytes(shape: str, *, hbm: bool = False) -> int:
  """Bytes of all arrays in a shape; with `hbm` only of those in the chip's main memory, S(0)."""
  total = 0
  for kind, sizes, layout in _SHAPE.findall(shape):
    elements = math.prod(_sizes(sizes))
    if not (hbm and re.search(r"S\([1-9]", layout)):
      total += -(-elements * _bits(kind) // 8)
  return total


def arrays(shape: str) -> list[str]:
  """The shape of every array in a shape."""
  return [found.group() for found in _SHAPE.finditer(shape)]


def dtype(shape: str) -> str:
  """Dtype of a shape's first array; "" without one."""
  found = _SHAPE.search(shape)
  return found.group(1) if found else ""


def dimensions(shape: str) -> list[int]:
  """Sizes of a shape's first array; [] without one."""
  found = _SHAPE.search(shape)
  return _sizes(found.group(2)) if found else []


def _sizes(text: str) -> list[int]:
  return [int(size.removeprefix("<=")) for size in text.split(",") if size]


def _bits(kind: str) -> int:
  """Bits of one element: the number in its dtype's name, as in bf16, s4, c64 and f8e4m3fn."""
  digits = re.match(r"[a-z]+(\d+)", kind)
  return int(digits.group(1)) if digits else {"pred": 8}.get(kind, 0)


def convolution_flops(i: Instruction, left: list[int], right: list[int], out: list[int]) -> int:
  """2 · batch · output features · input features of a group · pairs of a tap and an input.

  A TPU's compiler writes a product's batch dimensions as spatial ones, dilated so that each output
  meets one input: taps that fall on holes and padding do nothing.
  """
  lhs, rhs, result = re.split(r"_|->", i.attribute(r"dim_labels=([\w>\-]+)"))
  window = dict(re.findall(r"(\w+)=([\d_x\-]+)", i.attribute(r"window=\{([^}]*)\}")))

  def field(name: str, spatial: int) -> int:
    default = "0" if name == "pad" else "1"
    values = window[name].split("x") if name in window else [default] * (spatial + 1)
    return int(values[spatial].split("_")[0])

  pairs = 1
  for digit in sorted(set(result) - {"b", "f"}):
    settings = [field(name, int(digit)) for name in ("stride", "rhs_dilate", "lhs_dilate", "pad")]
    sizes = (x[labels.index(digit)] for x, labels in ((left, lhs), (right, rhs), (out, result)))
    pairs *= _pairs(*sizes, *settings)
  batch, features = out[result.index("b")], out[result.index("f")]
  return 2 * batch * features * right[rhs.index("i")] * pairs


@functools.cache
def _pairs(
  inputs: int, taps: int, outputs: int, stride: int, dilation: int, base_dilation: int, pad: int
) -> int:
  """Pairs (output, tap) along one dimension that meet an input, not a hole or padding."""
  end = (inputs - 1) * base_dilation
  return sum(
    0 <= (at := y * stride + k * dilation - pad) <= end and at % base_dilation == 0
    for y in range(outputs)
    for k in range(taps)
  )
