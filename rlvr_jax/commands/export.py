"""The command `export`: writes a policy as a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path

import jax

from rlvr_jax.data import ByteTokenizer, Tokenizer
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.huggingface_tensors import outside_tensors
from rlvr_jax.models.peft import save_adapters
from rlvr_jax.models.safetensors import tensor_names
from rlvr_jax.train.cluster import multihost, sharding
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.start.parameters import load_policy

ADAPTER = "adapter"


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
  """Files of the byte tokenizer; {} for a checkpoint's tokenizer: `save_checkpoint` copies it."""
  return tokenizer.huggingface_files() if isinstance(tokenizer, ByteTokenizer) else {}


def export(parts: Parts, directory: str, folder: Path | None) -> None:
  """Writes a policy as a folder that `transformers` can load.

  The weights have the network's compute dtype, but float32 in place of float64. The folder includes
  the tokenizer: a copy from `config.model.checkpoint`, or the byte tokenizer. Trained adapters are
  merged into the weights. The adapters are also written in PEFT's format, to the subfolder
  `adapter`. Tensors of `config.model.checkpoint` outside its text model are left out; a printed
  line counts these tensors.

  Args:
    parts: parts of the run.
    directory: the folder to create; local or a URL.
    folder: checkpoint of the policy, see `load_policy`.
  """
  frozen = parts.initial.frozen().trainer
  params, step = load_policy(parts.initial, folder)
  source = parts.config.model.checkpoint or None
  dtype = parts.model.config.compute_dtype
  save_checkpoint(
    directory,
    parts.programs.merge(params, frozen),
    parts.model.config,
    dtype="float32" if dtype == "float64" else dtype,
    source=source,
    further_files=_tokenizer_files(parts.tokenizer),
  )
  if source and multihost.is_first() and (outside := outside_tensors(tensor_names(source))):
    say(f"left out: {len(outside)} tensors of vision, audio and multi-token prediction (mtp)")
  if parts.lora is not None:
    adapters = jax.tree.map(sharding.to_host, params)
    if multihost.is_first():
      save_adapters(
        f"{directory.rstrip('/')}/{ADAPTER}",
        adapters,
        parts.lora,
        parts.model.config,
        base_model=source or "",
      )
  say(f"the policy after {step} updates is in {directory}")
