"""What samplers take (policies, draws) and return (graded groups), and the files of groups.

`ARRAYS` lists every array that a group may have. Functions read this list to cut and restore
padding, to join groups of different widths, and to store groups.

A file of groups is a safetensors file. Its metadata is one text: a checksum of the whole file, a
checksum of the JSON that follows, and the JSON. Padding is not stored: the rows of responses are
cut to their lengths and lie one after another. The samples of a group are also JSON, but lie among
the arrays, so that `read_info` need not read the samples.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import safetensors
import safetensors.numpy

if TYPE_CHECKING:  # these modules load jax, which files of groups do not need
  from rlvr_jax.data import Problem
  from rlvr_jax.storage.files import JSON, JsonObject
  from rlvr_jax.types import Params

MARKER = "rlvr_jax groups 1"
MAX_BYTES = 2**36  # the most bytes of the arrays in a file, padding included
PAD_TOKEN = None  # padding of token ids: the tokenizer's padding token, recorded in files of groups
_METADATA = "rlvr_jax"  # name of the only text in a file's metadata
_START = re.compile(rb'.{8}{"__metadata__":{"rlvr_jax":"crc32 ([0-9a-f]{8}) ', re.DOTALL)
_UNSET = "crc32 00000000 "  # stands for the file's checksum while the checksum is computed
_ARRAY_NAME = re.compile(r"([0-9]+)\.([a-z_.]+)")  # index of the group in the file, and name
_SAMPLES = "samples"  # name of a group's samples among its arrays
_MAX_HEADER_BYTES = 10**8  # the limit of safetensors
_PADDED = ("S", "T")  # the axes with padding


class Policy(NamedTuple):
  """A policy with its weights, in the form that samplers take."""

  version: int  # number of updates that the policy has had
  params: Params
  fingerprint: Callable[[], str]  # fingerprint of the parameters; waits until these are computed


class Draw(NamedTuple):
  """Problems that are sampled together; with dynamic sampling a batch may need several draws."""

  number: int
  problems: list[Problem]  # P
  seed: int  # the seed of the run; with the number it determines the keys of all rollouts
  version: int  # the version of the oldest policy that may sample the draw
  sources: list[int]  # P, the index of the source that samples each problem's group
  plan: np.ndarray | None = None  # i32[P, G, T], the version of each token, from a recorded run


class Group(NamedTuple):
  """The graded rollouts of one prompt."""

  draw: int
  index: int  # type: ignore[assignment]  # index of the problem in the draw; shadows `tuple.index`
  source: int
  versions: dict[int, str]  # version → fingerprint, of the run's policies that sampled the group
  arrays: dict[str, np.ndarray]  # by name, as `ARRAYS` lists them; padding may have any value
  samples: list[JsonObject]  # one per rollout: texts, answers, details; JSON
  measured: dict[str, float]  # metrics of sampling the group


class Sampler(Protocol):
  """Samples and grades groups: in this thread, in another thread, or in other programs."""

  def offer(self, policy: Policy) -> None:
    """Gives the sampler newer weights; later requests are sampled with these or newer weights."""
    ...

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    """Requests the groups that have these indices in a draw."""
    ...

  def take(self) -> list[Group]:
    """Waits for graded groups; returns at least one, in any order, or raises an error."""
    ...

  def close(self) -> None:
    """Ends the sampler's threads and processes."""
    ...


# --- the table of arrays --------------------------------------------------------------------------


class Kind(NamedTuple):
  """Layout, dtype and padding of one of a group's arrays.

  The layout names the array's axes; arrays that share an axis have the same size there:

    G  rollouts                                     S  tokens of the prompt, padded on the left
    T  tokens of a response, padded on the right    layers, experts  of a mixture's recorded routes
    graders  the columns of `rewards_by_name`
  """

  layout: str  # "" for a single value
  dtype: str  # the dtype, or allowed dtypes with "|" between them
  padding: float | None = 0  # the value of padding, or PAD_TOKEN

  @property
  def axes(self) -> list[str]:
    """The names of the axes."""
    return self.layout.split()

  @property
  def padded_axis(self) -> str | None:
    """The axis with padding, "S" or "T"; None if the array has no padding."""
    return next((axis for axis in self.axes if axis in _PADDED), None)


