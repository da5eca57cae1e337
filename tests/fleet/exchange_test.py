"""Objects of a fleet by any author: what is damaged or hostile is dropped, and nothing else."""

import json
import os
import pickle

import numpy as np
import pytest
from fleet import toy

from rlvr_jax.fleet import exchange as exchange_module
from rlvr_jax.fleet import remote
from rlvr_jax.fleet.exchange import Exchange, RecordError, SamplerRecord, Watch
from rlvr_jax.fleet.program import Orders
from rlvr_jax.rollouts import group as group_file
from rlvr_jax.storage.files import with_crc32
from rlvr_jax.storage.objects import FolderObjects, Listed

RECORD = SamplerRecord(0, 3, 2, "samples", "", False, [[1, 2]], 0, 0)


@pytest.fixture
def objects():
  return toy.MemoryObjects()


@pytest.fixture
def exchange(objects):
  return Exchange(objects)


def test_records_come_back(exchange):
  assert exchange.begin_term({"code": "a"}) == 0 and exchange.begin_term({"code": "b"}) == 1
  assert exchange.identity(1) == {"code": "b"} and exchange.identity(0) is None
  exchange.announce(1, 7, "bits")
  assert exchange.fingerprint(1, 7) == "bits" and exchange.fingerprint(1, 8) is None
  draw = toy.draw(4)
  digest = exchange.put_draw(1, draw, [5, 0])
  assert exchange.get_draw(1, 4) == (draw, [0, 5], digest)
  exchange.beat("s", RECORD)
  assert exchange.sampler("s") == RECORD
  group = toy.group(draw, 5)
  assert exchange.put_group(group, digest) and not exchange.put_group(group, digest)
  view = exchange.look()
  assert view._replace(groups=[*view.groups], samplers=[*view.samplers]) == (
    *(1, [7], [4], [(4, 5)], ["s"], False),
  )
  read, of = exchange.get_group((4, 5), view.groups[4, 5])
  assert of == digest and read._replace(arrays={}) == group._replace(arrays={})
  for name, array in group.arrays.items():
    np.testing.assert_array_equal(read.arrays[name], array)
  exchange.end(1)
  assert exchange.look().ended


@pytest.mark.parametrize(
  "other", [toy.draw(4, seed=1), toy.draw(3), toy.draw(4)._replace(sources=[1] * 6)]
)
def test_another_draw_has_another_digest(other):
  assert exchange_module.digest_draw(other) != exchange_module.digest_draw(toy.draw(4))
  assert exchange_module.digest_draw(toy.draw(4)) == exchange_module.digest_draw(
    toy.draw(4)._replace(version=3)
  )


def test_names_of_another_form_are_not_seen(exchange, objects):
  names = ["samplers/../x", "samplers/.a", "samplers/a b", "groups/1.2.3", "groups/01.2", "x/1"]
  names += ["groups/-1.2", "groups/1.99999999999999", "terms/x", "draws/1", f"samplers/{'a' * 81}"]
  for name in [*names, "samplers/a\n", "groups/1.2\n", "groups/１.2"]:
    objects.put(name, b"x")
  assert exchange.look() == (-1, [], [], {}, {}, False)
  for name in ("../x", "a/b", "", ".", "a" * 81):
    with pytest.raises(ValueError, match="is not allowed as a sampler's name"):
      exchange.beat(name, RECORD)


CHANGES = {
  "draws/0.4": [
    dict(number=5),
    dict(indices=[6]),
    dict(indices=[-1]),
    dict(indices=[1.0]),
    dict(indices="0"),
    dict(seed="1"),
    dict(seed=True),
    dict(version=-1),
    dict(version=2**60),
    dict(sources=[0]),
    dict(problems=[]),
    dict(problems=[{"question": "?"}] * 6),
    dict(more=1),
  ],
  "policies/0.7": [dict(fingerprint=1), dict(fingerprint=None)],
  "terms/0": [dict(identity="x"), dict(identity={"a": 1})],
  "samplers/s": [dict(beat=-1), dict(doing=[[1]]), dict(error=None), dict(ends_run=1)],
}


