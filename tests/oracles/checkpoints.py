"""Golden checkpoints, and settings as older versions of `transformers` wrote them."""

import os
import pathlib

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
