"""Prints lines, warnings and progress bars."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping

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
  ("turns", "dialogue/turns", "{:.1f}"),
  ("policy tok", "dialogue/policy_tokens", "{:.0f}"),
  ("environment tok", "dialogue/environment_tokens", "{:.0f}"),
  ("out of turns", "outcome/turn_limit", "{:.0%}"),
  ("environment's limit", "outcome/environment_limit", "{:.0%}"),
  ("refused", "outcome/environment_refused", "{:.0%}"),
  ("failed", "outcome/environment_failed", "{:.0%}"),
  ("s/reply", "time/seconds_per_reply", "{:.2g}"),
  ("slots busy", "time/slots_busy", "{:.0%}"),
  ("waiting", "time/waiting_share", "{:.0%}"),
  ("drain", "time/drain_share", "{:.0%}"),
  ("rollout tok/s", "time/rollout_tokens_per_second", "{:,.0f}"),
  ("update tok/s", "time/update_tokens_per_second", "{:,.0f}"),
  ("stale", "staleness/mean", "{:.1f}"),
)
_RARE = ("outcome/environment_",)  # prefixes of keys that are printed only if their value is not 0


def compact_line(
  step: int,
  total: int,
  values: Mapping[str, float],
  *,
  held_out: str = "",
  seconds_left: float | None = None,
) -> str:
  """The printed line of one step, without missing values and without rare outcomes that are 0.

  Args:
    step: number of updates so far, of `total`.
    values: metrics of the last update.
    held_out: result of the last evaluation, such as "pass@1 0.431".
    seconds_left: estimate of the time to the last update; None if unknown.
  """
  parts = [f"step {step:>{len(str(total))}}/{total}"]
  parts += [
    f"{label} {form.format(float(values[key]))}"
    for label, key, form in _LINE
    if key in values and (values[key] or not key.startswith(_RARE))
  ]
  if held_out:
    parts.append(f"held-out {held_out}")
  if seconds_left is not None and step < total:
    parts.append(f"{duration(seconds_left)} left")
  return "  ".join(parts)


def duration(seconds: float) -> str:
  """A time in one unit: "45 s", "12 min" or "3.5 h"."""
  if seconds < 99.5:
    return f"{seconds:.0f} s"
  if seconds < 99.5 * 60:
    return f"{seconds / 60:.0f} min"
  return f"{seconds / 3600:.1f} h"


def say(line: str) -> None:
  """Prints a line, above the progress bars if there are any."""
  tqdm.tqdm.write(line, file=sys.stdout)
  sys.stdout.flush()


def warn(text: str) -> None:
  """Prints "warning: …" about something that the user may want to change; the run continues."""
  say(f"warning: {text}")


def progress(
  iterable_or_total: Iterable[object] | int,
  description: str,
  *,
  unit: str = "items",
  initial: int = 0,
) -> tqdm.tqdm:
  """A progress bar; if stderr is not a terminal, plain lines at most every ten seconds.

  Args:
    iterable_or_total: what to iterate over, or the number of units to report with `update(n)`.
    description: name of the phase.
    unit: name of what is counted, in the plural.
    initial: units already done, if the phase was resumed.
  """
  kind = tqdm.tqdm if sys.stderr.isatty() else _PlainProgress
  known = {"desc": description, "unit": f" {unit}", "initial": initial, "dynamic_ncols": True}
  if isinstance(iterable_or_total, int):
    return kind(total=iterable_or_total, **known)
  return kind(iterable_or_total, **known)


class _PlainProgress(tqdm.tqdm):
  """Prints "warm start: 20/60 steps, loss=0.412, 3 s, 6 s left" as lines, for logs."""

  def __init__(self, *args: object, **kwargs: object):
    self._last_line: tuple[float, str] = (-math.inf, "")
    super().__init__(*args, **kwargs, mininterval=10, leave=False)

  def display(self, msg: str | None = None, pos: int | None = None) -> None:
    del pos
    if msg == "":  # tqdm clears the bar
      return
    of = f"/{self.total}" if self.total is not None else ""
    line = f"{self.desc}: {self.n}{of}{self.unit}"
    if line != self._last_line[1]:
      self._last_line = (time.monotonic(), line)
      parts = [line, self.postfix, duration(self.format_dict["elapsed"]), self._left()]
      print(", ".join(filter(None, parts)), file=self.fp, flush=True)

  def _left(self) -> str:
    """The estimated time left, such as "6 s left"; "" if it cannot be estimated."""
    done = self.n - self.initial
    if not self.total or done <= 0 or self.n >= self.total:
      return ""
    return f"{duration(self.format_dict['elapsed'] * (self.total - self.n) / done)} left"

  def close(self) -> None:
    if not self.disable:
      self.display()
    super().close()
