"""Records of a fleet are read as written; damage and other versions are named."""

import numpy as np
import pytest

from rlvr_jax.fleet.records import (
  GradedGroup,
  GroupRecord,
  Plan,
  RecordError,
  SamplerRecord,
  draw_of,
  group_name,
  index_of,
  lease_name,
  plan_name,
)

PLAN = Plan(7, 6, 4, [11, 12], {"next": 56}, 5, [[0, 1], [1, 2]])
RECORD = GroupRecord("ab", "host-1", {"5": "f0"}, [["correct", 1.0, "", "3"]], None, {"a_max": 0.5})


def test_a_record_is_read_as_written():
  assert Plan.decode(PLAN.encode(), "plans/x") == PLAN
  sampler = SamplerRecord("host", 5, 0.5, 1.0, 100.0, 0.25, 2, 9, 1, 40, "", 3)
  assert SamplerRecord.decode(sampler.encode(), "samplers/x") == sampler
  assert sampler.describe() == "version 5, 100 tokens/s, 2 leases, 25% idle, 9 groups"


def test_a_group_is_read_as_written():
  arrays = {
    "tokens": np.array([[1, 2, 0], [3, 0, 0]], np.int32),
    "lengths": np.array([2, 1], np.int32),
    "behavior_logprobs": np.array([[-0.5, -1, 0], [-2, 0, 0]], np.float32),
  }
  data = GradedGroup(RECORD, arrays).encode()
  record, read = GradedGroup.decode(data, "groups/x")
  assert record == RECORD and read.keys() == arrays.keys()
  assert all(np.array_equal(read[name], arrays[name]) for name in arrays)
  for place in (20, len(data) - 2):
    damaged = bytearray(data)
    damaged[place] ^= 4
    with pytest.raises(RecordError, match="fleet/groups/x is damaged"):
      GradedGroup.decode(bytes(damaged), "groups/x")
  with pytest.raises(RecordError, match="damaged"):
    GradedGroup.decode(data[:-1], "groups/x")


def test_another_version_is_named():
  with pytest.raises(RecordError, match="another version of rlvr_jax"):
    Plan.decode(RECORD.encode(), "plans/x")
  data = PLAN.encode().replace(b"fleet 1", b"fleet 2")
  with pytest.raises(RecordError, match="damaged"):  # its checksum is of the other format
    Plan.decode(data, "plans/x")


def test_names_have_draw_and_index():
  assert [draw_of(name) for name in (plan_name(PLAN), lease_name(7, 3), group_name(7, 3))] == [
    7
  ] * 3
  assert index_of(lease_name(7, 3)) == index_of(group_name(7, 3)) == 3
  assert plan_name(PLAN) != plan_name(PLAN._replace(problems=[11, 13]))
  assert plan_name(PLAN) == plan_name(PLAN._replace(drawn_by=4))
