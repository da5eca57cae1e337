"""The format of rollouts in files: named arrays of a group, without padding."""

import dataclasses
import json

import numpy as np
import pytest

from rlvr_jax.rollouts import shards
from rlvr_jax.rollouts.batch import batch_from_arrays, read_batch, write_batch
from rlvr_jax.rollouts.shards import (
  ARRAYS,
  Kind,
  StoreError,
  decode_group,
  encode_group,
  make_shard,
  read_shard,
  write_shard,
)
from rlvr_jax.storage.files import with_crc32
from rlvr_jax.types import Prompts, TrainBatch

PAD = 7


def group(lengths=(3, 5), T=6, S=4, prompt=2):
  """Arrays of one group, padded as a run pads them."""
  rng = np.random.default_rng(0)
  sampled = np.arange(T) < np.array(lengths)[:, None]
  prompts = np.where(np.arange(S) < S - prompt, PAD, rng.integers(0, 7, S))
  return {
    "prompts.tokens": prompts.astype(np.int32),
    "prompts.lengths": np.array(prompt, np.int32),
    "tokens": np.where(sampled, rng.integers(0, 7, sampled.shape), PAD).astype(np.int32),
    "mask": sampled.astype(np.float32),
    "behavior_logprobs": np.where(sampled, rng.normal(size=sampled.shape), 0).astype(np.float32),
    "rewards": rng.normal(size=len(lengths)).astype(np.float32),
    "versions": np.array(3, np.int32),
  }


def test_versions_of_tokens_are_stored_by_length():
  versions = np.full((2, 6), -1, np.int32)
  versions[0, :3], versions[1, :5] = [4, 4, 5], [4, 4, 5, 5, 6]
  arrays = group() | {"token_versions": versions}
  record = encode_group(arrays)
  assert_same(decode_group(record)[0], arrays)
  assert len(payload(record)) == len(payload(encode_group(group()))) + 4 * (3 + 5)


def assert_same(found, expected):
  assert list(found) == list(expected)
  for name, array in expected.items():
    assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
    assert found[name].tobytes() == array.tobytes(), name


def payload(record):
  return record.partition(b"\n")[2]


def test_a_group_has_the_places_of_its_lengths_and_no_padding():
  arrays = group()
  record = encode_group(arrays, [{"text": "ü\n"}, None])
  found, samples = decode_group(record)
  assert_same(found, arrays)
  assert samples == [{"text": "ü\n"}, None]
  head = json.loads(record.partition(b"\n")[0])
  assert head["lengths"] == {"response": [3, 5], "turn": [], "prompt": [2]}
  # Four bytes each: 2 of the prompt and its length, three arrays of 8 places, 2 rewards, 1 version.
  assert len(payload(record)) == 4 * (2 + 1 + 3 * 8 + 2 + 1)
  assert payload(record)[:8] == arrays["prompts.tokens"][2:].tobytes()
  assert len(payload(encode_group(group(T=4000, S=900)))) == len(payload(record))


@pytest.mark.parametrize("case", ["left out", "not 0", "other pads", "full", "minus zero", "nan"])
def test_any_array_comes_back_to_the_bit(case):
  """Whatever stands where padding is expected."""
  arrays = group(lengths=(6, 6)) if case == "full" else group()
  if case == "left out":  # a response without a token in the loss
    arrays["mask"][0] = 0
  elif case == "not 0":
    arrays["behavior_logprobs"][0, 5] = 0.5
  elif case == "other pads":
    arrays["tokens"][0, 4:] = [1, 2]
  elif case == "minus zero":
    arrays["mask"][:, 5] = -0.0
  elif case == "nan":
    arrays["behavior_logprobs"][0] = np.nan
  assert_same(decode_group(encode_group(arrays))[0], arrays)


def test_lengths_that_an_array_says_count():
  """A response may end with the token that pads."""
  arrays = {"tokens": np.full((2, 6), PAD, np.int32), "lengths": np.array([2, 4], np.int32)}
  record = encode_group(arrays)
  assert json.loads(record.partition(b"\n")[0])["lengths"]["response"] == [2, 4]
  assert_same(decode_group(record)[0], arrays)


