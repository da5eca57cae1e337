"""Which parameters a command other than training works on, and their way out as a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from rlvr_jax.files import local_path
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.peft import save_adapters
from rlvr_jax.models.presets import given_overrides
from rlvr_jax.train import multihost, parameters, sharding
from rlvr_jax.train.build import Parts
from rlvr_jax.train.checkpoint import CheckpointError, read_params
from rlvr_jax.train.metrics import say
from rlvr_jax.types import Params

ADAPTER = "adapter"


def checkpoint_folder(checkpoint: str) -> Path:
  """WORKDIR/checkpoints/STEP that is named, or the last one of the run that is named.

  Raises:
    ValueError: there is none, or it is not local.
  """
  folder = local_path("--checkpoint", checkpoint)
  of_run = folder if folder.name == "checkpoints" else folder / "checkpoints"
  if of_run.is_dir():
    steps = [path for path in of_run.glob("*") if path.name.isdigit()]
    folder = max(steps, key=lambda path: int(path.name), default=of_run)
  if not folder.name.isdigit() or not folder.is_dir():
    raise ValueError(
      f"--checkpoint={checkpoint} holds no checkpoint; give the --workdir of a run, or one of its"
      " checkpoints, WORKDIR/checkpoints/STEP"
    )
  return folder


def chosen_params(parts: Parts, folder: Path | None) -> tuple[Params, int]:
  """Parameters of a policy, and the updates behind them.

  Args:
    parts: of a configuration with that policy's shape.
    folder: of `checkpoint_folder`; None for the policy that training would begin with.
  Raises:
    CheckpointError: it is damaged, or of a run whose parameters mean something else here.
  """
  if folder is None:
    return parameters.initial_params(parts), 0
  _check_same_policy(parts, folder.parent.parent / "config.json")
  return read_params(folder, parts.abstract_state.params), int(folder.name)


def _check_same_policy(parts: Parts, path: Path) -> None:
  """Raises where a run's parameters would be another function under this configuration."""
  if not path.exists():
    return  # a checkpoint alone, moved away from its run
  theirs, ours = json.loads(path.read_text()), json.loads(parts.config.to_json_best_effort())
  fields = [("model", name) for name in ("preset", "checkpoint")]
  fields += [("lora", name) for name in ("rank", "alpha", "targets")]
  found = {f"{a}.{b}": (theirs.get(a, {}).get(b), ours[a][b]) for a, b in fields}
  found["tokenizer"] = (theirs["tokenizer"], ours["tokenizer"])
  found["model.overrides"] = (given_overrides(theirs["model"]), given_overrides(ours["model"]))
  differing = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
  if differing:
    raise CheckpointError(
      f"the run of {path.parent} had another network or other adapters: {differing} (of the run, of"
      " this configuration); set config to what the run had"
    )


def export(parts: Parts, directory: str, folder: Path | None) -> None:
  """Writes a policy as a folder that `transformers` loads, in its compute dtype.

  Trained adapters are merged into it, and written as they are, in PEFT's format, to its folder
  `adapter`.

  Args:
    parts: as for `chosen_params`.
    directory: to be made; local or a URL.
    folder: as for `chosen_params`.
  """
  frozen = parameters.load_frozen(parts).trainer
  params, step = chosen_params(parts, folder)
  source = parts.config.model.checkpoint or None
  dtype = parts.model.config.compute_dtype
  save_checkpoint(
    directory,
    parts.programs.merge(params, frozen),
    parts.model.config,
    dtype="float32" if dtype == "float64" else dtype,
    source=source,
  )
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
