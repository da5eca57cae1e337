"""Graded groups, the table of their arrays, and the files that hold them."""

import json
import re
import zlib

import numpy as np
import pytest
import safetensors.numpy

from rlvr_jax.rollouts import group as group_module
from rlvr_jax.rollouts.group import (
  ARRAYS,
  DamagedError,
  FormatError,
  Group,
  Kind,
  check_arrays,
  decode,
  encode,
  join,
  pad,
  read_info,
)

PAD = 7


def make_arrays(seed=0, *, names=ARRAYS, G=3, T=7, S=5, layers=2, experts=4, graders=2):
  """Arrays of random bits, NaNs of every kind among them, where a group's lengths say so."""
  rng = np.random.default_rng(seed)
  sizes = dict(G=G, T=T, S=S, layers=layers, experts=experts, graders=graders)
  lengths = rng.integers(0, T + 1, G)
  prompt = int(rng.integers(0, S + 1))
  arrays = {}
  for name in names:
    kind = ARRAYS[name]
    dtype = np.dtype(kind.dtype.split("|")[-1])
    shape = [sizes[axis] for axis in kind.axes]
    count = int(np.prod(shape))
    if dtype.kind == "b":
      array = rng.random(shape) < 0.5
    else:
      array = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()
    padding = PAD if kind.padding is None else kind.padding
    if kind.padded_axis == "T":
      array[np.arange(T) >= lengths[:, None]] = padding
    elif kind.padded_axis == "S":
      array[: S - prompt] = padding
    arrays[name] = array
  return arrays


def make_group(seed=0, **options):
  samples = [{"completion": "ü\n", "reward": 0.1 + 0.2 + k} for k in range(options.get("G", 3))]
  arrays = make_arrays(seed, **options)
  return Group(seed, 2 * seed, 1, {3: "ab", 12: "cd"}, arrays, samples, {"gap": 0.1 + 0.2})


def assert_same(found, expected):
  assert found._replace(arrays={}) == expected._replace(arrays={})
  assert list(found.arrays) == sorted(expected.arrays, key=list(found.arrays).index)
  assert found.arrays.keys() == expected.arrays.keys()
  for name, array in expected.arrays.items():
    assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape), name
    assert found.arrays[name].tobytes() == array.tobytes(), name
    assert found.arrays[name].flags.writeable


# --- the table ------------------------------------------------------------------------------------


def test_arrays_of_other_names_types_and_shapes_are_refused():
  assert check_arrays(make_arrays()) == dict(S=5, G=3, T=7, layers=2, experts=4, graders=2)
  bad = {
    r"'weights' is not an array of a group\. Known arrays are .*for a new array, add a line": {
      "weights": np.zeros(1, "f4")
    },
    "'tokens' is of type int64, but must be .* int32": {"tokens": np.zeros((1, 2), "i8")},
    "'routes' is of type int8, .* uint8 or uint16": {"routes": np.zeros((1, 2, 1, 1), "i1")},
    "'mask' is of type list": {"mask": [[0.0]]},
    r"'tokens' has the shape \(2,\), but must have the axes \[G T\]": {"tokens": np.zeros(2, "i4")},
    r"'mask' has .*\(2, 4\).*sizes \{'G': 2, 'T': 3\} of the": {
      "tokens": np.zeros((2, 3), "i4"), "mask": np.zeros((2, 4), "f4")
    },
  }  # fmt: skip
  for message, arrays in bad.items():
    with pytest.raises((ValueError, TypeError), match=message):
      check_arrays(arrays)


def test_padding_is_that_of_the_table():
  arrays = make_arrays(names=[name for name in ARRAYS if ARRAYS[name].axes])
  wider = pad(arrays, S=8, T=9, pad_token=PAD)
  assert check_arrays(wider) == dict(S=8, G=3, T=9, layers=2, experts=4, graders=2)
  assert (wider["prompts.tokens"][:3] == PAD).all() and (wider["tokens"][:, 7:] == PAD).all()
  assert np.isnan(wider["turn_scores"][:, 7:]).all() and (wider["lags"][:, 7:] == -1).all()
  assert not wider["routes"][:, 7:].any() and not wider["prompt_routes"][:3].any()
  for name, array in wider.items():
    inner = array[3:] if "S" in ARRAYS[name].axes else array
    inner = inner[:, :7] if "T" in ARRAYS[name].axes else inner
    assert inner.tobytes() == arrays[name].tobytes(), name


def test_groups_of_different_widths_are_joined():
  groups = [make_group(0), make_group(1, T=9, S=4)]
  joined = join(groups, pad_token=PAD)
  for name, array in joined.items():
    assert array.shape[0] == 2
    for group, row in zip(groups, array, strict=True):
      assert row.tobytes() == pad(group.arrays, S=5, T=9, pad_token=PAD)[name].tobytes()
  del groups[1].arrays["mask"]
  with pytest.raises(ValueError, match=r"group 2 of draw 1 cannot be joined, since .*\['mask'\]"):
    join(groups)


