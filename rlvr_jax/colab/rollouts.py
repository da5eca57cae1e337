"""Reads a run's rollouts: by outcome, length, age and turn."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.runs import read_schedule
from rlvr_jax.data import Tokenizer
from rlvr_jax.evaluate.pass_at_k import wilson_interval
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.rollouts.batches import Batch, read_batch
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.setup.tokenizers import make_tokenizer

# Kind of a rollout → color. A response at the length limit is "cut off", whatever its grade.
KINDS = {
  "correct": COLORS["success"],
  "wrong": COLORS["failure"],
  "unparseable": COLORS["behavior"],
  "cut off": COLORS["plain"],
  "out of turns": COLORS["entropy"],  # of dialogues, as the next one
  "refused": COLORS["result"],  # or beyond the environment's limits
  "not graded": COLORS["reference"],  # the grader crashed or timed out, or the environment failed
}
_KIND_OF_OUTCOME = {
  "turn_limit": "out of turns",
  "environment_refused": "refused",
  "environment_limit": "refused",
}
ANY = "any"


class Rollout(NamedTuple):
  """One rollout of a run's store."""

  batch: int  # number of the batch
  group: int  # index of the prompt within the batch
  prompt: str
  completion: str
  answer: str  # reference answer
  kind: str  # one of KINDS
  outcome: str  # as in rollouts.jsonl
  reward: float | None  # before the overlong penalty; None without a grade
  length: int  # tokens, stop token included
  age: int  # updates between the sampling policy and the first update on this rollout
  surprisals: np.ndarray  # f32[length], −log β of each token, nats; 0 for an environment's
  turns: tuple[str, ...]  # texts, of the policy and of the environment in turn
  turn_numbers: np.ndarray  # i32[length], the turn that each token belongs to, from 0
  token_texts: tuple[str, ...]  # of each token, "end" of a stop token; its number without tokenizer

  @property
  def policy_turns(self) -> int:
    """Turns of the policy."""
    return (len(self.turns) + 1) // 2


def load(workdir: str | os.PathLike[str], *, trust_run: bool = False) -> list[Rollout]:
  """Loads all rollouts of a run's store, in the order of sampling.

  Args:
    workdir: of the run.
    trust_run: see `runs.read_schedule`.
  Raises:
    FileNotFoundError: the folder has no run.
    StoreError: the store cannot be read.
  """
  folder = parse_path("the workdir", workdir)
  if not (folder / "config.json").exists():
    raise FileNotFoundError(f"{str(folder)!r} has no config.json: give the --workdir of a run")
  first_updates = _first_updates(*read_schedule(folder, trust_run=trust_run))
  config = ml_collections.ConfigDict(read_config(folder / "config.json"))
  tokenizer = None
  with contextlib.suppress(ValueError):  # its files are elsewhere
    tokenizer = make_tokenizer(config.tokenizer, config.prompts, config.model.checkpoint)
  store = RolloutStore(folder / "rollouts", writable=False)
  rollouts: list[Rollout] = []
  for number in store.numbers():
    rollouts += _batch_rollouts(read_batch(store, number), first_updates, tokenizer)
  return rollouts


def _first_updates(schedule: Schedule, num_updates: int) -> dict[int, int]:
  """Number of each batch → the first update on it."""
  return {schedule.batch(t): t for t in reversed(range(num_updates))}


def _batch_rollouts(
  batch: Batch, first_updates: dict[int, int], tokenizer: Tokenizer | None
) -> list[Rollout]:
  train: Any = batch.train
  group_size = train.rewards.shape[1]
  update = first_updates.get(batch.number, max(batch.fingerprints, default=0))
  flat = lambda x: x.reshape(-1, x.shape[-1])
  logprobs, tokens = flat(train.behavior_logprobs), flat(train.tokens)
  numbers = flat(np.zeros_like(train.tokens) if train.turns is None else train.turns)
  return [
    Rollout(
      batch.number, index // group_size, sample["prompt"], sample["completion"], sample["answer"],
      rollout_kind(sample), sample["outcome"], sample["reward"], sample["tokens"],
      update - sample["version"], -logprobs[index, : sample["tokens"]],
      tuple(sample.get("turns", [sample["completion"]])), numbers[index, : sample["tokens"]],
      _token_texts(tokens[index, : sample["tokens"]].tolist(), tokenizer),
    )
    for index, sample in enumerate(batch.samples)
  ]  # fmt: skip


