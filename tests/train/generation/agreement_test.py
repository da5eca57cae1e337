"""What of a draw is compared with the trainer."""

import numpy as np
from fleet import toy

from rlvr_jax.train.generation.agreement import sampled_by, sampled_mask


def groups_by(*versions):
  return [toy.group(toy.draw(0), index, version) for index, version in enumerate(versions)]


def test_tokens_are_compared_under_the_versions_that_sampled_them():
  """Not under the version that the draw began with, which in real time may have sampled none."""
  assert sampled_by(groups_by(4, 4), 4) == sampled_by(groups_by(4, 4), 3) == ({4}, None)
  versions, of_groups = sampled_by(groups_by(4, 3, 4), 3)
  assert versions == {3, 4} and of_groups.tolist() == [4, 3, 4]
  of_other_runs = [group._replace(versions={}) for group in groups_by(0, 0)]
  assert sampled_by(of_other_runs, 3) == ({3}, None)
  (group,) = groups_by(4)
  of_tokens = np.full((toy.GROUP_SIZE, toy.RESPONSE), 4, np.int32)
  group = group._replace(arrays=group.arrays | {"token_versions": of_tokens})
  versions, found = sampled_by([group], 3)
  assert versions == {4} and found.tolist() == [of_tokens.tolist()]


def test_of_recorded_groups_the_mask_of_the_loss_is_compared():
  sampled, recorded = groups_by(0, 0)
  nothing = np.zeros_like(recorded.arrays["mask"])
  recorded = recorded._replace(arrays=recorded.arrays | {"mask": nothing})
  mask = sampled_mask([sampled._replace(arrays=sampled.arrays | {"mask": nothing}), recorded], 1)
  assert mask.dtype == np.float32 and mask[0].sum() == sampled.arrays["lengths"].sum()
  assert not mask[1].any()