ARRAYS: Mapping[str, Kind] = {
  "prompts.tokens": Kind("S", "int32", PAD_TOKEN),
  "prompts.lengths": Kind("", "int32"),
  "tokens": Kind("G T", "int32", PAD_TOKEN),
  "lengths": Kind("G", "int32"),
  "stopped": Kind("G", "bool"),
  "mask": Kind("G T", "float32"),
  "turns": Kind("G T", "int32"),
  "turn_scores": Kind("G T", "float32", math.nan),
  "routes": Kind("G T layers experts", "uint8|uint16"),
  "prompt_routes": Kind("S layers experts", "uint8|uint16"),
  "behavior_logprobs": Kind("G T", "float32"),
  "sampled_logprobs": Kind("G T", "float32"),
  "reference_logprobs": Kind("G T", "float32"),
  "proximal_logprobs": Kind("G T", "float32"),
  "token_versions": Kind("G T", "int32", -1),
  "lags": Kind("G T", "int32", -1),
  "rewards": Kind("G", "float32"),
  "rewards_by_name": Kind("G graders", "float32"),
  "correct": Kind("G", "float32"),
  "valid": Kind("G", "bool"),
  "solve_rate": Kind("", "float32"),
}


def check_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
  """Checks the arrays of a group against `ARRAYS` and returns the sizes of its axes, by name.

  Raises:
    ValueError: a name is unknown, a shape does not have the axes of its layout, or an axis has
      different sizes in two arrays.
    TypeError: an array has another dtype.
  """
  sizes: dict[str, int] = {}
  for name, array in arrays.items():
    kind = _kind(name)
    dtype = getattr(array, "dtype", type(array).__name__)
    if not isinstance(array, np.ndarray) or str(dtype) not in kind.dtype.split("|"):
      allowed = kind.dtype.replace("|", " or ")
      raise TypeError(f"{name!r} is of type {dtype}, but must be a NumPy array of {allowed}")
    found = dict(zip(kind.axes, array.shape, strict=False))
    if array.ndim != len(kind.axes) or any(sizes.get(a, n) != n for a, n in found.items()):
      known = {axis: sizes[axis] for axis in kind.axes if axis in sizes}
      raise ValueError(
        f"{name!r} has the shape {array.shape}, but must have the axes [{kind.layout}]"
        + (f", with the sizes {known} of the group's other arrays" if known else "")
      )
    sizes |= found
  return sizes


def _kind(name: str) -> Kind:
  if name not in ARRAYS:
    raise ValueError(
      f"{name!r} is not an array of a group. Known arrays are {', '.join(ARRAYS)}; for a new array,"
      " add a line to ARRAYS in rollouts/group.py"
    )
  return ARRAYS[name]


# --- padding and joining --------------------------------------------------------------------------


def pad(
  arrays: Mapping[str, np.ndarray], *, S: int, T: int, pad_token: int
) -> dict[str, np.ndarray]:
  """The arrays of a group with more padding.

  Args:
    arrays: by name, as `ARRAYS` lists them.
    S: the new size of the prompts' axis, at least the present size.
    T: the new size of the responses' axis, at least the present size.
    pad_token: the token id used as padding.
  """
  sizes = {"S": S, "T": T}
  padded = {}
  for name, array in arrays.items():
    kind = ARRAYS[name]
    missing = [(sizes.get(axis, n) - n) for axis, n in zip(kind.axes, array.shape, strict=True)]
    sides = [(m, 0) if axis == "S" else (0, m) for axis, m in zip(kind.axes, missing, strict=True)]
    value = pad_token if kind.padding is PAD_TOKEN else kind.padding
    padded[name] = np.pad(array, sides, constant_values=value) if any(missing) else array
  return padded


