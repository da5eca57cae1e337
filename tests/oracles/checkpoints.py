"""Checkpoints: golden ones, their logits, and settings of older versions of `transformers`."""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.train.cluster.sharding import add_shardings, make_mesh
from rlvr_jax.types import Prompts

_SHARED = os.environ.get("RLVR_SHARED")
# The networks within these are not computed.
_OF_OTHER_NETWORKS = ("deepseek_v3_moonlight", "gemma4", "gemma4_moe", "gemma4_outer")


def golden_folders(*kinds):
  """Folders of golden checkpoints of some kinds: those that are computed here, and the others."""
  folders = [
    folder
    for kind in kinds
    for folder in (sorted(pathlib.Path(_SHARED, "golden", kind).iterdir()) if _SHARED else [])
    if folder.is_dir()
  ]
  others = [folder for folder in folders if folder.name in _OF_OTHER_NETWORKS]
  return [folder for folder in folders if folder not in others], others


@functools.cache
def _model_and_shapes(config):
  model = transformer(config)
  return model, jax.eval_shape(model.init, jax.random.key(0))


def load(folder, mesh=None, *, block_bytes=2**20, **overrides):
  """(model, parameters) of a checkpoint, on a mesh or on one device."""
  config = checkpoint_config(folder, **overrides)
  model, shapes = _model_and_shapes(config)
  placed = add_shardings(shapes, make_mesh() if mesh is None else mesh)
  return model, load_params(folder, placed, config, block_bytes=block_bytes)


def split_prompts(ids, split, mask=None):
  """(prompts, responses [B, 1, T]) of left-padded tokens [B, L], of which `split` are prompts."""
  mask = np.ones_like(ids) if mask is None else mask
  prompts = Prompts(
    tokens=jnp.asarray(ids[:, :split], jnp.int32),
    lengths=jnp.asarray(mask[:, :split].sum(axis=1), jnp.int32),
  )
  # The state of a response's last token is not computed.
  return prompts, jnp.asarray(np.pad(ids[:, split:], [(0, 0), (0, 1)]), jnp.int32)[:, None]


def logits_after(model, params, ids, split, mask=None):
  """[B, L - split + 1, V] of all tokens from the prompts' last on; see `split_prompts`."""
  hidden = model.response_hidden(params, *split_prompts(ids, split, mask))[:, 0]
  return np.asarray(head_logits(hidden, model.head(params)))


def old_style(published):
  """A config.json as versions before rope_parameters and layer_types wrote it."""
  c = dict(published)
  family = c["model_type"]
  rope = c.pop("rope_parameters")
  full = rope.get("full_attention", rope)
  c["rope_theta"] = full["rope_theta"]
  if "partial_rotary_factor" in full:
    c["partial_rotary_factor"] = full["partial_rotary_factor"]
  if family == "gemma3_text":
    c["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
  if full["rope_type"] != "default":
    of_all = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in full.items() if name not in of_all}
    # These never had the oldest name, and transformers 5.23 takes it there for no scaling.
    oldest = full["rope_type"] == "linear" and family not in ("gemma3_text", "olmo3")
    key = "type" if oldest else "rope_type"
    c["rope_scaling"] = {key: scaling.pop("rope_type")} | scaling
  else:
    c["rope_scaling"] = None
  layers = c.pop("layer_types", [])
  if family == "gemma3_text":
    c["sliding_window_pattern"] = [*layers, "full_attention"].index("full_attention") + 1
  c["torch_dtype"] = c.pop("dtype")
  if c["tie_word_embeddings"] == family.startswith(("gemma", "smollm3")):
    del c["tie_word_embeddings"]
  if family in ("llama", "qwen2") and c["head_dim" if "head_dim" in c else "hidden_size"] == (
    c["hidden_size"] // c["num_attention_heads"]
  ):
    c.pop("head_dim", None)
  for name in ("attention_bias", "mlp_bias"):
    if not c.get(name, True) and family != "glm4":
      del c[name]
  if c["rms_norm_eps"] == 1e-6:
    del c["rms_norm_eps"]
  return c