def _token_texts(tokens: Sequence[int], tokenizer: Tokenizer | None) -> tuple[str, ...]:
  if tokenizer is None:
    return tuple(str(place + 1) for place in range(len(tokens)))
  text = lambda token: tokenizer.decode([token]).replace("\n", "⏎") or f"#{token}"
  return tuple("end" if token in tokenizer.stop_ids else text(token) for token in tokens)


def rollout_kind(sample: dict[str, Any]) -> str:
  """Kind of a stored rollout, one of KINDS."""
  if not sample["stopped"]:
    return "cut off"
  kind = _KIND_OF_OUTCOME.get(sample["outcome"], sample["outcome"])
  return kind if kind in KINDS else "not graded"


def select(
  rollouts: Iterable[Rollout],
  *,
  kind: str = ANY,
  shortest: int = 0,
  longest: int | None = None,
  age: int | str = ANY,
) -> list[Rollout]:
  """Selects the rollouts of a kind, of `shortest` to `longest` tokens (None: no limit), and an age.

  Raises:
    ValueError: the kind is unknown.
  """
  check_choice("select", "kind", kind, [ANY, *KINDS])
  return [
    r
    for r in rollouts
    if kind in (ANY, r.kind)
    and shortest <= r.length
    and (longest is None or r.length <= longest)
    and age in (ANY, r.age)
  ]


def ages(rollouts: Iterable[Rollout]) -> list[int]:
  """The ages that occur, in updates, ascending."""
  return sorted({r.age for r in rollouts})


def batches(rollouts: Iterable[Rollout]) -> list[int]:
  """The numbers of the batches, ascending."""
  return sorted({r.batch for r in rollouts})


def lengths(rollouts: Iterable[Rollout]) -> list[int]:
  """The lengths that occur, ascending, in tokens."""
  return sorted({r.length for r in rollouts})


def by_turns(rollouts: Iterable[Rollout]) -> list[Rollout]:
  """The rollouts with the most turns first, and of these the correct ones."""
  return sorted(rollouts, key=lambda r: (-r.policy_turns, r.kind != "correct"))


class Shares(NamedTuple):
  """Share of correct rollouts for each of N values of a property."""

  values: np.ndarray  # i64[N], ascending
  share: np.ndarray  # f64[N]
  low: np.ndarray  # f64[N], Wilson's 95 % interval
  high: np.ndarray  # f64[N]
  counts: np.ndarray  # i64[N], rollouts


def correct_shares(rollouts: Sequence[Rollout], name: str) -> Shares:
  """Share of correct rollouts by "length", "age", "batch" or "policy_turns" of `Rollout`."""
  check_choice("correct_shares", "name", name, ("length", "age", "batch", "policy_turns"))
  outcomes: dict[int, list[bool]] = collections.defaultdict(list)
  for rollout in rollouts:
    outcomes[getattr(rollout, name)].append(rollout.kind == "correct")
  rows = [
    (value, np.mean(correct), *wilson_interval(float(np.mean(correct)), len(correct)), len(correct))
    for value, correct in sorted(outcomes.items())
  ]
  values, share, low, high, counts = np.array(rows, float).reshape(-1, 5).T
  return Shares(values.astype(int), share, low, high, counts.astype(int))


class TurnMeans(NamedTuple):
  """Means over the n-th turns of the policy, n = 1, 2, …, N."""

  surprisal: np.ndarray  # f64[N], −log β of a token, nats
  tokens: np.ndarray  # f64[N]
  counts: np.ndarray  # i64[N], rollouts that have such a turn


def turn_means(rollouts: Sequence[Rollout]) -> TurnMeans:
  """Means by number of the policy's turn."""
  rows = []
  for number in range(max(r.policy_turns for r in rollouts)):
    tokens = [r.surprisals[r.turn_numbers == 2 * number] for r in rollouts]
    tokens = [of_turn for of_turn in tokens if len(of_turn)]
    rows.append((np.concatenate(tokens).mean(), np.mean([*map(len, tokens)]), len(tokens)))
  surprisal, lengths, counts = np.array(rows, float).T
  return TurnMeans(surprisal, lengths, counts.astype(int))


# --- drawing --------------------------------------------------------------------------------------