def test_each_axis_may_have_further_ones(monkeypatch):
  """A later version adds a line to the table; this one passes the array on by its name."""
  later = {"rewards_of_turns": Kind("turn", "float32"), "features": Kind("response", "float16")}
  turns = np.array([[[1, 2], [0, 0], [0, 0]], [[1, 2], [3, 4], [0, 0]]], np.float32)
  features = np.arange(48, dtype=np.float16).reshape(2, 6, 4)
  arrays = group() | {"rewards_of_turns": turns, "features": features}
  with pytest.raises(
    ValueError, match=r"'rewards_of_turns' is not an array of rollouts.*add a line"
  ):
    encode_group(arrays)
  with monkeypatch.context() as patch:
    patch.setattr(shards, "ARRAYS", ARRAYS | later)
    record = encode_group(arrays)
  assert json.loads(record.partition(b"\n")[0])["lengths"]["turn"] == [1, 2]
  assert_same(decode_group(record)[0], arrays)
  batch = {name: array[None] for name, array in arrays.items() if name != "versions"}
  with pytest.raises(
    StoreError, match=r"arrays \['features', 'rewards_of_turns'\], which this ver"
  ):
    batch_from_arrays(batch)


def test_a_record_of_another_length_is_damaged():
  record = encode_group(group())
  for data in (record[:-1], record + b"?"):
    with pytest.raises(ValueError, match=r"buffer|bytes of arrays"):
      decode_group(data)


def batch():
  groups = [group(), group(lengths=(1, 1), prompt=4)]
  arrays = {name: np.stack([one[name] for one in groups]) for name in groups[0]}
  prompts = Prompts(arrays.pop("prompts.tokens"), arrays.pop("prompts.lengths"))
  del arrays["versions"]
  correct, valid = np.zeros((2, 2), np.float32), np.array([[True, False], [True, True]])
  return TrainBatch(prompts=prompts, correct=correct, valid=valid, **arrays)


def test_a_batch_in_a_file(tmp_path):
  path = tmp_path / "batch.array_record"
  write_batch(path, batch())
  again = read_batch(path)
  assert again.reference_logprobs is None
  for field in dataclasses.fields(TrainBatch):
    if field.name != "prompts" and getattr(batch(), field.name) is not None:
      np.testing.assert_array_equal(getattr(again, field.name), getattr(batch(), field.name))
  np.testing.assert_array_equal(again.prompts.tokens, batch().prompts.tokens)
  np.testing.assert_array_equal(again.prompts.lengths, batch().prompts.lengths)
  assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_group_of_other_bytes_is_seen(tmp_path):
  path = tmp_path / "shard"
  shard = make_shard(0, {"rewards": np.zeros((2, 3), np.float32)}, {})
  write_shard(path, shard._replace(groups=[shard.groups[0], shard.groups[1][:-1] + b"?"]))
  with pytest.raises(ValueError, match="group 1 does not match its checksum"):
    read_shard(path, 0)


@pytest.mark.parametrize(
  ("arrays", "samples", "message"),
  [
    ({"rewards": (2, 1), "correct": (3, 1)}, 0, r"one number of groups.*\(2,\).*\(3,\)"),
    ({"rewards": (2, 2)}, 3, "3 samples cannot be divided among 2 groups"),
    ({}, 0, "one number of groups"),
  ],
)
def test_a_batch_that_does_not_divide_into_groups_is_refused(arrays, samples, message):
  arrays = {name: np.zeros(shape, np.float32) for name, shape in arrays.items()}
  with pytest.raises(ValueError, match=f"batch 4: .*{message}"):
    make_shard(4, arrays, {}, range(samples))


def test_the_first_format_is_refused_by_its_name(tmp_path):
  line = json.dumps({"crc32": 1, "content": {"format": "rlvr_jax rollouts 1", "number": 0}})
  with pytest.raises(StoreError, match=r"format 'rlvr_jax rollouts 1'.* Use the version of"):
    shards.read_line(line.encode(), tmp_path)
  assert shards.read_line(json.dumps(with_crc32({"number": 0})).encode(), tmp_path) is None
