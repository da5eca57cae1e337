"""Policies are restored as they were published, complete or not at all, onto the sampler's mesh."""

import contextlib
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train import tiny

from rlvr_jax.fleet.program import PolicyGoneError
from rlvr_jax.models.functional import transformer
from rlvr_jax.storage.places import Workdir, parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import ForeignCheckpointError, saved_steps
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.fleet import policies
from rlvr_jax.train.fleet.policies import (
  Policy,
  PolicyDamagedError,
  PolicyPublisher,
  PolicyReader,
  abstract_policy,
)
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.initial_params import make_lora
from rlvr_jax.train.setup.programs import trained_params


@pytest.fixture(scope="module")
def parts():
  return build(tiny.config(model__overrides=dict(num_layers=1, width=32, mlp_width=64)))


def publisher_of(folder, parts, **settings):
  return PolicyPublisher(folder, parts.model.config, adapters_only=False, **settings)


def reader_of(folder, parts):
  trained, mesh = parts.placement.state.params, parts.placement.mesh
  policy = abstract_policy(trained, parts.model.config, mesh, adapters_only=False)
  return PolicyReader(folder, policy)


def reader_of_network(folder, network, mesh):
  """Of a sampler whose configuration has this network, without adapters."""
  trained = sharding.abstract_params(transformer(network, sharding.make_layout(mesh)), mesh)
  return PolicyReader(folder, abstract_policy(trained, network, mesh, adapters_only=False))


def same(found, expected):
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("storage", ["disk", "bucket"])
def test_a_policy_is_restored_as_published(storage, parts, tmp_path, request):
  url = tmp_path if storage == "disk" else request.getfixturevalue("url")
  workdir = Workdir(url)
  folder = parse_path("", url) / "fleet_weights"
  params = parts.initial.trained()
  others = jax.tree.map(lambda x: x + 1, params)
  first, second, third = (Policy(version, f"{version:016x}") for version in (3, 4, 5))
  reader = reader_of(folder, parts)
  with contextlib.closing(publisher_of(folder, parts, keep=2, workdir=workdir)) as publisher:
    assert publisher.published() == []
    metrics = publisher.publish(params, first)
    assert metrics["fleet/published_gib"] * 2**30 == sum(x.nbytes for x in jax.tree.leaves(params))
    publisher.publish(others, second)
    publisher.wait()
    assert publisher.published() == [first, second]
    restored = reader.restore(second)
    assert same(restored, others)
    publisher.publish(params, third)
    publisher.wait()
    assert publisher.published() == [second, third]  # the latest two
    with pytest.raises(PolicyGoneError, match="version 3"):
      reader.restore(first)
    with pytest.raises(PolicyGoneError):  # of an update that was lost, and came out differently
      reader.restore(second._replace(fingerprint="other"))
  # A successor that begins before them. What it removes is gone, in a folder of a workdir too.
  with contextlib.closing(publisher_of(folder, parts, keep=2, workdir=workdir)) as publisher:
    assert publisher.published() == [second, third]
    publisher.publish(others, second)  # again: the earlier one's files may be damaged
    publisher.wait()
    assert publisher.published() == [second]  # the update after it was lost
    assert saved_steps(folder) == [4]
    publisher.publish(params, second._replace(fingerprint="other"))
    publisher.wait()
    assert same(reader.restore(second._replace(fingerprint="other")), params)


def test_a_sampler_gets_the_dtypes_that_decode_on_its_own_mesh(parts, tmp_path):
  network = dataclasses.replace(parts.model.config, compute_dtype="bfloat16")
  params = parts.initial.trained()
  with contextlib.closing(PolicyPublisher(tmp_path, network, adapters_only=False)) as publisher:
    publisher.publish(params, Policy(0, "a"))
    publisher.wait()
  mesh = sharding.make_mesh(data=2, fsdp=2)
  restored = reader_of_network(tmp_path, network, mesh).restore(Policy(0, "a"))
  kernel, scale = restored["blocks"]["query"], restored["final_norm"]["scale"]
  assert kernel.dtype == "bfloat16" and scale.dtype == "float32"
  assert np.array_equal(kernel, params["blocks"]["query"].astype("bfloat16"))
  assert len(kernel.sharding.device_set) == 4 and not kernel.sharding.is_fully_replicated


def test_only_adapters_are_published_where_only_they_are_trained(parts, tmp_path):
  network, mesh = parts.model.config, parts.placement.mesh
  trained = trained_params(make_lora(tiny.config(lora__rank=2).lora), parts.placement.base)
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: jnp.asarray(rng.random(x.shape), x.dtype), trained)
  with contextlib.closing(PolicyPublisher(tmp_path, network, adapters_only=True)) as publisher:
    publisher.publish(params, Policy(0, "a"))
    publisher.wait()
  policy = abstract_policy(trained, network, mesh, adapters_only=True)
  assert same(PolicyReader(tmp_path, policy).restore(Policy(0, "a")), params)


def test_what_is_incomplete_or_of_another_network_is_not_restored(parts, tmp_path, monkeypatch):
  with contextlib.closing(publisher_of(tmp_path, parts)) as publisher:
    publisher.publish(parts.initial.trained(), Policy(0, "a"))
    publisher.wait()
  other = dataclasses.replace(parts.model.config, width=64)
  with pytest.raises(ForeignCheckpointError, match="trainer's configuration"):
    reader_of_network(tmp_path, other, parts.placement.mesh).restore(Policy(0, "a"))
  (array,) = (tmp_path / "0" / "arrays" / "embedding").glob("0.0")
  tiny.flip(array)
  reader = reader_of(tmp_path, parts)
  with pytest.raises(PolicyGoneError):  # a trainer that starts may write it now
    reader.restore(Policy(0, "a"))
  monkeypatch.setattr(policies, "DAMAGED_S", 0.0)
  with pytest.raises(PolicyDamagedError, match=r"is damaged .* start the trainer again"):
    reader.restore(Policy(0, "a"))
  with contextlib.closing(publisher_of(tmp_path, parts)) as publisher:  # of its successor
    publisher.publish(parts.initial.trained(), Policy(0, "a"))
    publisher.wait()
  assert same(reader.restore(Policy(0, "a")), parts.initial.trained())
  shutil.rmtree(tmp_path / "0")
  with pytest.raises(PolicyGoneError):
    reader.restore(Policy(0, "a"))
