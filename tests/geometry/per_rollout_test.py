"""Per-rollout gradients against a plain loop of jax.grad."""

import re

import jax
import numpy as np
import pytest
from oracles.gram_cases import (
  G,
  P,
  make_batch,
  make_case,
  make_lookup,
  make_transformer,
  rollout_loss,
)

from rlvr_jax.geometry import GramContext, num_selected, per_rollout, per_rollout_features

PATTERN = r"blocks/(query|down)$|embedding"


def looped(params, batch, setting):
  """Path → gradients [B, *leaf] of −Σ m log π, one jax.grad per rollout; and the output use's."""
  whole = jax.grad(lambda params, i: rollout_loss(params, batch, setting, i))
  through_head = jax.grad(
    lambda head, params, i: rollout_loss(params, batch, setting, i, head_params=head)
  )
  both = jax.jit(lambda params, i: (whole(params, i), through_head(params, params, i)))
  rows = [both(params, i) for i in range(P * G)]
  stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return [
    {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for tree in stacked
  ]


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [True, False])
def test_features_and_gram_of_any_parameters(x64, tied_head):
  model, params = make_transformer(tied_head=tied_head)
  batch, setting = make_batch(0), GramContext(model, 0.8)
  leaves, of_head = looped(params, batch, setting)
  kernel = of_head["embedding"].mT if tied_head else of_head["head_kernel"]
  if tied_head:
    assert np.abs(leaves["embedding"] - of_head["embedding"]).max() > 0.1
    leaves["embedding"] = of_head["embedding"]  # the input's use is cut
  expected = {"head": [kernel], "all": list(leaves.values())}
  if tied_head:  # the other subsets read the head alike
    expected["last_block"] = [x[:, -1] for path, x in leaves.items() if path.startswith("blocks/")]
    expected[PATTERN] = [x for path, x in leaves.items() if re.search(PATTERN, path)]

  @jax.jit
  def run(params, batch):
    gram = lambda name: per_rollout(parameters=name).gram(params, {}, batch, None, setting)
    features = per_rollout_features(params, {}, batch, setting, parameters="all")
    return features, {name: gram(name) for name in expected if name != "all"}

  features, grams = run(params, batch)
  rows = {
    name: np.concatenate([x.reshape(P * G, -1) for x in leaves], axis=1)
    for name, leaves in expected.items()
  }
  np.testing.assert_allclose(features, rows["all"], rtol=1e-9, atol=1e-11)
  assert np.all(features[3] == 0)  # the rollout whose mask is empty
  for name in expected:
    assert num_selected(params, {}, setting, parameters=name) == rows[name].shape[1]
  for name, gram in grams.items():
    np.testing.assert_allclose(gram, rows[name] @ rows[name].T, rtol=1e-9, err_msg=name)


def test_bfloat16_gradients_are_taken_in_float32():
  params, batch, _, setting = make_case(dtype="bfloat16")
  features = per_rollout_features(params, {}, batch, setting, parameters="kernel")
  assert features.dtype == np.float32
  exact = jax.tree.map(lambda p: p.astype(np.float32), params)
  expected = per_rollout_features(exact, {}, batch, setting, parameters="kernel")
  assert np.linalg.norm(features - expected) < 0.01 * np.linalg.norm(expected)


def test_nothing_to_differentiate():
  model, params = make_lookup(dtype="float32")
  with pytest.raises(ValueError, match=r"'attn' matches none of the .*: kernel, table"):
    per_rollout(parameters="attn").gram(params, {}, make_batch(0), None, GramContext(model))
  with pytest.raises(ValueError, match="nor a regular expression"):
    per_rollout(parameters="(")