def test_a_new_array_is_one_line_in_the_table(monkeypatch):
  line = {"entropies": Kind("G T", "float16", -2.0)}
  monkeypatch.setattr(group_module, "ARRAYS", ARRAYS | line)
  arrays = make_arrays()
  arrays["entropies"] = np.arange(21, dtype=np.float16).reshape(3, 7)
  arrays["entropies"][1, 4:] = -2
  group = make_group()._replace(arrays=arrays)
  assert_same(decode(encode([group], {}))[0][0], group)
  narrow = len(encode([group], {}))
  wide = pad(arrays, S=50, T=70, pad_token=PAD)
  assert (wide["entropies"][:, 7:] == -2).all()
  assert len(encode([group._replace(arrays=wide)], {})) <= narrow + 100
  assert join([group, group._replace(arrays=wide)])["entropies"].shape == (2, 3, 70)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_groups_come_back_to_the_bit(seed):
  rng = np.random.default_rng(seed)
  sizes = [dict(G=rng.integers(1, 5), T=rng.integers(0, 9), S=rng.integers(0, 6)) for _ in range(3)]
  groups = [make_group(k, **sizes[k]) for k in range(3)]
  groups.append(make_group(3, names=["rewards"])._replace(versions={}, samples=[], measured={}))
  groups.append(make_group(4, names=[]))
  info = {"loss": 0.1 + 0.2, "none": None, "nested": {"text": "ü\n", "list": [1, [True]]}}
  data = encode(groups, info)
  found, found_info = decode(data)
  assert found_info == info == read_info(lambda size: data[:size])
  for one, other in zip(found, groups, strict=True):
    assert_same(one, other)


@pytest.mark.parametrize("case", ["not 0", "other pads", "full", "minus zero", "nan", "transposed"])
def test_whatever_stands_where_padding_is_expected_comes_back(case):
  group = make_group()
  arrays = group.arrays
  if case == "not 0":
    arrays["behavior_logprobs"][:, 6] = 0.5
  elif case == "other pads":
    arrays["tokens"][:, 4:] = [1, 2, 3]
  elif case == "full":
    arrays["mask"][:] = 1
  elif case == "minus zero":
    arrays["mask"][:, 6] = -0.0
  elif case == "nan":
    arrays["turn_scores"].view(np.uint32)[:, 6] = 0x7FC00001
  elif case == "transposed":
    arrays["tokens"] = np.asfortranarray(arrays["tokens"])
  assert_same(decode(encode([group], {}))[0][0], group)


def test_any_changed_byte_and_any_cut_are_found():
  data = encode([make_group(0, T=4, S=3), make_group(1, G=2)], {"version": 3})
  rng = np.random.default_rng(0)
  for place in range(len(data)):
    changed = bytearray(data)
    changed[place] ^= int(rng.integers(1, 256))
    with pytest.raises(DamagedError):
      decode(bytes(changed))
  for size in [*range(0, 80), *range(80, len(data), 97)]:
    with pytest.raises(DamagedError):
      decode(data[:size])
  with pytest.raises(DamagedError):
    decode(data + b" ")


def test_a_changed_info_is_found_without_the_arrays():
  data = encode([make_group()], {"version": 3})
  place = data.index(b"version")
  for damaged in (data[:place] + b"W" + data[place + 1 :], data[:place], b"", b"\xff" * 100):
    with pytest.raises(DamagedError):
      read_info(lambda size, damaged=damaged: damaged[:size])


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    (dict(info={"a": float("nan")}), ValueError, "info must be finite JSON"),
    (dict(info={"a": np.float32(1)}), TypeError, "info must be finite JSON"),
    (dict(samples=[{"a": object()}]), TypeError, "samples must be finite JSON"),
    (dict(arrays={"rewards": np.zeros(1)}), TypeError, "'rewards' is of type float64"),
    (dict(arrays={"rewards": np.zeros(1, ">f4")}), TypeError, "'rewards' is of type >f4"),
  ],
)
def test_what_cannot_be_stored_is_named(change, error, message):
  info = change.pop("info", {})
  with pytest.raises(error, match=message):
    encode([make_group()._replace(**change)], info)


def forge(change=lambda content: None, arrays=lambda stored: None):
  """A file with right checksums whose JSON and arrays somebody has changed."""
  data = encode([make_group()], {})
  header = data[8 : 8 + int.from_bytes(data[:8], "little")]
  content = json.loads(json.loads(header)["__metadata__"]["rlvr_jax"][24:])
  stored = safetensors.numpy.load(data)
  change(content)
  arrays(stored)
  text = json.dumps(content)
  head = f"crc32 00000000 {zlib.crc32(text.encode()):08x} "
  return seal(safetensors.numpy.save(stored, {"rlvr_jax": head + text}))


def seal(data):
  """A file with the checksum of its bytes."""
  data = re.sub(b"crc32 [0-9a-f]{8}", b"crc32 00000000", bytes(data), count=1)
  return data.replace(b"crc32 00000000", f"crc32 {zlib.crc32(data):08x}".encode(), 1)


