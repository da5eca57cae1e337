"""Records of a fleet are read as written; damage and other versions are named."""

import pathlib
import re

import numpy as np
import pytest

from rlvr_jax.fleet import records
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
from rlvr_jax.rollouts.group import ARRAYS
from rlvr_jax.rollouts.serve import Group

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


def test_the_list_of_what_records_may_contain_is_complete():
  """docs/staleness.md has a row for each field, and each array with the dtype of its file."""
  page = (pathlib.Path(records.__file__).parents[2] / "docs" / "staleness.md").read_text()
  section = page.partition("### What a record may contain\n")[2].partition("\n**Order")[0]
  rows = [
    [cell.strip() for cell in row.split("|")[1:-1]] for row in section.splitlines() if "|" in row
  ]
  fields, arrays, record = {}, {}, ""
  for row in rows:
    is_array = len(row) == 4 and ("int" in row[1] or row[1] in ("float32", "bool"))
    names = re.findall(r"`(\w+)`", row[0] if is_array else row[1])
    if is_array:
      arrays |= dict.fromkeys(names, row[1])
    elif names:
      record = row[0].strip("`") or record
      fields.setdefault(record, set()).update(names)
  classes = dict(trainer=records.TrainerRecord, plans=Plan, groups=GroupRecord)
  classes |= dict(samplers=SamplerRecord, failures=records.FailureRecord)
  expected = {name: set(kind._fields) for name, kind in classes.items()}
  assert fields == expected | {"leases": {"sampler"}}
  of_group = set(Group._fields) - {"owner", "prompt_index", "details"}
  dtypes = {name: ARRAYS[name].dtype.replace("|", " or ") for name in of_group}
  assert arrays == dtypes