def join(groups: Sequence[Group], *, pad_token: int = 0) -> dict[str, np.ndarray]:
  """The arrays of groups by name, each with a new first axis of P groups.

  Args:
    groups: P ≥ 1 groups with arrays of the same names.
    pad_token: the token id that pads groups narrower than the widest group.
  Raises:
    ValueError: a group lacks an array that another group has.
  """
  names = groups[0].arrays.keys()
  for group in groups:
    if group.arrays.keys() != names:
      one, other = (f"group {g.index} of draw {g.draw}" for g in (groups[0], group))
      raise ValueError(
        f"{one} and {other} cannot be joined, since these arrays are in only one of the two groups:"
        f" {sorted(names ^ group.arrays.keys())}"
      )
  sizes = [check_arrays(group.arrays) for group in groups]
  S, T = (max(of_group.get(axis, 0) for of_group in sizes) for axis in _PADDED)
  padded = [pad(group.arrays, S=S, T=T, pad_token=pad_token) for group in groups]
  return {name: np.stack([arrays[name] for arrays in padded]) for name in names}


def empty(name: str, group: Group, like: Group) -> np.ndarray:
  """An array of this name that is all padding, with the sizes of a group's other arrays.

  Args:
    name: the name of an array that the group lacks.
    group: the group that lacks the array.
    like: a group that has the array, for the sizes of axes that `group` does not have.
  """
  kind, sizes = ARRAYS[name], check_arrays(like.arrays) | check_arrays(group.arrays)
  padding = 0 if kind.padding is PAD_TOKEN else kind.padding
  return np.full([sizes[axis] for axis in kind.axes], padding, kind.dtype.partition("|")[0])


# --- files ----------------------------------------------------------------------------------------


class DamagedError(ValueError):
  """A file of groups is damaged: its bytes differ from the written bytes."""


class FormatError(ValueError):
  """An undamaged file of groups has a format or content that this version does not allow."""


def encode(groups: Sequence[Group], info: Mapping[str, JSON]) -> bytes:
  """The bytes of a file of groups.

  Args:
    groups: one group, or the groups of a batch.
    info: JSON values, finite.
  Raises:
    ValueError, TypeError: a value cannot be stored; the message names the value.
  """
  arrays: dict[str, np.ndarray] = {}
  heads: list[dict[str, JSON]] = []
  for number, group in enumerate(groups):
    # Arrays are sorted, so that equal groups give equal bytes.
    head, cut = _cut(group._replace(arrays=dict(sorted(group.arrays.items()))))
    samples = _to_json("samples", group.samples)
    cut[_SAMPLES] = np.frombuffer(samples.encode(), np.uint8)
    heads.append(head)
    arrays |= {f"{number}.{name}": array for name, array in cut.items()}
  content: dict[str, JSON] = {"format": MARKER, "info": dict(info), "groups": heads}
  json_text = _to_json("info", content)
  text = f"{_UNSET}{zlib.crc32(json_text.encode()):08x} {json_text}"
  data = safetensors.numpy.save(arrays, {_METADATA: text})
  start = data.index(_UNSET.encode())
  checksum = f"crc32 {zlib.crc32(data):08x} ".encode()
  return b"".join([data[:start], checksum, memoryview(data)[start + len(checksum) :]])


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> tuple[list[Group], JsonObject]:
  """The groups and info that were given to `encode`, bit for bit.

  Everything in the file is checked before it is used, so a file from an untrusted source is safe.

  Args:
    data: the bytes of the file.
    max_bytes: the most bytes that all arrays together may have, padding included.
  Raises:
    DamagedError: the bytes differ from the written bytes.
    FormatError: the file has another format, an array that `ARRAYS` does not allow, or arrays of
      more than `max_bytes`.
  """
  view = memoryview(data)
  found = _START.match(view[:64])
  if found is None:
    raise DamagedError(f"the {len(data)} bytes are not a file of groups")
  start, end = found.span(1)
  checksum = zlib.crc32(view[end:], zlib.crc32(b"00000000", zlib.crc32(view[:start])))
  if f"{checksum:08x}".encode() != found[1]:
    raise DamagedError(
      f"the {len(data)} bytes have the checksum {checksum:08x}, but were written with"
      f" {found[1].decode()}"
    )
  with _as_format_errors():
    content = _read_content(data[8 : 8 + int.from_bytes(data[:8], "little")])
    arrays = safetensors.numpy.load(data)
    return _read_groups(content["groups"], arrays, max_bytes), content["info"]


