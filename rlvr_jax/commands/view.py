"""The command `view`: writes the page of a run, or serves the page while the run continues."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import ml_collections

from rlvr_jax.storage.files import JsonObject, report_unwritable
from rlvr_jax.storage.places import in_bucket
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.view import read, write


def view(
  base: ml_collections.ConfigDict,
  workdir: str,
  *,
  beside: str | None = None,
  batches: str = read.DEFAULT_BATCHES,
  serve: bool = False,
  port: int = 0,
) -> Callable[[], write.Written | None]:
  """Opens runs; returns a function that writes WORKDIR/view.html, or serves the page until Ctrl-C.

  The page of a run in a bucket is written to the current folder.

  Args:
    base: the configuration that each run's configuration is compared with.
    workdir: the workdir of the run.
    beside: the workdir of a second run, which is shown beside the first.
    batches: the batches in view.html, see `read.choose_batches`; with `serve`, every batch can be
      loaded.
    serve: whether to serve the page rather than write it.
    port: the port of 127.0.0.1; 0 for any free port.
  Raises:
    ValueError: a folder has no run or lacks the batches, or the port cannot be used.
  """
  jax.config.update("jax_platforms", "cpu")  # the run may use the other devices
  runs = [read.open_run(workdir)]
  runs += [read.open_run(beside, "--beside")] if beside else []
  recipe = json.loads(base.to_json_best_effort())
  if serve:
    return functools.partial(_serve, _open_server(runs, recipe, port), runs)
  numbers = [read.stored_numbers(run.folder) for run in runs]
  if batches == read.DEFAULT_BATCHES:  # two runs show the same batches if possible
    shared = sorted(set.intersection(*map(set, numbers)))
    numbers = [shared or of_run for of_run in numbers]
  measured = set[int]().union(*map(read.measured_updates, runs))
  chosen = [read.choose_batches(batches, of_run, measured) for of_run in numbers]
  folder = Path() if in_bucket(runs[0].folder) else Path(workdir)
  return lambda: _write(folder / write.PAGE_FILE, runs, recipe, chosen)


def _write(
  path: Path, runs: Sequence[read.Run], base: JsonObject, batches: Sequence[Sequence[int]]
) -> write.Written:
  with report_unwritable(str(path), WorkdirError):
    written = write.write_page(path, runs, base, batches)
  say(f"{path}: {written.size / 2**20:.1f} MiB; open it in a browser")
  if written.left_out:
    most = write.MAX_BYTES // 2**20
    say(
      f"left out: {', '.join(written.left_out)}. A file has at most {most} MiB; --serve shows every"
      " intact batch"
    )
  return written


def _open_server(runs: Sequence[read.Run], base: JsonObject, port: int) -> write.Server:
  try:
    return write.Server(runs, base, port)
  except OSError as error:
    raise ValueError(
      f"--port={port} of {write.HOST} cannot be used: {error.strerror}; choose another port, or"
      " leave --port out for any free port"
    ) from error


def _serve(server: write.Server, runs: Sequence[read.Run]) -> None:
  with server:
    say(f"{server.address} shows {' and '.join(str(run.folder) for run in runs)}; Ctrl-C ends it")
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      say("ended")
