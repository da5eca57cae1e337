"""Copies of a run's metrics for a tracker: wandb, or trackio, which has the same functions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from rlvr_jax.storage.files import replace_file
from rlvr_jax.train.reporting.progress import warn

TRACKERS = ("trackio", "wandb")  # the extras of the same names
RUN_FILE = "tracked.json"  # of a workdir: the run's id, which a resumed run continues


class Tracker:
  """One tracker; its first error is printed, ends the copies and not the run."""

  def __init__(self, name: str, workdir: pathlib.Path, config: Mapping[str, Any]):
    """Opens the run of this workdir, or resumes it.

    Args:
      name: of the tracker.
      workdir: of the run.
      config: the run's configuration; JSON.

    Raises:
      ValueError: the tracker is unknown, or not installed.
    """
    check(name)
    self.name, self._failed = name, False
    module: Any = importlib.import_module(name)
    identity = _run_id(workdir)
    if name == "wandb":  # a run has an id besides its name
      specific = {"id": identity, "name": workdir.name, "dir": str(workdir)}
    else:
      specific = {"name": f"{workdir.name}-{identity}"}
    self._run = module.init(
      project="rlvr_jax",
      resume="allow",
      config=dict(config),
      **specific,
    )

  def log(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
    """Sends the numbers of one record; every phase has its own counter, such as train/step."""
    if self._failed:
      return
    try:
      of_phase = {name.removeprefix(f"{phase}/"): value for name, value in values.items()}
      named = {f"{phase}/{name}": value for name, value in {"step": step, **of_phase}.items()}
      self._run.log(named)
    except Exception as error:  # of the tracker's network, disk or site
      self._failed = True
      warn(f"{self.name} gets no more metrics of this run: {error}; metrics.jsonl has all of them")

  def close(self) -> None:
    """Waits until all that was logged has been sent."""
    self._run.finish()


def check(name: str) -> None:
  """Raises ValueError unless the tracker is known and installed."""
  if name not in TRACKERS:
    raise ValueError(f"--trackers={name} is unknown; allowed: {', '.join(TRACKERS)}")
  if importlib.util.find_spec(name) is None:
    raise ValueError(f'--trackers={name} is not installed: pip install -e ".[{name}]"')


def _run_id(workdir: pathlib.Path) -> str:
  path = workdir / RUN_FILE
  if not path.exists():
    with replace_file(path) as file:
      file.write(json.dumps({"id": uuid.uuid4().hex[:8]}).encode())
  return json.loads(path.read_text())["id"]