def read(exchange, name):
  if name.startswith("samplers"):
    if exchange.sampler("s") is None:  # nothing but a message depends on it
      raise RecordError(name)
    return
  reads = {
    "draws/0.4": lambda: exchange.get_draw(0, 4),
    "policies/0.7": lambda: exchange.fingerprint(0, 7),
    "terms/0": lambda: exchange.identity(0),
  }
  reads[name]()


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_record_may_contain_is_checked(name, exchange, objects):
  exchange.begin_term({"code": "a"})
  exchange.announce(0, 7, "bits")
  exchange.put_draw(0, toy.draw(4), [0])
  exchange.beat("s", RECORD)
  read(exchange, name)
  data = objects.get(name)
  content = {key: value for key, value in json.loads(data).items() if key != "crc32"}
  damaged = [data[:-9], data[:40] + b"x" + data[41:], b"", b"[]", pickle.dumps(content)]
  damaged.append(b"[" * 10**5)
  changed = [{**content, **fields} for fields in [*CHANGES[name], dict(format="other")]]
  for other in [*damaged, *(json.dumps(with_crc32(c)).encode() + b"\n" for c in changed)]:
    objects.replace(name, other)
    with pytest.raises(RecordError, match=name):
      read(exchange, name)


# --- groups ---------------------------------------------------------------------------------------


@pytest.fixture
def trainer(exchange):
  """One that wants group 1 of draw 4, and has offered versions 2 and 3."""
  made = toy.trainer(exchange, toy.Weights(), deadline_s=0.0)
  for version in (2, 3):
    made.offer(toy.policy(version))
  made.want(toy.draw(4, version=2), [1])
  return made


def digest():
  return exchange_module.digest_draw(toy.draw(4))


def good(**fields):
  arrays = fields.pop("arrays", {})
  group = toy.group(toy.draw(4), 1, 3)
  return group._replace(arrays={**group.arrays, **arrays}, **fields)


def with_samples(**fields):
  return good(samples=[{**sample, **fields} for sample in good().samples])


def without(*names):
  return good()._replace(arrays={n: a for n, a in good().arrays.items() if n not in names})


def encoded(*groups, of=None):
  return group_file.encode(groups, {"draw": of or digest()})


def filled(value, *shape):
  """An array of a group of two, of 32 bits."""
  dtype = np.int32 if isinstance(value, np.int32) else np.float32
  return np.full((2, *shape), value, dtype)


def with_arrays(**arrays):
  return encoded(good(arrays=arrays))


