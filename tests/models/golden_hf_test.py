"""The network against `transformers`: every folder under golden/hf…, by the loader."""

from __future__ import annotations

import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.checkpoints import golden_folders, load, logits_after, split_prompts
from oracles.sampling import sample

from rlvr_jax.models.experts import NO_EXPERT
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.models.safetensors import open_checkpoint
from rlvr_jax.ops.caches import Blocks, Cache, CacheShape, Reach
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster.sharding import make_mesh
from rlvr_jax.types import Prompts, Rows, Sampling

_SHARED = os.environ.get("RLVR_SHARED")
_FOLDERS, _REFUSED = golden_folders("hf", "hf_moe", "hf_families")
# Others have all that is particular to the rest: biases, norms, windows, routers.
_QUICK = ("gemma2", "gemma3", "gemma4_large", "glm4", "llama", "mixtral", "olmo3")
_QUICK += ("qwen3_5_moe", "smollm3_window")
_RECURRENT = [folder for folder in _FOLDERS if folder.name == "qwen3_5"]
_MIXTURES = [f for f in _FOLDERS if f.parent.name == "hf_moe" or f.name == "qwen3_5_moe"]
_STOP = 2
# Expected logits of gated DeltaNets are themselves off by up to 4e-5.
_close = functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-4)

pytestmark = pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")


def each(folders, quick):
  """Parametrizes by golden checkpoints; those that are not quick are slow."""
  slow = lambda folder: () if folder.name in quick else pytest.mark.slow
  cases = [pytest.param(folder, id=folder.name, marks=slow(folder)) for folder in folders]
  return pytest.mark.parametrize("case", cases, indirect=True)


@pytest.fixture(scope="module")
def case(request):
  model, params = load(request.param)
  model = model._replace(
    response_hidden=jax.jit(model.response_hidden), row_hidden=jax.jit(model.row_hidden)
  )
  return model, params, np.load(request.param / "expected.npz")


# The layers of a Qwen 3.5 with experts are here those of `qwen3_5` and `mixtral`.
@each(_FOLDERS, quick=set(_QUICK) - {"qwen3_5_moe"})
def test_logits_of_a_prompt_and_its_response_equal_the_published_models(case):
  model, params, expected = case
  ids, mask = expected["input_ids"], expected["attention_mask"]
  longest_padding = int((mask == 0).sum(axis=1).max())
  split = longest_padding + 1  # as early as can be: nearly all places are compared
  logits = logits_after(model, params, ids, split, mask)
  _close(logits, expected["logits"][:, split - 1 :])


@each(_MIXTURES, quick=["mixtral"])
def test_every_place_has_the_published_models_experts(case):
  """In a forward pass, in prefill and in decoding; at padding there are none."""
  model, params, expected = case
  ids, mask = expected["input_ids"], expected["attention_mask"]
  split = int((mask == 0).sum(axis=1).max()) + 1
  prompts, responses = split_prompts(ids, split, mask)
  _, routes, _ = jax.jit(model.response_routed)(params, prompts, responses)
  found = np.concatenate([routes.prompts, routes.responses[:, 0, :-1]], axis=1)
  np.testing.assert_array_equal(found[mask == 1], expected["experts"][mask == 1])
  assert np.all(found[mask == 0] == NO_EXPERT)

  unpadded = np.stack([np.roll(row, -n) for row, n in zip(ids, (mask == 0).sum(1), strict=True)])
  lengths = jnp.asarray(mask.sum(axis=1), jnp.int32)
  prefill = jax.jit(lambda params: model.prefill(model.decoding_params(params), unpadded, lengths))
  *_, found = prefill(params)
  for row, real, theirs in zip(found, mask, expected["experts"], strict=True):
    np.testing.assert_array_equal(row[: real.sum()], theirs[real == 1])
    assert np.all(row[real.sum() :] == NO_EXPERT)


