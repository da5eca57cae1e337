"""A run's rollouts, read from its store with outcome, age and turns; and the page of a run."""

from __future__ import annotations

import collections
import html
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from rlvr_jax import specs
from rlvr_jax.configs import base
from rlvr_jax.evaluate.figures import COLORS
from rlvr_jax.evaluate.pass_at_k import wilson_interval
from rlvr_jax.rollouts.batches import Batch, read_batch, token_versions
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.setup.build import make_schedule
from rlvr_jax.view.read import (
  DEFAULT_BATCHES,
  choose_batches,
  measured_updates,
  open_run,
  stored_numbers,
)
from rlvr_jax.view.write import PAGE_FILE, write_page

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


class Rollout(NamedTuple):
  """One rollout of a run's store."""

  batch: int  # number of the batch
  group: int  # index of the prompt within the batch
  prompt: str
  completion: str
  answer: str  # reference answer
  kind: str  # one of KINDS
  outcome: str  # the outcome of grading, as in rollouts.jsonl
  reward: float | None  # the reward before the overlong penalty; None without a grade
  length: int  # tokens, stop token included
  # Updates between the sampling policy and the first update on this rollout; −1: another run's.
  age: int
  sampler: str  # name of the fleet's program that sampled the rollout
  versions: np.ndarray  # i32[length], version of the policy that sampled a token; -1 in a reply
  surprisals: np.ndarray  # f32[length], −log β of each token, nats; 0 in an environment's reply
  turns: tuple[str, ...]  # texts of the policy and of the environment alternately
  turn_numbers: np.ndarray  # i32[length], index of the turn of each token

  @property
  def policy_turns(self) -> int:
    """Number of turns of the policy."""
    return (len(self.turns) + 1) // 2


def load(workdir: str | os.PathLike[str]) -> list[Rollout]:
  """All rollouts of a run's store, in the order of sampling.

  Raises:
    FileNotFoundError: the folder has no run.
    ValueError: config.json is not a configuration, or its schedule is code outside of the package,
      which is not imported.
    StoreError: the store cannot be read.
  """
  folder = parse_path("the workdir", workdir)
  if not (folder / "config.json").exists():
    raise FileNotFoundError(f"{str(folder)!r} has no config.json: give the --workdir of a run")
  try:
    config = ml_collections.ConfigDict(read_config(folder / "config.json"))
    name, num_updates, seed = config.schedule, config.num_updates, config.seed
  except (WorkdirError, AttributeError) as error:
    raise ValueError(f"{folder}/config.json is not the configuration of a run: {error}") from error
  if any(specs.outside_package(name)):
    raise ValueError(
      f"{folder}/config.json names the schedule {name!r}, whose code is outside of rlvr_jax and is"
      " not imported here: read the batches with rollouts.batches.read_batch instead"
    )
  schedule = make_schedule(name, num_updates=num_updates, seed=seed)
  first_updates = {schedule.batch(t): t for t in reversed(range(num_updates))}
  store = RolloutStore(folder / "rollouts", writable=False)
  rollouts: list[Rollout] = []
  for number in store.numbers():
    batch = read_batch(store, number)
    update = first_updates.get(number, max(batch.fingerprints, default=0))
    rollouts += _batch_rollouts(batch, update)
  return rollouts


