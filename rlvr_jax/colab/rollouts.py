"""Reading a run's rollouts: by outcome, length and age."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.evaluate.pass_at_k import wilson_interval
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.rollouts.batch import from_shard
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import place
from rlvr_jax.train.setup.build import make_schedule

# Kind of a rollout → its color. A response at the length limit is "cut off", whatever its grade.
KINDS = {
  "correct": COLORS["success"],
  "wrong": COLORS["failure"],
  "unparseable": COLORS["behavior"],
  "cut off": COLORS["plain"],
  "not graded": COLORS["reference"],  # the grader crashed or timed out
}
ANY = "any"


class Rollout(NamedTuple):
  """One rollout as the run's store has it."""

  batch: int  # number of its batch
  group: int  # of its prompt, within the batch
  prompt: str
  completion: str
  answer: str  # the reference
  kind: str  # one of KINDS
  reward: float | None  # before the penalty for length; None without a grade
  length: int  # tokens, stop token included
  age: int  # updates between the policy that sampled it and the update that first trains on it
  surprisals: np.ndarray  # f32[length], −log β of each token, nats


def load(workdir: str | os.PathLike[str]) -> list[Rollout]:
  """All rollouts in a run's store, in the order in which they were sampled.

  Raises:
    FileNotFoundError: the folder has no run.
    StoreError: its store cannot be read.
  """
  folder = place("the workdir", workdir)
  if not (folder / "config.json").exists():
    raise FileNotFoundError(
      f"{str(folder)!r} has no config.json: give the --workdir of a run, which has one"
    )
  config = ml_collections.ConfigDict(json.loads((folder / "config.json").read_text()))
  used_at = _first_used(make_schedule(config), config.num_updates)
  store = RolloutStore(folder / "rollouts", writable=False)
  found: list[Rollout] = []
  for number in store.numbers():
    found += _of_batch(from_shard(number, *store.read(number)), used_at)
  return found


def _first_used(schedule: Schedule, num_updates: int) -> dict[int, int]:
  """Batch → the first update that trains on it."""
  return {schedule.batch(t): t for t in reversed(range(num_updates))}


def _of_batch(batch: Any, used_at: dict[int, int]) -> list[Rollout]:
  train, size = batch.graded.train, batch.graded.train.rewards.shape[1]
  update = used_at.get(batch.number, batch.version)
  logprobs = train.behavior_logprobs.reshape(-1, train.behavior_logprobs.shape[-1])
  return [
    Rollout(
      batch.number, index // size, sample["prompt"], sample["completion"], sample["answer"],
      kind_of(sample), sample["reward"], sample["tokens"], update - sample["version"],
      -logprobs[index, : sample["tokens"]],
    )
    for index, sample in enumerate(batch.graded.samples)
  ]  # fmt: skip


def kind_of(sample: dict[str, Any]) -> str:
  """One of KINDS, for a record of a store."""
  if not sample["stopped"]:
    return "cut off"
  return sample["outcome"] if sample["outcome"] in KINDS else "not graded"


def chosen(
  rollouts: Iterable[Rollout],
  *,
  kind: str = ANY,
  shortest: int = 0,
  longest: int | None = None,
  age: int | str = ANY,
) -> list[Rollout]:
  """The rollouts of a kind, of `shortest` to `longest` tokens (None: no limit), and of an age.

  Raises:
    ValueError: the kind is unknown.
  """
  check_choice("chosen", "kind", kind, [ANY, *KINDS])
  return [
    r
    for r in rollouts
    if kind in (ANY, r.kind)
    and shortest <= r.length
    and (longest is None or r.length <= longest)
    and age in (ANY, r.age)
  ]


def ages(rollouts: Iterable[Rollout]) -> list[int]:
  """The ages that occur, ascending."""
  return sorted({r.age for r in rollouts})


def batches(rollouts: Iterable[Rollout]) -> list[int]:
  """The numbers of the batches, ascending."""
  return sorted({r.batch for r in rollouts})


def lengths(rollouts: Iterable[Rollout]) -> list[int]:
  """The lengths that occur, ascending, in tokens."""
  return sorted({r.length for r in rollouts})