@pytest.mark.parametrize(
  "folder", [f for f in _FOLDERS if not f.name.endswith("_outer")], ids=lambda folder: folder.name
)
def test_an_export_has_the_published_tensors(folder, tmp_path):
  """Their names and bits, each expert's and those of rows in another order; and the settings."""
  model, params = load(folder, make_mesh(fsdp=2, tensor=4))
  kind = json.loads((folder / "config.json").read_text())["model_type"]
  save_checkpoint(tmp_path / "out", params, model.config, dtype="float32", source=folder)
  expected, found = open_checkpoint(folder), open_checkpoint(tmp_path / "out")
  assert found.keys() == expected.keys()
  for name, tensor in expected.items():
    rows = tensor.shape[0]
    np.testing.assert_array_equal(found[name].rows(0, rows), tensor.rows(0, rows), err_msg=name)
  assert checkpoint_config(tmp_path / "out") == model.config
  assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind


@each(_FOLDERS, quick=_QUICK)
def test_logits_of_cached_decoding_equal_the_published_models(case):
  model, params, expected = case
  ids, mask = jnp.asarray(expected["input_ids"], jnp.int32), expected["attention_mask"]
  split = int((mask == 0).sum(axis=1).max()) + 1
  lengths = jnp.asarray(mask[:, :split].sum(axis=1), jnp.int32)
  rest = ids[:, split:]

  shape = CacheShape(Blocks(split, 1), Blocks(split, 0), steps=rest.shape[1] + 1)
  settings = decoder.Settings(model, Sampling(), len(ids), shape, shape.steps, ())
  # From the prompt's last token on; prompts without their padding, on the left of the cache.
  forced = jnp.concatenate([ids[:, split - 1 : split], rest], axis=1)
  unpadded = jnp.stack(
    [jnp.roll(row, -int(split - n)) for row, n in zip(ids[:, :split], lengths, strict=True)]
  )

  @jax.jit
  def decoded(params):
    params = model.decoding_params(params)
    prefilled = decoder.prefill(params, unpadded, lengths - 1, settings=settings)
    reach = Reach.of(lengths - 1, lengths * 0, lengths > 0)
    tables = decoder.rotary_tables(reach, settings=settings)
    zeros = lambda tokens, heads, *blocks: Cache.zeros(
      (heads.keys, *blocks, len(ids)), tokens, heads.width, model.config.compute_dtype
    )
    of_layers = list(zip(prefilled.prompts, model.config.heads, strict=True))
    caches = [(prompt, zeros(split, heads, 0)) for prompt, heads in of_layers]

    def one(carry, inputs):
      t, token = inputs
      hidden, *carry, routes = decoder.decode(
        params, caches, *carry, reach, tables, token, t, lengths > 0, settings=settings
      )
      return carry, (hidden, routes)

    staged = tuple(zeros(shape.steps, heads) for _, heads in of_layers)
    carry = [staged, prefilled.states]
    _, (hidden, routes) = jax.lax.scan(one, carry, (jnp.arange(shape.steps), forced.T))
    return head_logits(jnp.swapaxes(hidden, 0, 1), model.head(params)), routes

  logits, routes = decoded(params)
  if model.config.experts is not None:
    found = jnp.swapaxes(routes, 0, 1)
    np.testing.assert_array_equal(found, expected["experts"][:, split - 1 :])
  _close(logits, expected["logits"][:, split - 1 :])


@each(_FOLDERS, quick=[])
def test_greedy_decoding_gives_the_published_models_tokens(case):
  model, params, expected = case
  ids, mask, greedy = (expected[k] for k in ("input_ids", "attention_mask", "greedy_tokens"))
  new = greedy[:, ids.shape[1] :] if greedy.shape[1] > ids.shape[1] else greedy
  if _STOP not in new and "head_kernel" in params:  # its logit is 0
    params = params | {"head_kernel": params["head_kernel"].at[:, _STOP].set(0)}
  prompts = Prompts(tokens=ids.astype(np.int32), lengths=mask.sum(1).astype(np.int32))
  settings = dict(
    prefill_rows=len(ids),
    max_prompt_length=ids.shape[1],
    max_new_tokens=new.shape[1],
    stop_tokens=(),
    pad_token=0,
  )
  for slots in (len(ids), 1):  # all at once, and one after the other
    sampler = EnginePrograms(model, Sampling(temperature=0.0), slots=slots, **settings)
    rollouts = sample(sampler, params, {}, prompts, jax.random.key(0), 1)
    # Some published texts were generated without the stop token.
    for row, theirs in zip(rollouts.tokens[:, 0], new, strict=True):
      until = int(np.argmax(row == _STOP)) if _STOP in row else len(row)
      np.testing.assert_array_equal(row[:until], theirs[:until])
  hidden = model.response_hidden(params, prompts, jnp.asarray(new, jnp.int32)[:, None])[:, 0]
  logits = head_logits(hidden, model.head(params))
  if _STOP not in new:
    logits = logits.at[..., _STOP].set(-jnp.inf)
  np.testing.assert_array_equal(jnp.argmax(logits, axis=-1), new)


