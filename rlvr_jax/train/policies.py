"""Which parameters a command other than training works on, and their way out as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax

from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.peft import save_adapters
from rlvr_jax.train import components, multihost, sharding
from rlvr_jax.train.checkpoint import read_params
from rlvr_jax.train.metrics import say
from rlvr_jax.types import Params

ADAPTER = "adapter"


def checkpoint_folder(checkpoint: str) -> Path:
  """WORKDIR/checkpoints/STEP that is named, or the last one of the run that is named.

  Raises:
    ValueError: there is none.
  """
  folder = Path(checkpoint)
  if not folder.name.isdigit():
    steps = [path for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    folder = max(steps, key=lambda path: int(path.name), default=folder / "checkpoints")
  if not folder.name.isdigit() or not folder.is_dir():
    raise ValueError(
      f"--checkpoint={checkpoint} holds no checkpoint; give the --workdir of a run, or one of its"
      " checkpoints, WORKDIR/checkpoints/STEP"
    )
  return folder


def chosen_params(parts: components.Parts, folder: Path | None) -> tuple[Params, int]:
  """Parameters of a policy, and the updates behind them.

  Args:
    parts: of a configuration with that policy's shape.
    folder: of `checkpoint_folder`; None for the policy that training would begin with.
  Raises:
    CheckpointError: it is damaged or of another shape.
  """
  if folder is None:
    return components.initial_params(parts), 0
  return read_params(folder, parts.abstract_state.params), int(folder.name)


def export(parts: components.Parts, directory: str, folder: Path | None) -> None:
  """Writes a policy as a folder that `transformers` loads, in its compute dtype.

  Trained adapters are merged into it, and written as they are, in PEFT's format, to its folder
  `adapter`.

  Args:
    parts: as for `chosen_params`.
    directory: to be made; local or a URL.
    folder: as for `chosen_params`.
  """
  components.load_base(parts)
  params, step = chosen_params(parts, folder)
  source = parts.config.model.checkpoint or None
  dtype = parts.model.config.compute_dtype
  save_checkpoint(
    directory,
    parts.programs.whole(parts.mesh)(params),
    parts.model.config,
    dtype="float32" if dtype == "float64" else dtype,
    source=source,
  )
  if parts.programs.settings is not None:
    adapters = jax.tree.map(sharding.to_host, params)
    if multihost.is_first():
      save_adapters(
        f"{directory.rstrip('/')}/{ADAPTER}",
        adapters,
        parts.programs.settings,
        parts.model.config,
        base_model=source or "",
      )
  say(f"the policy after {step} updates is in {directory}")