BAD = {
  "other bytes": (lambda: b"x" * 100, "not a file of groups"),
  "pickled": (lambda: pickle.dumps(good()), "not a file of groups"),
  "empty": (lambda: b"", "not a file of groups"),
  "truncated": (lambda: encoded(good())[:-5], "checksum"),
  "a changed bit": (lambda: encoded(good())[:-5] + b"\0" + encoded(good())[-4:], "checksum"),
  "another place": (lambda: encoded(good(index=2)), "contains other groups than its name"),
  "two groups": (lambda: encoded(good(), good()), "other groups than its name"),
  "other problems": (lambda: encoded(good(), of="0" * 16), "other problems"),
  "an old version": (lambda: encoded(good(versions={1: "bits 1"})), "version 1 is older"),
  "other bits": (lambda: encoded(good(versions={3: "x"})), "version 3 had the fingerprint x"),
  "later than its batch": (lambda: encoded(good(versions={9: "x"})), "version 9 comes after"),
  "another source": (lambda: encoded(good(source=3)), "from source 3"),
  "without versions": (lambda: encoded(good(versions={})), "has the versions []"),
  "two versions": (
    lambda: encoded(good(versions={2: "bits 2", 3: "bits 3"})),
    "has the versions [2, 3]",
  ),
  "few samples": (lambda: encoded(good(samples=good().samples[:1])), "1 samples for 2 rollouts"),
  "no outcome": (lambda: encoded(with_samples(outcome=None)), "lacks its outcome"),
  "no detail": (lambda: encoded(with_samples(outcome="crashed")), "crashed lacks its detail"),
  "another prompt": (lambda: encoded(with_samples(prompt="?")), "sample is not the question"),
  "a missing array": (lambda: encoded(without("correct", "stopped")), "lacks the arrays correct,"),
  "an array too many": (
    lambda: with_arrays(lags=np.zeros((2, toy.RESPONSE), np.int32)),
    "must not have the arrays lags",
  ),
  "a wrong mask": (lambda: with_arrays(mask=filled(np.nan, toy.RESPONSE)), "mask has values"),
  "long responses": (
    lambda: with_arrays(
      tokens=filled(np.int32(1), 900), mask=filled(0.0, 900), behavior_logprobs=filled(0.0, 900)
    ),
    "shape (2, 900), expected (2, 8)",
  ),
  "negative tokens": (lambda: with_arrays(tokens=filled(np.int32(-1), toy.RESPONSE)), "tokens has"),
  "unknown tokens": (lambda: with_arrays(tokens=filled(np.int32(50), toy.RESPONSE)), "tokens has"),
  "long lengths": (lambda: with_arrays(lengths=filled(np.int32(99))), "lengths has values"),
  "NaN": (lambda: with_arrays(rewards=filled(np.nan)), "rewards has values"),
  "a group of three": (
    lambda: encoded(
      good()._replace(
        arrays={
          n: a if n.startswith("prompts") else np.concatenate([a, a[:1]])
          for n, a in good().arrays.items()
        }
      )
    ),
    "expected (2,",
  ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_group_is_dropped_and_sampled_again(kind, exchange, objects, trainer, monkeypatch):
  make, why = BAD[kind]
  said = []
  monkeypatch.setattr(trainer, "_say", said.append)
  objects.put("groups/4.1", make())
  with pytest.raises(RuntimeError, match="no sampler"):
    trainer.take()
  assert why in said[0] and "group 1 of draw 4 is sampled again" in said[0]
  assert "groups/4.1" not in objects.data  # so that a sampler finds it missing
  assert trainer.statistics()["fleet/dropped_groups"] == 1
  exchange.put_group(good(), digest())
  (group,) = trainer.take()
  assert group.samples == good().samples


def test_what_another_run_s_policy_or_several_versions_sample():
  """Sources without versions of this run, and groups with a version for each token."""
  example = good()
  allowed = remote.Allowed([example, example._replace(versions={})], toy.VOCABULARY)
  of = toy.draw(4, version=2)._replace(sources=[0, 1, 1, 1, 1, 1])
  check = lambda group: remote.check_group(group, of, allowed)
  check(good(source=1, versions={}))
  with pytest.raises(RecordError, match=r"has the versions \[3\]"):
    check(good(source=1))
  versions = np.array([[3, 3, -1, -1, -1, -1, -1, -1], [3, 4, 4, -1, -1, -1, -1, -1]], np.int32)
  several = good(arrays=dict(token_versions=versions), source=0, index=0)
  several = several._replace(samples=toy.group(of, 0).samples, versions={3: "a", 4: "b"})
  with pytest.raises(RecordError, match="must not have the arrays token_versions"):
    check(several)
  allowed = remote.Allowed([several, several], toy.VOCABULARY)
  check(several)
  for wrong in ({3: "a"}, {3: "a", 4: "b", 5: "c"}, {}):
    with pytest.raises(RecordError, match=r"its tokens have the versions \[3, 4\]"):
      check(several._replace(versions=wrong))


def test_a_huge_group_is_not_read(exchange, objects, trainer, monkeypatch):
  monkeypatch.setattr(exchange_module, "MAX_GROUP_BYTES", 10**4)
  objects.put("groups/4.1", bytes(10**4 + 1))
  listed, get = objects.list, objects.get
  monkeypatch.setattr(objects, "get", lambda name: "groups" not in name and get(name))
  with pytest.raises(RuntimeError, match="no sampler"):
    trainer.take()
  assert not [name for name in listed() if "groups" in name]


def test_a_huge_record_is_not_seen(exchange, objects, monkeypatch):
  monkeypatch.setattr(exchange_module, "MAX_RECORD_BYTES", 10**4)
  exchange.begin_term({})
  for name in ("terms/1", "draws/0.1", "policies/0.1", "samplers/s", "ends/0"):
    objects.put(name, bytes(10**4 + 1))
  assert exchange.look() == (0, [], [], {}, {}, False)


def test_a_group_waits_for_its_version(exchange, trainer):
  """Of an earlier trainer, which had published that version; the oldest draw waits for none."""
  later = toy.draw(5, version=3)
  trainer.want(later, [0])
  exchange.put_group(toy.group(later, 0, 5), exchange_module.digest_draw(later))
  exchange.put_group(good(), digest())
  assert [group.draw for group in trainer.take()] == [4]
  for version in (4, 5):
    trainer.offer(toy.policy(version))
  assert [group.versions for group in trainer.take()] == [{5: "bits 5"}]


def test_late_groups_are_counted_and_removed(exchange, objects, trainer):
  exchange.put_group(good(), digest())
  trainer.take()
  for number in (5, 6, 7):
    of = toy.draw(number, version=3)
    trainer.want(of, [0])
    if number == 7:  # all of draw 4 is removed
      assert exchange.put_group(good(), digest())
    exchange.put_group(toy.group(of, 0, 3), exchange_module.digest_draw(of))
    trainer.take()
  assert trainer.statistics()["fleet/late_groups"] == 1
  names = [name for name in objects.data if name.startswith("groups")]
  assert names == ["groups/6.0", "groups/7.0"]


def test_a_recorded_plan_is_refused(trainer):
  with pytest.raises(
    ValueError, match="cannot repeat a run whose record has a version for each token"
  ):
    trainer.want(toy.draw(5)._replace(plan=np.zeros((6, 2, 8), np.int32)), [0])


# --- folders, clocks, shares ----------------------------------------------------------------------


def test_links_and_pipes_in_a_folder_are_not_followed(tmp_path):
  objects = FolderObjects(tmp_path / "fleet")
  secret = tmp_path / "secret"
  secret.write_bytes(b"s")
  (tmp_path / "fleet" / "groups").mkdir()
  (tmp_path / "fleet" / "groups" / "1.2").symlink_to(secret)
  os.mkfifo(tmp_path / "fleet" / "groups" / "1.3")
  assert objects.list() == {} and not Exchange(objects).look().groups
  assert objects.get("groups/1.2") is None and objects.get("groups/1.3") is None


def test_a_sampler_lives_while_its_object_is_seen_to_change():
  now = [0.0]
  watch = Watch(10.0, lambda: now[0])
  at = lambda **changes: watch.look({name: Listed(1, change) for name, change in changes.items()})
  assert at(a=5, b=5) == ["a", "b"]
  now[0] = 9.0
  assert at(a=4, b=5) == ["a", "b"]  # any change counts, also one to an earlier number
  now[0] = 11.0
  assert at(a=4, b=5, c=1) == ["a", "c"] and watch.dead(10.0) == ["b"]
  assert at(a=4, b=6, c=1) == ["a", "b", "c"]
  assert at(a=4) == ["a"]


def test_groups_are_shared_evenly_and_stay_where_they_are():
  names = [f"s{i}" for i in range(10)]
  places = [(number, index) for number in range(20) for index in range(100)]
  first = {place: Orders(names).of(place)[0] for place in places}
  counts = [sum(owner == name for owner in first.values()) for name in names]
  assert 150 < min(counts) <= max(counts) < 250
  fewer = {place: Orders(names[1:]).of(place)[0] for place in places}
  assert all(fewer[place] == owner for place, owner in first.items() if owner != "s0")
  moved = {fewer[place] for place, owner in first.items() if owner == "s0"}
  assert moved == set(names[1:])
