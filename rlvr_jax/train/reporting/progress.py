"""What a run prints: lines, and progress bars."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import tqdm

_LINE = (  # label, key, format
  ("reward", "reward/mean", "{:.3f}"),
  ("pass", "reward/pass_rate", "{:.1%}"),
  ("groups", "groups/effective", "{:g}"),
  ("entropy", "policy/entropy", "{:.3f}"),
  ("kl", "behavior/kl_k3", "{:.1e}"),
  ("clip", "loss/clip_fraction", "{:.1%}"),
  ("grad", "update/gradient_norm", "{:.3g}"),
  ("length p50", "response/length_p50", "{:.0f}"),
  ("p99", "response/length_p99", "{:.0f}"),
  ("truncated", "response/truncated", "{:.1%}"),
  ("slots busy", "time/slots_busy", "{:.0%}"),
  ("drain", "time/drain_share", "{:.0%}"),
  ("rollout tok/s", "time/rollout_tokens_per_second", "{:,.0f}"),
  ("update tok/s", "time/update_tokens_per_second", "{:,.0f}"),
  ("stale", "staleness/mean", "{:.1f}"),
)


def compact_line(step: int, total: int, values: Mapping[str, Any]) -> str:
  """The printed line of one step; missing values are left out."""
  parts = [f"step {step:>{len(str(total))}}/{total}"]
  parts += [
    f"{label} {form.format(float(values[key]))}" for label, key, form in _LINE if key in values
  ]
  return "  ".join(parts)


def say(line: str) -> None:
  """Prints a line, above the progress bars if there are any."""
  tqdm.tqdm.write(line, file=sys.stdout)
  sys.stdout.flush()


def progress(
  iterable_or_total: Iterable[Any] | int, description: str, *, unit: str = "it", initial: int = 0
) -> tqdm.tqdm:
  """A progress bar; if stderr is not a terminal, plain lines at most every ten seconds.

  Args:
    iterable_or_total: what to iterate over, or the number of units to report with `update(n)`.
    description: name of the phase.
    unit: name of what is counted.
    initial: units already done, if the phase was resumed.
  """
  kind = tqdm.tqdm if sys.stderr.isatty() else _PlainProgress
  known = {"desc": description, "unit": unit, "initial": initial, "dynamic_ncols": True}
  if isinstance(iterable_or_total, int):
    return kind(total=iterable_or_total, **known)
  return kind(iterable_or_total, **known)


class _PlainProgress(tqdm.tqdm):
  """Prints "warm start: 20/60 it, 3.1 s" as lines, for logs."""

  def __init__(self, *args: Any, **kwargs: Any):
    self._last_line: tuple[float, str] = (-math.inf, "")
    super().__init__(*args, **kwargs, mininterval=10, leave=False)

  def display(self, msg: str | None = None, pos: int | None = None) -> None:
    del pos
    if msg == "":  # tqdm clears the bar
      return
    of = f"/{self.total}" if self.total is not None else ""
    line = f"{self.desc}: {self.n}{of} {self.unit}"
    if line != self._last_line[1]:
      self._last_line = (time.monotonic(), line)
      print(f"{line}, {self.format_dict['elapsed']:.1f} s", file=self.fp, flush=True)

  def close(self) -> None:
    if not self.disable:
      self.display()
    super().close()