def read_info(read_start: Callable[[int], bytes]) -> JsonObject:
  """The info of a file of groups; only the beginning of the file is read.

  Args:
    read_start: n → the first n bytes of the file, or the whole file if it is shorter.
  Raises:
    DamagedError: the info is not as it was written; damage in other parts may go unnoticed.
    FormatError: the file has another format.
  """
  size = int.from_bytes(read_start(8), "little")
  info: JsonObject = _read_content(read_start(8 + min(size, _MAX_HEADER_BYTES))[8:])["info"]
  return info


def _read_content(header: bytes) -> JsonObject:
  """The JSON in the header of a file of groups; raises the errors of `read_info`."""
  try:
    text = json.loads(header)["__metadata__"][_METADATA]
    checksum, _, content = text[len(_UNSET) :].partition(" ")
    if checksum != f"{zlib.crc32(content.encode()):08x}":
      raise ValueError("the metadata do not match their checksum")
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise DamagedError(f"the beginning of the file is damaged: {error}") from error
  with _as_format_errors():
    found = json.loads(content)
    if found["format"] != MARKER:
      raise FormatError(
        f"the format is {found['format']!r}, but this version reads only {MARKER!r}"
      )
    return {"info": dict(found["info"]), "groups": list(found["groups"])}


@contextlib.contextmanager
def _as_format_errors() -> Iterator[None]:
  """Turns the errors that unexpected content of an undamaged file causes into FormatError."""
  try:
    yield
  except FormatError:
    raise
  except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
    raise FormatError(f"its content is not valid ({type(error).__name__}: {error})") from error
  except safetensors.SafetensorError as error:
    raise FormatError(f"it is not a safetensors file: {error}") from error