class Shares(NamedTuple):
  """The share of the correct among the rollouts with each value of a property."""

  values: np.ndarray  # i64[N], ascending
  share: np.ndarray  # f64[N]
  low: np.ndarray  # f64[N], Wilson's 95 % interval
  high: np.ndarray  # f64[N]
  counts: np.ndarray  # i64[N], rollouts


def correct_by(rollouts: Sequence[Rollout], name: str) -> Shares:
  """The share of the correct by a field of `Rollout`: "length", "age" or "batch"."""
  check_choice("correct_by", "name", name, ("length", "age", "batch"))
  outcomes: dict[int, list[bool]] = collections.defaultdict(list)
  for rollout in rollouts:
    outcomes[getattr(rollout, name)].append(rollout.kind == "correct")
  rows = [
    (value, np.mean(of), *wilson_interval(float(np.mean(of)), len(of)), len(of))
    for value, of in sorted(outcomes.items())
  ]
  values, share, low, high, counts = np.array(rows, float).reshape(-1, 5).T
  return Shares(values.astype(int), share, low, high, counts.astype(int))


# --- drawing --------------------------------------------------------------------------------------


def plot_kinds(axes: Any, rollouts: Sequence[Rollout]) -> None:
  """The share of each kind in every batch, stacked."""
  numbers = batches(rollouts)
  counts = {
    kind: collections.Counter(r.batch for r in rollouts if r.kind == kind) for kind in KINDS
  }
  present = [kind for kind in KINDS if counts[kind]]
  of_batch = collections.Counter(r.batch for r in rollouts)
  shares = [[counts[kind][n] / of_batch[n] for n in numbers] for kind in present]
  colors = [KINDS[kind] for kind in present]
  axes.stackplot(numbers, *shares, labels=present, colors=colors, alpha=0.8, linewidth=0)
  axes.set(xlabel="batch", ylabel="share of the rollouts", ylim=(0, 1))
  axes.margins(x=0)
  legend_outside(axes, reverse=True)


def plot_lengths(axes: Any, rollouts: Sequence[Rollout]) -> None:
  """Plots the number of rollouts of each kind and length."""
  present = [kind for kind in KINDS if chosen(rollouts, kind=kind)]
  data = [[r.length for r in chosen(rollouts, kind=kind)] for kind in present]
  edges = np.arange(min(map(min, data)), max(map(max, data)) + 2) - 0.5
  colors = [KINDS[kind] for kind in present]
  axes.hist(data, edges, stacked=True, label=present, color=colors, alpha=0.8)
  axes.set(xlabel="response length (tokens)", ylabel="rollouts")
  legend_outside(axes, reverse=True)


def plot_correct(axes: Any, rollouts: Sequence[Rollout], name: str, least: int = 20) -> None:
  """The share of the correct by "length", "age" or "batch", with 95 % intervals.

  Values that fewer than `least` rollouts have are left out.
  """
  every = correct_by(rollouts, name)
  found = Shares(*(array[every.counts >= least] for array in every))
  error = [found.share - found.low, found.high - found.share]
  style = dict(fmt="o", color=COLORS["success"], markersize=4, elinewidth=1)
  axes.errorbar(found.values, found.share, error, **style)
  unit = {"length": "response length (tokens)", "age": "age (updates)", "batch": "batch"}
  axes.set(xlabel=unit[name], ylabel="share of the correct", ylim=(-0.03, 1.03))
  axes.xaxis.get_major_locator().set_params(integer=True)