def _batch_rollouts(batch: Batch, update: int) -> list[Rollout]:
  """The rollouts of a batch; `update` is the first update that trains on the batch."""
  train: Any = batch.train
  P, G, T = train.tokens.shape
  versions = token_versions(batch.groups)
  versions = versions if versions.ndim == 3 else versions[:, None, None]
  turns = np.zeros((P, G, T), np.int32) if train.turns is None else train.turns
  flat = lambda x: np.broadcast_to(x, (P, G, T)).reshape(-1, T)
  columns = flat(train.behavior_logprobs), flat(turns), flat(versions)
  rollouts = []
  for index, (sample, logprobs, numbers, of_tokens) in enumerate(
    zip(batch.samples, *columns, strict=True)
  ):
    length = sample["tokens"]
    rollouts.append(
      Rollout(
        batch=batch.number,
        group=index // G,
        prompt=sample["prompt"],
        completion=sample["completion"],
        answer=sample["answer"],
        kind=rollout_kind(sample),
        outcome=sample["outcome"],
        reward=sample["reward"],
        length=length,
        age=update - sample["version"] if batch.groups[index // G].versions else -1,
        sampler=sample.get("sampler", "this program"),
        versions=of_tokens[:length],
        surprisals=-logprobs[:length],
        turns=tuple(sample.get("turns", [sample["completion"]])),
        turn_numbers=numbers[:length],
      )
    )
  return rollouts


def rollout_kind(sample: dict[str, Any]) -> str:
  """The kind of a stored rollout: one of KINDS."""
  if not sample["stopped"]:
    return "cut off"
  kind = _KIND_OF_OUTCOME.get(sample["outcome"], sample["outcome"])
  return kind if kind in KINDS else "not graded"


# --- drawing --------------------------------------------------------------------------------------


def plot_correct(axes: Any, rollouts: Iterable[Rollout], name: str, least: int = 20) -> None:
  """Plots the share of correct rollouts per value of a field, with Wilson's 95 % intervals.

  Args:
    axes: axes of matplotlib.
    rollouts: the result of `load`.
    name: field of `Rollout` with integers, such as "length" or "age".
    least: values with fewer rollouts are omitted.
  """
  outcomes: dict[int, list[bool]] = collections.defaultdict(list)
  for rollout in rollouts:
    outcomes[getattr(rollout, name)].append(rollout.kind == "correct")
  shares = {
    value: float(np.mean(correct))
    for value, correct in sorted(outcomes.items())
    if len(correct) >= least
  }
  ends = [wilson_interval(share, len(outcomes[value])) for value, share in shares.items()]
  errors = [
    [abs(end - share) for end in pair] for share, pair in zip(shares.values(), ends, strict=True)
  ]
  style = dict(fmt="o", color=COLORS["success"], markersize=4, elinewidth=1)
  axes.errorbar([*shares], [*shares.values()], np.reshape(errors, (-1, 2)).T, **style)
  axes.set(xlabel=name, ylabel="share of the correct", ylim=(-0.03, 1.03))
  axes.xaxis.get_major_locator().set_params(integer=True)


class Page(NamedTuple):
  """The page of a run for a notebook, which shows it in a frame."""

  text: str  # HTML

  def __repr__(self) -> str:
    return f"the page of a run, {len(self.text) / 2**20:.1f} MiB"

  def _repr_html_(self) -> str:
    return (
      f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="720"'
      ' style="border: 1px solid gray"></iframe>'
    )


def page(workdir: str | os.PathLike[str], *, batches: str = DEFAULT_BATCHES) -> Page:
  """The page that --mode=view writes; see `commands.view`, and `view.read` for the errors."""
  run = open_run(os.fspath(workdir))
  chosen = choose_batches(batches, stored_numbers(run.folder), measured_updates(run))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / PAGE_FILE
    write_page(path, [run], json.loads(base.get_config().to_json_best_effort()), [chosen])
    return Page(path.read_text(encoding="utf-8"))


def show(rollouts: Sequence[Rollout], count: int = 6) -> None:
  """Prints `count` of the rollouts, evenly spaced in the sequence, with all turns of dialogues."""
  for index in np.unique(np.linspace(0, len(rollouts) - 1, count).astype(int)) if rollouts else ():
    r = rollouts[index]
    reward = "none" if r.reward is None else f"{r.reward:g}"
    print(f"batch {r.batch:3}  age {r.age}  {r.length:3} tokens  reward {reward}  {r.kind}")
    if len(r.turns) == 1:
      print(f"    {r.prompt!r} → {r.completion!r}   (answer {r.answer})")
      continue
    print(f"    {r.prompt!r}   (answer {r.answer or 'unknown'}, outcome {r.outcome})")
    for turn, text in enumerate(r.turns):
      print(f"    {'environment' if turn % 2 else 'policy':<11}  {text!r}")
