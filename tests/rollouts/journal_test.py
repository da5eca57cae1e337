"""Groups of unfinished batches: what a kill and a damaged file leave."""

import numpy as np

from rlvr_jax.rollouts.journal import GroupJournal, from_json
from rlvr_jax.rollouts.serve import Group


def _group(index, T=9, pad=7):
  rng = np.random.default_rng(index)
  lengths = rng.integers(1, 6, 2).astype(np.int32)
  sampled = np.arange(T) < lengths[:, None]
  return Group(
    owner=None,
    prompt_index=index,
    tokens=np.where(sampled, rng.integers(0, 9, (2, T)), pad).astype(np.int32),
    lengths=lengths,
    stopped=rng.random(2) < 0.5,
    behavior_logprobs=np.where(sampled, rng.normal(size=(2, T)), 0).astype(np.float32),
  )


def _read(journal, draw=0, fingerprint="ours"):
  groups = [from_json(line, None) for line in journal.read(draw, fingerprint)]
  return {group.prompt_index: group for group in groups}


def test_groups_come_back_to_the_bit(tmp_path):
  journal = GroupJournal(tmp_path / "groups")
  assert _read(journal) == {}
  journal.append(0, "ours", [_group(3)])
  journal.append(0, "ours", [_group(1), _group(2)])
  journal.append(0, "another policy's", [_group(4)])
  journal.append(1, "ours", [_group(5)])
  found = _read(GroupJournal(tmp_path / "groups"))
  assert found.keys() == {1, 2, 3}
  for index, group in found.items():
    for name, value in _group(index)._asdict().items():
      np.testing.assert_array_equal(getattr(group, name), value)
      assert np.asarray(getattr(group, name)).dtype == np.asarray(value).dtype


def test_a_group_of_dialogues_comes_back(tmp_path):
  plain = _group(0)
  G = len(plain.lengths)
  group = plain._replace(
    turns=np.arange(plain.tokens.size, dtype=np.int32).reshape(plain.tokens.shape) % 5,
    ends=np.arange(G, dtype=np.int32),
    scores=np.where(np.arange(G) % 2, np.nan, 0.5).astype(np.float32),
    details=["", "KeyError: 'é'"],
    turn_scores=np.full(plain.tokens.shape, np.nan, np.float32),
  )
  group.turn_scores[1, 0] = 0.25
  group.turns[np.arange(group.tokens.shape[1]) >= group.lengths[:, None]] = 0
  journal = GroupJournal(tmp_path / "groups")
  journal.append(0, "ours", [group])
  found = _read(journal)[0]
  for name in ("turns", "ends", "scores", "turn_scores", "tokens"):
    np.testing.assert_array_equal(getattr(found, name), getattr(group, name))
    assert getattr(found, name).dtype == getattr(group, name).dtype
  assert found.details == group.details


def test_padding_costs_nothing_and_a_full_group_has_none(tmp_path):
  sizes = []
  for number, group in enumerate([_group(0), _group(0, T=4096), _group(0, T=5)]):
    group = group._replace(turn_scores=np.full(group.tokens.shape, np.nan, np.float32))
    journal = GroupJournal(tmp_path / str(number))
    journal.append(0, "ours", [group])
    np.testing.assert_array_equal(_read(journal)[0].tokens, group.tokens)
    np.testing.assert_array_equal(_read(journal)[0].behavior_logprobs, group.behavior_logprobs)
    sizes.append(len((tmp_path / str(number) / "00000000.jsonl").read_bytes()))
  assert max(sizes) - min(sizes) < 20


def test_a_torn_or_damaged_line_loses_its_group_only(tmp_path):
  journal = GroupJournal(tmp_path / "groups")
  journal.append(0, "ours", [_group(index) for index in range(3)])
  (path,) = (tmp_path / "groups").iterdir()
  lines = path.read_bytes().splitlines(keepends=True)
  lines[1] = lines[1].replace(b'"index": 1', b'"index": 7')
  path.write_bytes(b"".join(lines)[:-40])
  assert _read(journal).keys() == {0}
  journal.append(0, "ours", [_group(2)])  # after the torn line
  assert _read(journal).keys() == {0, 2}


def test_draws_in_the_store_are_forgotten(tmp_path):
  journal = GroupJournal(tmp_path / "groups")
  journal.forget(before=7)  # without a folder
  for draw in range(3):
    journal.append(draw, "ours", [_group(draw)])
  journal.forget(before=2)
  assert [_read(journal, draw).keys() for draw in range(3)] == [set(), set(), {2}]


def test_the_routes_of_a_group_come_back(tmp_path):
  """With expert 0 at the edges of what is padded with 0, and more experts than a byte holds."""
  plain, rng = _group(0), np.random.default_rng(1)
  routes = rng.integers(0, 300, (*plain.tokens.shape, 3, 2)).astype(np.uint16)
  routes[np.arange(plain.tokens.shape[1]) >= plain.lengths[:, None]] = 0
  routes[0, plain.lengths[0] - 1] = 0
  prompts = np.zeros((8, 3, 2), np.uint16)
  prompts[5:7] = rng.integers(0, 300, (2, 3, 2))
  group = plain._replace(routes=routes, prompt_routes=prompts)
  journal = GroupJournal(tmp_path / "groups")
  journal.append(0, "ours", [group])
  found = _read(journal)[0]
  for name in ("routes", "prompt_routes", "tokens"):
    np.testing.assert_array_equal(getattr(found, name), getattr(group, name))
    assert getattr(found, name).dtype == getattr(group, name).dtype