def plot_kinds(axes: Any, rollouts: Sequence[Rollout]) -> None:
  """Plots the share of each kind in every batch, stacked."""
  numbers = batches(rollouts)
  counts = {
    kind: collections.Counter(r.batch for r in rollouts if r.kind == kind) for kind in KINDS
  }
  present = [kind for kind in KINDS if counts[kind]]
  batch_sizes = collections.Counter(r.batch for r in rollouts)
  shares = [[counts[kind][n] / batch_sizes[n] for n in numbers] for kind in present]
  colors = [KINDS[kind] for kind in present]
  axes.stackplot(numbers, *shares, labels=present, colors=colors, alpha=0.8, linewidth=0)
  axes.set(xlabel="batch", ylabel="share of the rollouts", ylim=(0, 1))
  axes.margins(x=0)
  legend_outside(axes, reverse=True)


def plot_lengths(axes: Any, rollouts: Sequence[Rollout]) -> None:
  """Plots the number of rollouts of each kind and length."""
  present = [kind for kind in KINDS if select(rollouts, kind=kind)]
  data = [[r.length for r in select(rollouts, kind=kind)] for kind in present]
  edges = np.arange(min(map(min, data)), max(map(max, data)) + 2) - 0.5
  colors = [KINDS[kind] for kind in present]
  axes.hist(data, edges, stacked=True, label=present, color=colors, alpha=0.8)
  axes.set(xlabel="response length (tokens)", ylabel="rollouts")
  legend_outside(axes, reverse=True)


def plot_correct(axes: Any, rollouts: Sequence[Rollout], name: str, least: int = 20) -> None:
  """Plots the share of correct rollouts by a field of `correct_shares`, with 95 % intervals.

  Values with fewer than `least` rollouts are omitted.
  """
  all_shares = correct_shares(rollouts, name)
  shares = Shares(*(array[all_shares.counts >= least] for array in all_shares))
  error = [shares.share - shares.low, shares.high - shares.share]
  style = dict(fmt="o", color=COLORS["success"], markersize=4, elinewidth=1)
  axes.errorbar(shares.values, shares.share, error, **style)
  unit = {"length": "response length (tokens)", "age": "age (updates)", "batch": "batch"}
  unit["policy_turns"] = "turns of the policy"
  axes.set(xlabel=unit[name], ylabel="share of the correct", ylim=(-0.03, 1.03))
  axes.xaxis.get_major_locator().set_params(integer=True)


def plot_turns(axes: Any, rollouts: Sequence[Rollout]) -> None:
  """Plots the number of rollouts of each kind and number of the policy's turns."""
  present = [kind for kind in KINDS if select(rollouts, kind=kind)]
  data = [[r.policy_turns for r in select(rollouts, kind=kind)] for kind in present]
  edges = np.arange(max(map(max, data)) + 1) + 0.5
  colors = [KINDS[kind] for kind in present]
  axes.hist(data, edges, stacked=True, label=present, color=colors, alpha=0.8, rwidth=0.8)
  axes.set(xlabel="turns of the policy", ylabel="rollouts")
  axes.xaxis.get_major_locator().set_params(integer=True)
  legend_outside(axes, reverse=True)


def plot_turn_surprisals(axes: Any, rollouts: Sequence[Rollout]) -> None:
  """Plots the mean of −log β over the tokens of each turn, of correct and of other rollouts."""
  groups = {
    "correct": [r for r in rollouts if r.kind == "correct"],
    "others": [r for r in rollouts if r.kind != "correct"],
  }
  for (label, some), color in zip(groups.items(), ("success", "failure"), strict=True):
    if some:
      means = turn_means(some).surprisal
      axes.plot(np.arange(len(means)) + 1, means, "o-", color=COLORS[color], label=label)
  axes.set(xlabel="turn of the policy", ylabel=r"mean $-\log\,\beta$ (nats)")
  axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.legend()


def plot_groups(axes: Any, rollouts: Sequence[Rollout], batch: int) -> None:
  """Plots a batch with a square per rollout and a row per group; most correct first."""
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
  """Draws `plot_groups`."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(5.5, 5))
  plot_groups(axes, rollouts, batch)


def draw_surprisals(rollouts: Sequence[Rollout], number: int) -> None:
  """Draws `plot_surprisals` of rollouts[number]."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(11, 2.8))
  plot_surprisals(axes, rollouts[number])