def _to_json(what: str, value: JSON) -> str:
  try:
    return json.dumps(value, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise type(error)(f"{what} must be finite JSON values: {error}") from error


def _cut(group: Group) -> tuple[dict[str, JSON], dict[str, np.ndarray]]:
  """(JSON, arrays without padding) of a group."""
  sizes = check_arrays(group.arrays)
  lengths, pad_tokens = _find_lengths(group.arrays)
  arrays = {
    name: array[_places(axis, array.shape, lengths)]
    if (axis := ARRAYS[name].padded_axis)
    else array
    for name, array in group.arrays.items()
  }
  head: dict[str, JSON] = {
    name: getattr(group, name) for name in ("draw", "index", "source", "measured")
  }
  head["versions"] = sorted(group.versions.items())
  return head | {"sizes": sizes, "lengths": lengths, "pad_tokens": pad_tokens}, arrays


def _find_lengths(
  arrays: Mapping[str, np.ndarray],
) -> tuple[dict[str, list[int]], dict[str, int]]:
  """(lengths by axis, pad tokens by name), with which `_restore` restores the arrays exactly.

  A row's length is the number of tokens up to the last token at which an array differs from its
  padding.
  """
  lengths: dict[str, np.ndarray] = {}
  pad_tokens: dict[str, int] = {}
  padded = [name for name in arrays if ARRAYS[name].padded_axis]
  # Token ids come last: the lengths of the other arrays show where the pad token is.
  for name in sorted(padded, key=lambda name: ARRAYS[name].padding is PAD_TOKEN):
    axis, padding = ARRAYS[name].padded_axis, ARRAYS[name].padding
    rows = arrays[name][None, ::-1] if axis == "S" else arrays[name]  # reversed: padding comes last
    known = lengths.get(str(axis), np.zeros(len(rows), np.int64))
    if padding is PAD_TOKEN:
      pad_tokens[name] = padding = int(rows[np.argmin(known), -1]) if rows.size else 0
    differs = _bits(rows) != _bits(np.full((), padding, rows.dtype))
    differs = differs.any(axis=tuple(range(2, differs.ndim)))
    ends = (differs * np.arange(1, rows.shape[1] + 1)).max(axis=1, initial=0)
    lengths[str(axis)] = np.maximum(known, ends)
  return {axis: found.tolist() for axis, found in lengths.items()}, pad_tokens


def _bits(array: np.ndarray) -> np.ndarray:
  """The bits of numbers as integers: −0.0 differs from 0.0, and NaN equals itself."""
  return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _places(
  axis: str, shape: Sequence[int], lengths: Mapping[str, Sequence[int]]
) -> slice | np.ndarray:
  """The index that selects the stored part of an array, without padding."""
  if axis == "S":
    return slice(shape[0] - lengths["S"][0], None)
  return np.arange(shape[1]) < np.asarray(lengths["T"])[:, None]


def _read_groups(
  heads: Sequence[JsonObject], stored: dict[str, np.ndarray], max_bytes: int
) -> list[Group]:
  """The groups of a file from their JSON and its arrays.

  Raises:
    Exception: the content is not as `encode` writes it; `_as_format_errors` converts the error to
      FormatError.
  """
  by_group: list[dict[str, np.ndarray]] = [{} for _ in heads]
  for full_name, array in stored.items():
    if not (match := _ARRAY_NAME.fullmatch(full_name)):
      raise FormatError(f"an array has the name {full_name!r:.80}, not a name such as '0.tokens'")
    by_group[int(match[1])][match[2]] = array
  groups = []
  for head, arrays in zip(heads, by_group, strict=True):
    samples = json.loads(arrays.pop(_SAMPLES).tobytes())
    restored = _restore(head, arrays, max_bytes)
    max_bytes -= sum(array.nbytes for array in restored.values())
    groups.append(
      Group(
        draw=_count(head["draw"]),
        index=_count(head["index"]),
        source=_count(head["source"]),
        versions={_count(version): _text(x) for version, x in head["versions"]},
        arrays=restored,
        samples=[dict(sample) for sample in samples],
        measured={_text(name): float(value) for name, value in head["measured"].items()},
      )
    )
  return groups


def _restore(
  head: JsonObject, arrays: Mapping[str, np.ndarray], max_bytes: int
) -> dict[str, np.ndarray]:
  """A group's arrays with their padding; raises the errors of `_read_groups`."""
  sizes = {str(axis): _count(size) for axis, size in head["sizes"].items()}
  lengths = {axis: [_count(n) for n in found] for axis, found in head["lengths"].items()}
  shapes = {name: tuple(sizes[axis] for axis in _kind(name).axes) for name in arrays}
  total = sum(array.itemsize * math.prod(shapes[name]) for name, array in arrays.items())
  if total > max_bytes:
    raise FormatError(
      f"the arrays take {total} bytes with padding, but at most {max_bytes} are allowed"
    )
  for axis, found in lengths.items():
    if len(found) != (1 if axis == "S" else sizes["G"]) or max(found, default=0) > sizes[axis]:
      raise FormatError(
        f"the lengths {found!s:.80} along the axis {axis} do not fit the sizes {sizes}: each row"
        " needs one length, which is at most the size of this axis"
      )
  restored = {}
  for name, array in arrays.items():
    kind, shape = ARRAYS[name], shapes[name]
    if array.dtype == bool and (array.view(np.uint8) > 1).any():
      raise FormatError(f"{name!r} has bytes that are not booleans")
    if kind.padded_axis is None:
      restored[name] = array.copy()  # writable, with its own memory
      continue
    padding = int(head["pad_tokens"][name]) if kind.padding is PAD_TOKEN else kind.padding
    restored[name] = np.full(shape, padding, array.dtype)
    places = _places(kind.padded_axis, shape, lengths)
    if restored[name][places].shape != array.shape:
      raise FormatError(
        f"{name!r} has the shape {array.shape}, which does not fit the lengths {lengths}"
      )
    restored[name][places] = array
  if check_arrays(restored) != sizes:
    raise FormatError(
      f"the file states the axis sizes {sizes}, but its arrays have the axis sizes"
      f" {check_arrays(restored)}"
    )
  return restored


def _count(value: object) -> int:
  if type(value) is not int or not 0 <= value < 2**53:
    raise FormatError(f"found {value!r:.80}, expected a whole number from 0 to 2**53 − 1")
  return value


def _text(value: object) -> str:
  if not isinstance(value, str):
    raise FormatError(f"found {value!r:.80}, expected a text")
  return value