def in_head(**fields):
  return lambda content: content["groups"][0].update(fields)


def in_part(part, **fields):
  return lambda content: content["groups"][0][part].update(fields)


ATTACKS = {
  "format": (
    lambda c: c.update(format="rlvr_jax groups 9"),
    "the format is 'rlvr_jax groups 9', but this version reads only 'rlvr_jax groups 1'",
  ),
  "no groups": (lambda c: c.pop("groups"), "KeyError"),
  "info": (lambda c: c.update(info=3), "TypeError"),
  "groups": (lambda c: c.update(groups=[3]), "TypeError"),
  "too many": (lambda c: c["groups"].append(c["groups"][0]), "KeyError"),
  "draw": (in_head(draw="../../x"), r"'../../x', expected a whole number from 0 to"),
  "index": (in_head(index=-1), "found -1, expected a whole number from 0 to"),
  "source": (in_head(source=True), "found True, expected a whole number from 0 to"),
  "versions": (in_head(versions=[[0, 7]]), "found 7, expected a text"),
  "measured": (in_head(measured={"x": []}), "TypeError"),
  "huge": (in_part("sizes", T=2**50), "bytes with padding, but at most"),
  "negative": (in_part("sizes", T=-1), "found -1, expected a whole number from 0 to"),
  "float": (in_part("sizes", T=7.0), "found 7.0, expected a whole number from 0 to"),
  "wider": (in_part("sizes", layers=3), "has the shape"),
  "axis": (in_part("sizes", places=3), "file states the axis sizes"),
  "no axis": (lambda c: c["groups"][0]["sizes"].pop("T"), "KeyError"),
  "no lengths": (in_head(lengths={}), "KeyError"),
  "rows": (in_part("lengths", T=[1, 2]), r"lengths \[1, 2\] along the axis T"),
  "longer": (in_part("lengths", T=[0, 0, 8]), r"lengths \[0, 0, 8\] along the axis T"),
  "other lengths": (in_part("lengths", T=[0, 0, 1]), "has the shape"),
  "pads": (in_part("pad_tokens", tokens=2**40), "OverflowError"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_json_that_is_not_ours_is_refused(name):
  change, message = ATTACKS[name]
  with pytest.raises(FormatError, match=message):
    decode(forge(change))


@pytest.mark.parametrize(
  ("name", "array", "message"),
  [
    ("0.code", np.zeros(3, "f4"), "'code' is not an array of a group"),
    ("0.rewards", np.zeros(3, "f8"), "'rewards' is of type float64"),
    ("0.rewards", np.zeros(4, "f4"), "states the axis sizes|has the shape"),
    ("0.rewards", np.zeros((3, 1), "f4"), "has the shape"),
    ("0.tokens", np.zeros((3, 7), "i4"), "has the shape"),
    ("0.samples", np.frombuffer(b"[[[", np.uint8), "JSONDecodeError"),
    ("0.samples", np.frombuffer(b"[" * 100_000, np.uint8), "RecursionError"),
    ("0.samples", np.frombuffer(b"[3]", np.uint8), "TypeError"),
    ("1.rewards", np.zeros(3, "f4"), "IndexError"),
    ("-1.rewards", np.zeros(3, "f4"), "an array has the name '-1.rewards'"),
    ("../rewards", np.zeros(3, "f4"), "an array has the name"),
  ],
)
def test_arrays_that_are_not_ours_are_refused(name, array, message):
  with pytest.raises(FormatError, match=message):
    decode(forge(arrays=lambda stored: stored.update({name: array})))


def test_booleans_are_0_or_1():
  data = bytearray(encode([make_group()], {}))
  end = 8 + int.from_bytes(data[:8], "little")
  data[end + json.loads(data[8:end])["0.valid"]["data_offsets"][0]] = 2
  with pytest.raises(FormatError, match="'valid' has bytes that are not booleans"):
    decode(seal(data))


def test_the_size_with_padding_is_bounded_by_the_reader():
  data = encode([make_group(0), make_group(1)], {})
  size = sum(array.nbytes for group in decode(data)[0] for array in group.arrays.values())
  decode(data, max_bytes=size)
  with pytest.raises(FormatError, match="bytes with padding, but at most"):
    decode(data, max_bytes=size - 1)


def test_equal_groups_give_equal_bytes_whatever_the_order_of_their_arrays():
  """A group that was read back from the store gives the file that it would have given."""
  arrays = {
    "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
    "lengths": np.array([3, 3], np.int32),
    "rewards": np.array([1.0, 0.0], np.float32),
  }
  groups = [
    group_module.Group(4, 1, 0, {2: "f"}, dict(items), [{}, {}], {})
    for items in (arrays.items(), reversed(arrays.items()))
  ]
  first, second = (group_module.encode([one], {"a": 1}) for one in groups)
  assert first == second == group_module.encode(group_module.decode(first)[0], {"a": 1})