_PLACES = 96  # of a row, and of a prompt: one program computes all that have as many


def logits_of_row(case, ids, rows):
  """[L, V] of the L tokens of one row, which is padded to `_PLACES`."""
  model, params, _ = case
  pad = lambda x, value: jnp.pad(x, [(0, 0), (0, _PLACES - x.shape[1])], constant_values=value)
  padded = Rows(*(pad(x, -1 if name == "prompts" else 0) for name, x in rows._asdict().items()))
  hidden = model.row_hidden(params, pad(jnp.asarray(ids), 0), padded)
  return head_logits(hidden, model.head(params))[0, : ids.shape[1]]


@each(_RECURRENT, quick=["qwen3_5"])
class TestStates:
  """Of gated DeltaNets."""

  def test_they_are_the_published_ones_after_a_prefix_and_after_every_token(self, case):
    """A prefix of 66 tokens, in two chunks, and one of 2, shorter than the convolution."""
    model, params, expected = case
    prefill = jax.jit(lambda params, *x: model.prefill(model.decoding_params(params), *x)[1])
    for prefix in ("", "short_"):
      ids, following = expected[f"{prefix}prefix_ids"], expected[f"{prefix}decode_ids"]
      tokens = np.concatenate([ids, following], axis=1).astype(np.int32)
      padded = np.pad(tokens, [(0, 0), (0, _PLACES - tokens.shape[1])])
      for name, length in ((prefix, ids.shape[1]), (f"{prefix}final_", tokens.shape[1])):
        states = prefill(params, padded, jnp.full(len(ids), length))
        for layer, state in enumerate(states):
          _close(state.memory, expected[f"{name}recurrent_states"][layer], err_msg=name)
          windows = np.concatenate(state.windows, axis=-1).swapaxes(1, 2)
          published = expected[f"{name}conv_states"][layer][..., 1:]  # the oldest is not read
          _close(windows, published, err_msg=name)

  def test_nothing_passes_between_sequences_of_a_row(self, case):
    """Leaked states would move logits by 4 to 8."""
    *_, expected = case
    segments = jnp.asarray(expected["packed_segments"])
    ends = jnp.cumsum(jnp.bincount(segments[0]))[segments]
    rows = Rows(segments, jnp.asarray(expected["packed_positions"]), ends, ends)
    _close(logits_of_row(case, expected["packed_ids"], rows), expected["packed_logits"][0])

  def test_a_rollout_goes_on_from_its_prompt(self, case):
    *_, expected = case
    prompt, responses = expected["branch_prompt"][0], expected["branch_responses"]
    ids = np.concatenate([prompt, *responses])[None].astype(np.int32)
    S, (G, T) = len(prompt), responses.shape
    index = np.arange(S + G * T)[None]
    rollout = np.maximum(index - S, 0) // T
    rows = Rows(
      prompts=jnp.zeros_like(index),
      positions=jnp.asarray(np.where(index < S, index, index - rollout * T)),
      starts=jnp.asarray(np.where(index < S, S, S + rollout * T)),
      prompt_ends=jnp.full_like(index, S),
    )
    logits = logits_of_row(case, ids, rows)
    _close(logits[:S], expected["branch_prompt_logits"].reshape(S, -1))
    _close(logits[S:].reshape(G, T, -1), expected["branch_logits"])


_REASONS = {
  "gemma4": "hidden_size_per_layer_input = 8",
  "gemma4_outer": "hidden_size_per_layer_input = 8",
  "gemma4_moe": "enable_moe_block = True",
}


@pytest.mark.parametrize("folder", _REFUSED, ids=lambda folder: folder.name)
def test_a_network_that_is_not_computed_here_is_refused_by_name(folder):
  kind = json.loads((folder / "config.json").read_text())["model_type"]
  reason = _REASONS.get(folder.name, f"model_type = '{kind}' is unknown")
  with pytest.raises(ValueError, match=reason):
    checkpoint_config(folder)