def plot_groups(axes: Any, rollouts: Sequence[Rollout], batch: int) -> None:
  """A square per rollout of a batch; a row is a prompt's group, most correct first."""
  from matplotlib.patches import Patch

  groups: dict[int, list[Rollout]] = collections.defaultdict(list)
  for rollout in rollouts:
    if rollout.batch == batch:
      groups[rollout.group].append(rollout)
  if not groups:
    raise ValueError(f"plot_groups: there is no batch {batch}; choose one of {batches(rollouts)}")
  kinds = list(KINDS)
  rows = [sorted(kinds.index(r.kind) for r in group) for group in groups.values()]
  rows.sort(key=lambda row: row.count(0), reverse=True)
  colors = np.array([_rgb(color) for color in KINDS.values()])
  axes.imshow(colors[np.array(rows)], aspect="equal", interpolation="nearest")
  axes.set_xticks(np.arange(len(rows[0]) + 1) - 0.5, [])
  axes.set_yticks(np.arange(len(rows) + 1) - 0.5, [])
  axes.grid(color="white", linewidth=2, alpha=1)
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)
  effective = sum(0 < row.count(0) < len(row) for row in rows)
  title = f"batch {batch}: {effective} of {len(rows)} groups have both"
  axes.set(title=title, xlabel="rollouts of a prompt", ylabel="prompts")
  present = sorted({kind for row in rows for kind in row})
  handles = [Patch(color=colors[kind], label=kinds[kind]) for kind in present]
  legend_outside(axes, handles=handles)


def draw_groups(rollouts: Sequence[Rollout], batch: int) -> None:
  """Makes the figure of `plot_groups`."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(5.5, 5))
  plot_groups(axes, rollouts, batch)


def draw_surprisals(rollouts: Sequence[Rollout], number: int) -> None:
  """Makes the figure of `plot_surprisals` of rollouts[number]."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(11, 2.8))
  plot_surprisals(axes, rollouts[number])


def _rgb(color: str) -> tuple[float, float, float]:
  from matplotlib.colors import to_rgb

  return to_rgb(color)


def plot_surprisals(axes: Any, rollout: Rollout) -> None:
  """−log β of each token of a rollout, above the token's text where a token is a byte."""
  texts = [*rollout.completion.replace("\n", "⏎"), "end"]
  count = len(rollout.surprisals)
  labels = texts[:count] if len(texts) >= count else [str(i + 1) for i in range(count)]
  axes.bar(np.arange(count), rollout.surprisals, color=KINDS[rollout.kind])
  axes.set_xticks(np.arange(count), labels)
  axes.set(title=f"{rollout.prompt!r}, {rollout.kind} (answer {rollout.answer})")
  axes.set(ylabel=r"$-\log\,\beta$ (nats)", ylim=(0, max(0.1, 1.05 * rollout.surprisals.max())))
  axes.grid(axis="x", visible=False)


def explore(
  rollouts: Sequence[Rollout], *, kind: str = ANY, longest: int | None = None, age: int | str = ANY,
  count: int = 6,
) -> None:  # fmt: skip
  """Plots where the chosen rollouts lie among all, and prints some, spread over the run."""
  from matplotlib import pyplot

  found = chosen(rollouts, kind=kind, longest=longest, age=age)
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3))
  everything = np.bincount([r.length for r in rollouts])
  picked = np.bincount([r.length for r in found], minlength=everything.size)
  left.bar(np.arange(everything.size), everything, color=COLORS["reference"], label="all")
  left.bar(np.arange(everything.size), picked, color=KINDS.get(kind, COLORS["effective"]),
           label="chosen")  # fmt: skip
  left.set(xlabel="response length (tokens)", ylabel="rollouts")
  numbers = batches(rollouts)
  per_batch = collections.Counter(r.batch for r in found)
  right.plot(numbers, [per_batch[n] for n in numbers], color=KINDS.get(kind, COLORS["effective"]))
  right.set(xlabel="batch", ylabel="chosen rollouts", ylim=(0, None))
  left.set_xlim(left=min(lengths(rollouts)) - 1)
  handles = left.get_legend_handles_labels()
  figure.legend(*handles, loc="outside upper left", ncols=2)
  print(f"{len(found)} of {len(rollouts)} rollouts")
  show(found, count)


def show(rollouts: Sequence[Rollout], count: int = 6) -> None:
  """Prints `count` of the rollouts, spread evenly over them."""
  for index in np.unique(np.linspace(0, len(rollouts) - 1, count).astype(int)) if rollouts else ():
    r = rollouts[index]
    reward = "none" if r.reward is None else f"{r.reward:g}"
    print(f"batch {r.batch:3}  age {r.age}  {r.length:3} tokens  reward {reward}  {r.kind}")
    print(f"    {r.prompt!r} → {r.completion!r}   (answer {r.answer})")
