"""Networks in which full layers have other heads than sliding ones: plain formulas, and sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles.flops import product_flops
from oracles.networks import FLOAT64, V, random_params
from oracles.networks import FULL_HEADS as CONFIG
from oracles.rows import lay_rows

from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.memory import activation_bytes
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.rollouts.decoder import token_bytes
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.checks import check_heads, sampling_splits
from rlvr_jax.update.optimizer import adamw, lion

SLIDES, FULL = True, False


def plain_hidden(c, params, tokens):
  """Final states [L, D] of one sequence, layer by layer."""
  root = lambda x: jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
  norm = lambda x, weights: x / root(x) * weights["scale"]
  position = jnp.arange(len(tokens))
  distance = position[:, None] - position
  x = params["embedding"][tokens] * 4.0
  stacks, seen = params["blocks"], {SLIDES: 0, FULL: 0}
  for layer, slides in enumerate(c.sliding_layers):
    of = stacks if slides else stacks["full"]
    row, H, K = seen[slides], *((4, 4) if slides else (12, 2))
    seen[slides] += 1
    names = [n for n in ("query", "key", "value", "output", "query_norm", "key_norm") if n in of]
    a = jax.tree.map(lambda stacked, row=row: stacked[row], {name: of[name] for name in names})
    rest = {name: stacks[name] for name in stacks if name not in (*names, "full")}
    w = jax.tree.map(lambda stacked, layer=layer: stacked[layer], rest)
    # Of full layers half of the 6 pairs (i, i + 6) rotate, with the frequencies of all 6.
    frequencies = 10.0 ** -(np.arange(2) / 2) if slides else 100.0 ** -(np.arange(6) / 6)
    frequencies = frequencies if slides else frequencies * (np.arange(6) < 3)

    def rotated(head, frequencies=frequencies, H=H):
      pairs = head[..., : H // 2] + 1j * head[..., H // 2 :]
      turned = pairs * jnp.exp(1j * position[:, None] * frequencies)
      return jnp.concatenate([turned.real, turned.imag], axis=-1)

    normed = norm(x, w["attention_norm"])
    queries, keys = normed @ a["query"], normed @ a["key"]
    values = normed @ a["value"] if "value" in a else keys
    visible = (distance >= 0) & (distance < (3 if slides else 99))
    of_heads = lambda y, H=H: jnp.swapaxes(y.reshape(len(y), -1, H), 0, 1)
    queries = rotated(norm(of_heads(queries), a["query_norm"]))
    keys = rotated(norm(of_heads(keys), a["key_norm"]))
    values = of_heads(values) / root(of_heads(values))
    keys, values = (jnp.repeat(y, 8 // K, axis=0) for y in (keys, values))
    scores = jnp.where(visible, queries @ jnp.swapaxes(keys, 1, 2), -jnp.inf)
    heads = jnp.swapaxes(jax.nn.softmax(scores, axis=-1) @ values, 0, 1)
    x = x + norm(heads.reshape(len(tokens), -1) @ a["output"], w["post_attention_norm"])
    normed = norm(x, w["mlp_norm"])
    gate = jax.nn.gelu(normed @ w["gate"], approximate=True)
    x = x + norm((gate * (normed @ w["up"])) @ w["down"], w["post_mlp_norm"])
    x = x * w["layer_scale"]
  return norm(x, params["final_norm"])


@pytest.mark.parametrize(
  "changes",
  [
    dict(full_keys_as_values=False, sliding_layers=(SLIDES, FULL), num_layers=2),
    pytest.param(dict(), marks=pytest.mark.slow),
    pytest.param(
      dict(remat="full", sliding_layers=(SLIDES, SLIDES, FULL) * 2, num_layers=6),
      marks=pytest.mark.slow,
    ),
  ],
  ids=str,
)
def test_rows_and_their_gradients_are_those_of_the_plain_formulas(x64, changes):
  """But the factors of layers get none, since they are not trained."""
  config = dataclasses.replace(CONFIG, **FLOAT64, **changes)
  model, params = transformer(config), random_params(config)
  tokens = np.random.default_rng(0).integers(0, V, (2, 7))
  rows = lay_rows(7, [(2, [5])], [(4, [3])], alignment=1)

  def gradient(hidden):
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(hidden(p)))))(params)

  found = gradient(lambda params: model.row_hidden(params, tokens, rows))
  plain = jax.vmap(functools.partial(plain_hidden, config), in_axes=(None, 0))
  expected = gradient(lambda params: plain(params, tokens))
  factors = [gradient["blocks"].pop("layer_scale") for _, gradient in (found, expected)]
  assert not np.any(factors[0]) and np.all(factors[1])
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)
  assert all(np.any(x != 0) for x in jax.tree.leaves(found))


@pytest.mark.parametrize("optimizer", [adamw, lion])
def test_factors_of_layers_are_not_trained(optimizer):
  params = {"blocks": {"layer_scale": jnp.full((2, 1), 0.7), "gate": jnp.ones((2, 3, 3))}}
  rule = optimizer(learning_rate=optax.constant_schedule(0.1), weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, params)
  changes, _ = rule.update(zeros, rule.init(params), params)
  assert not np.any(changes["blocks"]["layer_scale"]) and np.all(changes["blocks"]["gate"])


# --- devices --------------------------------------------------------------------------------------


def test_devices_share_whole_key_heads_of_every_layer():
  mesh = lambda tensor: sharding.make_mesh(tensor=tensor)
  check_heads(CONFIG, mesh(2))
  with pytest.raises(ValueError, match=r"the network's 4 and 2 key/value heads; allowed: \[1, 2\]"):
    check_heads(CONFIG, mesh(4))
  assert [n for n in range(1, 17) if sampling_splits(CONFIG, n)] == [1, 2, 4, 8]


# --- sizes ----------------------------------------------------------------------------------------


def test_a_cached_token_takes_the_heads_of_each_layer():
  """2 sliding layers of 4·4 keys and as many values, 2 full layers of 2·12, in float32."""
  assert token_bytes(CONFIG, 1) == 2 * 4 * 2 * (4 * 4 + 2 * 12)
  assert token_bytes(CONFIG, 2) == 2 * 4 * 2 * (2 * 4 + 12)
  assert token_bytes(CONFIG, 4) == token_bytes(CONFIG, 8) == 2 * 4 * 2 * (4 + 12)  # with copies
  assert token_bytes(CONFIG, 1, "int8") == 2 * 2 * (4 * (4 + 4) + 2 * (12 + 4))


def test_activations_are_those_of_each_layer():
  config = dataclasses.replace(CONFIG, remat="dots")
  rest = 3 * 16 + 2 * 20  # a layer's input, and results of its other products
  near, full = rest + (8 + 2 * 4) * 4, rest + (8 + 2 * 2) * 12
  assert activation_bytes(config, tokens=64, tensor=1) == 64 * 4 * (2 * (near + full) + 4 * full)


@pytest.mark.parametrize("keys_as_values", [True, False])
def test_flops_are_those_of_the_programs_products(keys_as_values):
  """All of a program's products but the scores, which it computes for keys that are not visible."""
  config = dataclasses.replace(CONFIG, full_keys_as_values=keys_as_values)
  model, length = transformer(config), 9
  rows = lay_rows(length, [(length, [])], alignment=1)

  def logits(params):
    hidden = model.row_hidden(params, jnp.zeros((1, length), jnp.int32), rows)
    return head_logits(hidden, model.head(params))

  params = jax.eval_shape(model.init, jax.random.key(0))
  program = product_flops(jax.make_jaxpr(logits)(params))
  of_keys = lambda near, far: 4 * 8 * 2 * (4 * near + 12 * far)
  program -= of_keys(length**2, length**2) - of_keys(1 + 2 + 3 * 7, length * (length + 1) / 2)
  assert program == forward_flops(config, [1], [[length]])