def draw_dialogue(rollouts: Sequence[Rollout], number: int) -> None:
  """Draws `plot_surprisals` of rollouts[number], and prints its turns with their numbers."""
  rollout = rollouts[number]
  draw_surprisals(rollouts, number)
  print(_heading(rollout))
  for turn, text in enumerate(rollout.turns):
    of_turn = rollout.surprisals[rollout.turn_numbers == turn]
    numbers = f"{len(of_turn):3} tokens"
    if turn % 2 == 0:
      numbers += f", mean {of_turn.mean():.2f} nats"
    print(f"    {_speaker(turn):<11}  {text!r:<12}  {numbers}")
  print(f"    outcome      {rollout.outcome}")


def _rgb(color: str) -> tuple[float, float, float]:
  from matplotlib.colors import to_rgb

  return to_rgb(color)


def plot_surprisals(axes: Any, rollout: Rollout) -> None:
  """Plots −log β of each token of a rollout, labeled with its text.

  An environment's tokens, which are not sampled, have a gray ground.
  """
  count = len(rollout.surprisals)
  for number in range(1, len(rollout.turns), 2):
    (places,) = np.nonzero(rollout.turn_numbers == number)
    if len(places):
      axes.axvspan(places[0] - 0.5, places[-1] + 0.5, color=COLORS["reference"], alpha=0.3, lw=0)
  axes.bar(np.arange(count), rollout.surprisals, color=KINDS[rollout.kind])
  axes.set_xticks(np.arange(count), rollout.token_texts)
  answer = f" (answer {rollout.answer})" if rollout.answer else ""
  axes.set(title=f"{rollout.prompt!r}, {rollout.kind}{answer}")
  axes.set(ylabel=r"$-\log\,\beta$ (nats)", ylim=(0, max(0.1, 1.05 * rollout.surprisals.max())))
  axes.grid(axis="x", visible=False)


def explore(
  rollouts: Sequence[Rollout], *, kind: str = ANY, longest: int | None = None, age: int | str = ANY,
  count: int = 6,
) -> None:  # fmt: skip
  """Plots the selected rollouts among all, and prints `count` of them, spread over the run."""
  from matplotlib import pyplot

  selected = select(rollouts, kind=kind, longest=longest, age=age)
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3))
  all_counts = np.bincount([r.length for r in rollouts])
  selected_counts = np.bincount([r.length for r in selected], minlength=all_counts.size)
  color = KINDS.get(kind, COLORS["effective"])
  left.bar(np.arange(all_counts.size), all_counts, color=COLORS["reference"], label="all")
  left.bar(np.arange(all_counts.size), selected_counts, color=color, label="chosen")
  left.set(xlabel="response length (tokens)", ylabel="rollouts")
  numbers = batches(rollouts)
  per_batch = collections.Counter(r.batch for r in selected)
  right.plot(numbers, [per_batch[n] for n in numbers], color=color)
  right.set(xlabel="batch", ylabel="chosen rollouts", ylim=(0, None))
  left.set_xlim(left=min(lengths(rollouts)) - 1)
  handles = left.get_legend_handles_labels()
  figure.legend(*handles, loc="outside upper left", ncols=2)
  print(f"{len(selected)} of {len(rollouts)} rollouts")
  show(selected, count)


def show(rollouts: Sequence[Rollout], count: int = 6) -> None:
  """Prints `count` of the rollouts, evenly spaced in the sequence."""
  for index in np.unique(np.linspace(0, len(rollouts) - 1, count).astype(int)) if rollouts else ():
    r = rollouts[index]
    print(_heading(r))
    if len(r.turns) == 1:
      print(f"    {r.prompt!r} → {r.completion!r}   (answer {r.answer})")
      continue
    print(f"    {r.prompt!r}   (answer {r.answer or 'unknown'}, outcome {r.outcome})")
    for turn, text in enumerate(r.turns):
      print(f"    {_speaker(turn):<11}  {text!r}")


def _heading(r: Rollout) -> str:
  reward = "none" if r.reward is None else f"{r.reward:g}"
  turns = f"{r.policy_turns} turns  " if len(r.turns) > 1 else ""
  return f"batch {r.batch:3}  age {r.age}  {r.length:3} tokens  {turns}reward {reward}  {r.kind}"


def _speaker(turn: int) -> str:
  return "environment" if turn % 2 else "policy"
