"""Reads the contents of a run's page from the files in its folder, one batch at a time.

Every reader returns a `Part`: JSON and NumPy arrays. An array that the run did not store is absent.
"""

from __future__ import annotations

import collections
import contextlib
import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_collections
import numpy as np

from rlvr_jax import advantages, specs
from rlvr_jax.advantages import Advantage
from rlvr_jax.data import Tokenizer
from rlvr_jax.data.by_name import make_tokenizer
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER, METRICS_FILE, read_metrics
from rlvr_jax.rollouts.batch import train_batch, with_equal_names
from rlvr_jax.rollouts.group import Group, join
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.storage.files import JSON, DamagedFileError, JsonObject
from rlvr_jax.storage.places import make_absolute, open_lines, parse_path
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.checkpointing.workdir import differing_fields, read_config
from rlvr_jax.train.reporting import advice
from rlvr_jax.train.setup.build import make_schedule
from rlvr_jax.types import RECORDED, TrainBatch

DEFAULT_BATCHES = "default"  # the first batch, the last, and eight between
BETWEEN = 8
MAX_ROUTE_BYTES = 2**24  # the most bytes of a batch's routes; of more, only some layers are shown
_OUTPUT_FILE = "output.log"  # the printed output of a run of a sweep
# Names of a measurement's arrays of loss tokens, by their names on the page.
_MEASURED = {
  "ratio": "token_log_ratio",
  "proximal": "token_log_ratio_proximal",
  "entropy": "token_entropy",
  "clipped": "token_clipped",
  "dropped": "token_dropped",
  "vetoed": "token_vetoed",
}
_BOUNDED = ("clipped", "dropped", "vetoed")
_WARNING = "warning: "
_REPEATS = 0.12  # a text that compresses to less than this share of its bytes repeats itself
_LONG = 200  # shorter texts, in characters, are never called repetitive
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_SHARED = ("prompt", "messages", "answer", "tokens")  # sample fields that groups or arrays have
_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd]")
_MOST_BYTES = 4  # the most bytes of a character in UTF-8
_FIELD = re.compile(r"(-?\d+)(?::(-?\d+))?")


class Part(NamedTuple):
  """A part of the data that the page loads at once."""

  header: JsonObject
  arrays: dict[str, np.ndarray]


class Run(NamedTuple):
  """The contents of a run's folder that do not change while the run continues."""

  folder: pathlib.Path
  config: JsonObject
  # batch → the updates that train on it, ascending, counted from 1; {} if the schedule is a user's
  # own code, or needs files that are gone
  updates: dict[int, list[int]]
  tokenizer: Tokenizer | None  # None: it cannot be made here, for example without its files
  advantage: Advantage | None  # None: it needs more than the rollouts, or is a user's own code


def open_run(workdir: str | pathlib.Path, flag: str = "--workdir") -> Run:
  """Opens the folder of a run that has stored at least one batch.

  Args:
    workdir: the workdir of the run.
    flag: the flag that names the workdir, for messages.
  Raises:
    ValueError: the folder has no run or no batch yet, or its store has another format.
  """
  folder = parse_path(flag, workdir)
  if not (folder / "config.json").is_file():
    raise ValueError(f"{flag}={folder} has no config.json: give the --workdir of a run")
  try:
    config = read_config(folder / "config.json")
  except WorkdirError as error:
    raise ValueError(str(error)) from error
  if not (folder / "rollouts").is_dir():
    raise ValueError(f"{flag}={folder} has no rollouts: its run has not sampled a batch yet")
  try:
    numbers = stored_numbers(folder)
  except StoreError as error:
    raise ValueError(str(error)) from error
  if not numbers:
    raise ValueError(
      f"{flag}={folder}: its store has no batches: none was stored yet, or all were removed"
      " (config.store.keep_used)"
    )
  return Run(folder, config, _updates(config), _tokenizer(config), _advantage(config))


def stored_numbers(folder: pathlib.Path) -> list[int]:
  """Numbers of the batches in a run's store, ascending."""
  return RolloutStore(folder / "rollouts", writable=False).numbers()


def _updates(config: JsonObject) -> dict[int, list[int]]:
  """The updates on each batch, see `Run`; a user's own code is not imported."""
  with contextlib.suppress(KeyError, ValueError, OSError, TypeError):
    name, updates, seed = config["schedule"], config["num_updates"], config["seed"]
    if not any(specs.outside_package(name)):
      schedule = make_schedule(name, num_updates=updates, seed=seed)
      found: dict[int, list[int]] = collections.defaultdict(list)
      for t in range(updates):
        found[schedule.batch(t)].append(t + 1)
      return dict(found)
  return {}


def _tokenizer(config: JsonObject) -> Tokenizer | None:
  with contextlib.suppress(KeyError, ValueError, OSError, TypeError):
    prompts, checkpoint = config["prompts"], config["model"]["checkpoint"]
    return make_tokenizer(config["tokenizer"], prompts, checkpoint)
  return None


def _advantage(config: JsonObject) -> Advantage | None:
  """The run's estimator; None if its result needs more than rollouts, or if it is a user's own."""
  with contextlib.suppress(KeyError, ValueError, OSError, TypeError):
    if any(specs.outside_package(config["advantage"])):
      return None
    made: Advantage = specs.make("config.advantage", advantages, config["advantage"], Advantage)
    has_state = made.init(np.zeros((), np.float32)) != ()  # type: ignore[arg-type]
    return None if has_state or not set(made.needs) <= set(RECORDED) else made
  return None


# --- the run --------------------------------------------------------------------------------------


def read_summary(run: Run, base: Mapping[str, JSON]) -> Part:
  """A run's metrics, the difference of its recipe to `base`, its warnings, and a list of batches.

  Args:
    run: the result of `open_run`.
    base: the configuration with which the run's configuration is compared; JSON.
  Returns:
    Arrays "PHASE|step" f64[n] and "PHASE|METRIC" f32[n], NaN where a record lacks the metric.
  """
  records = list(read_metrics(run.folder)) if (run.folder / METRICS_FILE).exists() else []
  arrays: dict[str, np.ndarray] = {}
  by_phase: dict[str, list[JsonObject]] = collections.defaultdict(list)
  for record in records:
    by_phase[record["phase"]].append(record)
  for phase, of_phase in by_phase.items():
    arrays[f"{phase}|step"] = np.array([record["step"] for record in of_phase], np.float64)
    for name in sorted({name for record in of_phase for name in record} - {"step", "phase"}):
      column = [_number(record.get(name)) for record in of_phase]
      with np.errstate(over="ignore"):
        arrays[f"{phase}|{name}"] = np.array(column, np.float32)
  numbers, measured = stored_numbers(run.folder), measured_updates(run)
  header = {
    "name": make_absolute(run.folder).name,
    "folder": str(run.folder),
    "recipe": [[*row] for row in differing_fields(base, run.config, ())],
    "messages": [[step, text] for step, text in messages(run, by_phase["train"])],
    "batches": numbers,
    "updates": [run.updates.get(number, []) for number in numbers],
    "measured": [measured.get(number) for number in numbers],
    "geometry": geometry_steps(run.folder),
  }
  return Part(header, arrays)


def _number(value: object) -> float:
  return float(value) if isinstance(value, int | float) else math.nan


def messages(run: Run, records: Sequence[JsonObject]) -> Iterator[tuple[int | None, str]]:
  """Yields (update, text) of each warning of a run; update is None if it is not known.

  A run of a sweep stores its printed output, from which all of its warnings are read. For other
  runs, warnings about responses, padding and skipped updates are recomputed from the metrics.
  """
  path = run.folder / _OUTPUT_FILE
  if path.exists():
    with open_lines(path) as lines:
      yield from ((None, x.strip()[len(_WARNING) :]) for x in lines if x.startswith(_WARNING))
    return
  said: set[str] = set()
  limit, batch = run.config.get("max_response_length", 0), run.config.get("batch", {})
  for record in records:
    texts = advice.on_responses(record, record["step"], limit)
    settings = ml_collections.ConfigDict(batch)
    with contextlib.suppress(AttributeError):  # another version has other fields
      texts |= advice.on_padding(record.get("rows/filled", 1.0), record["step"], settings)
    if skipped := record.get("update/skipped_in_a_row"):
      texts["skipped"] = f"the last {skipped:.0f} updates were not finite, and were skipped"
    for name, text in texts.items():
      if text and name not in said:
        yield record["step"], text
      said = said | {name} if text else said - {name}


# --- which batches --------------------------------------------------------------------------------


def choose_batches(spec: str, numbers: Sequence[int], preferred: Collection[int] = ()) -> list[int]:
  """The batches that --batches names, in order of priority for a page of limited size.

  Args:
    spec: `DEFAULT_BATCHES`; "all"; or numbers and ranges such as "0,10:20,-1", where -1 is the last
      batch. A range includes both ends.
    numbers: the numbers of the batches in the store, ascending.
    preferred: batches that `DEFAULT_BATCHES` prefers between the first and the last.
  Raises:
    ValueError: the text has another form, or names a batch that is not in the store.
  """
  if spec == DEFAULT_BATCHES:
    inside = _evenly([number for number in numbers if number in preferred], BETWEEN)
    first = [*dict.fromkeys([numbers[0], numbers[-1], *inside])]
    others = [number for number in _evenly(numbers, BETWEEN + 2) if number not in first]
    return first + _evenly(others, BETWEEN + 2 - len(first))
  if spec == "all":
    return [*numbers]
  found: list[int] = []
  for field in spec.split(","):
    match = _FIELD.fullmatch(field.strip())
    if match is None:
      raise ValueError(
        f"--batches={spec}: {field!r} is neither a number nor a range; give batches such as"
        " 0,10:20,-1, or all"
      )
    ends = [int(end) for end in match.groups() if end is not None]
    low, high = _ends(ends, numbers)
    inside = [number for number in numbers if low <= number <= high]
    if not inside or (len(ends) == 1 and low not in inside):
      raise ValueError(
        f"--batches={spec}: batch {field.strip()} is not in the store, which has"
        f" {len(numbers)} batches from {numbers[0]} to {numbers[-1]}"
      )
    found += inside
  return [*dict.fromkeys(found)]


def _evenly(numbers: Sequence[int], count: int) -> list[int]:
  """At most `count` of the numbers, evenly spaced, with both ends."""
  places = np.linspace(0, len(numbers) - 1, count if numbers else 0).round().astype(int)
  return [numbers[place] for place in np.unique(places).tolist()]


def _ends(ends: Sequence[int], numbers: Sequence[int]) -> tuple[int, int]:
  """The ends of a range; a negative number counts from the last batch."""
  low, high = (numbers[end] if -len(numbers) <= end < 0 else end for end in (ends[0], ends[-1]))
  return low, high


# --- a batch --------------------------------------------------------------------------------------


def read_batch(run: Run, number: int) -> Part:
  """Reads one batch: its groups and samples, and an entry for each token of its rollouts.

  Arrays of N tokens have the rollouts one after another, group by group, each cut to its length;
  arrays of B = P·G rollouts have one entry for each, in the same order. An array is absent if the
  run did not store its data:

    token u16|u32[N]: index into the header's "vocabulary"; "characters" lists the characters that
      several tokens form together, as [first token, text, number of tokens]
    logprob f16[N]: log-probability under the distribution that the token was sampled from, nats
    mask u8[N]: 1 if the token is in the loss
    version, lag i32[N];  turn u16[N];  score f16[N], NaN: none
    expert u8|u16[layers, N]: the router's first choice, in the layers of the header's "layers"
    advantage f32[B] or f16[N]: by the run's estimator, computed again from the stored rewards

  If diagnostics measured an update on the batch, there are more arrays. Their entries for tokens
  outside of the loss are NaN:

    coefficient f32[B]: the coefficient that the loss got
    ratio, proximal f16[N]: log π/β and log π/π_prox, with policy π, behavior policy β and proximal
      policy π_prox;  entropy f16[N]
    clipped, dropped, vetoed f16[N], in [0, 1]: by the loss, the correction, the veto

  The header's "measured" is the number of the update that these arrays describe: the last of
  "updates" with a measurement. If that measurement cannot be read, "unread" says why.

  Raises:
    TornShardError, StoreError: the batch is missing or cannot be read.
  """
  groups, info = RolloutStore(run.folder / "rollouts", writable=False).read(number)
  arrays = join(with_equal_names(groups))
  if "tokens" not in arrays or not all(group.samples for group in groups):
    raise StoreError(f"batch {number} of {run.folder} has no graded rollouts")
  P, G, T = arrays["tokens"].shape
  lengths = np.array([sample["tokens"] for group in groups for sample in group.samples])
  within = (np.arange(T) < lengths[:, None]).reshape(P, G, T)
  updates = run.updates.get(number, [])
  of_tokens = _token_arrays(groups, arrays, within, updates)
  vocabulary, of_tokens["token"] = _vocabulary(arrays["tokens"][within], run.tokenizer)
  header: JsonObject = {
    "number": number,
    "updates": updates,
    "measured": None,
    "size": [P, G],
    "lengths": lengths.tolist(),
    "vocabulary": vocabulary,
    "characters": _characters(
      arrays["tokens"][within], of_tokens["token"], lengths, vocabulary, run.tokenizer
    ),
    "has_texts": run.tokenizer is not None,
    "layers": [],
  }
  if "routes" in arrays:
    layers = _shown_layers(arrays["routes"].shape[3], int(lengths.sum()))
    header["layers"] = layers
    of_tokens["expert"] = np.stack([arrays["routes"][..., n, 0][within] for n in layers])
  of_tokens |= _advantages(run, groups, within)
  if measured := measured_updates(run).get(number):
    try:
      of_tokens |= _measured(run.folder, measured - 1, arrays["mask"], within)
      header["measured"] = measured
    except DamagedFileError as error:
      header["unread"] = str(error)
  header |= _records(groups, of_tokens, lengths, info.get("sources", []))
  for group, record in zip(groups, header["groups"], strict=True):
    record |= _as_chat(run, group)
  if "rewards_by_name" in arrays:
    names = ["main grader", *(grader for grader, _ in run.config["grading"]["extra"])]
    rows = arrays["rewards_by_name"].reshape(P * G, -1).tolist()
    for sample, row in zip(header["samples"], rows, strict=True):
      sample["scores"] = dict(zip(names, row, strict=True))
  return Part(header, of_tokens)


def _records(
  groups: Sequence[Group],
  of_tokens: Mapping[str, np.ndarray],
  lengths: np.ndarray,
  sources: Sequence[str],
) -> JsonObject:
  """The header's "groups", and its "samples" without the fields that their group has."""
  samples = [
    {name: value for name, value in sample.items() if name not in _SHARED}
    | {"garbled": is_garbled(sample["completion"])}
    for group in groups
    for sample in group.samples
  ]
  records, first = [], 0
  for group in groups:
    last = first + len(group.samples)
    tokens = slice(int(lengths[:first].sum()), int(lengths[:last].sum()))
    measured = {name: of_tokens[name][tokens] for name in _MEASURED if name in of_tokens}
    records.append(
      {
        "prompt": group.samples[0]["prompt"],
        "answer": group.samples[0]["answer"],
        "source": sources[group.source] if group.source < len(sources) else str(group.source),
        "versions": sorted(group.versions),
        **_interest(samples[first:last], measured),
      }
    )
    first = last
  return {"groups": records, "samples": samples}


def _as_chat(run: Run, group: Group) -> JsonObject:
  """The "messages" of a prompt with their roles, and the prompt "as_read" by the policy.

  {} if the prompt was no chat. Without a tokenizer or stored tokens, "as_read" is absent.
  """
  prompts = run.config.get("prompts", {})
  first = group.samples[0]
  messages = first.get("messages", [{"role": "user", "content": first["prompt"]}])
  if prompts.get("format") != "chat":
    return {"messages": messages} if "messages" in first else {}
  if prompts.get("system"):
    messages = [{"role": "system", "content": prompts["system"]}, *messages]
  found: JsonObject = {"messages": messages}
  if run.tokenizer is not None and "prompts.tokens" in group.arrays:
    length = int(group.arrays["prompts.lengths"])
    ids = group.arrays["prompts.tokens"][-length:].tolist()
    found["as_read"] = run.tokenizer.decode(ids, with_special=True)
  return found


def _token_arrays(
  groups: Sequence[Group],
  arrays: Mapping[str, np.ndarray],
  within: np.ndarray,
  updates: Sequence[int],
) -> dict[str, np.ndarray]:
  """The stored values of each token, by the names of `read_batch`."""
  found: dict[str, np.ndarray] = {}
  # The log-probabilities of sampling, also if the recorded ones deliberately differ.
  behavior = arrays.get("sampled_logprobs", arrays.get("behavior_logprobs"))
  if behavior is not None:
    found["logprob"] = behavior[within].astype(np.float16)
  for name, of, dtype in (
    ("mask", "mask", np.uint8),
    ("turn", "turns", np.uint16),
    ("score", "turn_scores", np.float16),
    ("version", "token_versions", np.int32),
  ):
    if of in arrays:
      found[name] = arrays[of][within].astype(dtype)
  if "version" not in found:
    versions = np.array([min(group.versions, default=-1) for group in groups], np.int32)
    found["version"] = np.broadcast_to(versions[:, None, None], within.shape)[within]
  if "lags" in arrays:
    found["lag"] = arrays["lags"][within]
  elif updates:
    lag = np.maximum(updates[0] - 1 - found["version"], 0)
    found["lag"] = np.where(found["version"] < 0, -1, lag).astype(np.int32)
  return found


def _vocabulary(tokens: np.ndarray, tokenizer: Tokenizer | None) -> tuple[list[JSON], np.ndarray]:
  """(texts of the different tokens, or ids without a tokenizer; index of each token's text)."""
  ids, index = np.unique(tokens, return_inverse=True)
  dtype = np.uint16 if len(ids) <= 2**16 else np.uint32
  if tokenizer is None:
    return ids.tolist(), index.astype(dtype)
  unseen = lambda token: "⟨end⟩" if token in tokenizer.stop_ids else f"#{token}"
  text = lambda token: tokenizer.decode([token], with_special=True) or unseen(token)
  return [text(token) for token in ids.tolist()], index.astype(dtype)


def _characters(
  tokens: np.ndarray,
  index: np.ndarray,
  lengths: np.ndarray,
  vocabulary: Sequence[JSON],
  tokenizer: Tokenizer | None,
) -> list[JSON]:
  """[first token, text, number of tokens] of each character that several tokens form."""
  if tokenizer is None:
    return []
  broken = np.array([_BROKEN in str(text) for text in vocabulary], bool)[index]
  places, ends = np.flatnonzero(broken), np.cumsum(lengths)
  found: list[JSON] = []
  done = 0
  for place, end in zip(
    places.tolist(), ends[np.searchsorted(ends, places, "right")].tolist(), strict=True
  ):
    ids = tokens[place : min(place + _MOST_BYTES, end)].tolist()
    if place >= done and (width := _width(ids, tokenizer)) > 1:
      found.append([place, tokenizer.decode(ids[:width], with_special=True), width])
      done = place + width
  return found


def _width(ids: Sequence[int], tokenizer: Tokenizer) -> int:
  """The least k such that the first k ids decode to whole characters; 1 if there is none."""
  for width in range(1, len(ids) + 1):
    if _BROKEN not in tokenizer.decode(ids[:width], with_special=True):
      return width
  return 1


def _shown_layers(layers: int, tokens: int) -> list[int]:
  """The layers whose routes are shown: all layers, or as many as fit, evenly spaced."""
  count = max(1, min(layers, MAX_ROUTE_BYTES // max(tokens, 1)))
  return np.unique(np.linspace(0, layers - 1, count).round().astype(int)).tolist()


def _measured(
  folder: pathlib.Path, step: int, mask: np.ndarray, within: np.ndarray
) -> dict[str, np.ndarray]:
  """A measurement's values for a batch's rollouts and tokens, by the names of `read_batch`.

  Raises:
    DamagedFileError: the file is damaged, or belongs to other rollouts.
  """
  file, counts = _load_geometry(folder, step), mask > 0
  if not np.array_equal(file["lengths"], counts.sum(axis=-1)):
    raise DamagedFileError(
      f"the measurement before update {step + 1} has other rollouts than the batch"
    )
  found = {"coefficient": file["reweighted"].reshape(-1).astype(np.float32)}
  for name, of in _MEASURED.items():
    if of in file:
      found[name] = np.full(int(within.sum()), np.nan, np.float16)
      found[name][counts[within]] = file[of]
  return found


def _advantages(run: Run, groups: Sequence[Group], within: np.ndarray) -> dict[str, np.ndarray]:
  """The advantages of a batch; {} if they are not known."""
  if run.advantage is not None and not run.config.get("permute_rewards"):
    with contextlib.suppress(ValueError, AssertionError):  # an array that it needs is not stored
      return {"advantage": _apply(run.advantage, train_batch(groups), within)}
  return {}


def _apply(advantage: Advantage, batch: TrainBatch, within: np.ndarray) -> np.ndarray:
  """The advantage of each rollout f32[B], or of each token f16[N] if the estimator gives these."""
  coefficients = advantage.apply((), batch)
  in_loss = np.asarray(advantage.in_loss((), batch, coefficients))
  if in_loss.ndim == 3:
    return in_loss[within].astype(np.float16)
  return in_loss.reshape(-1).astype(np.float32)


def _interest(samples: Sequence[JsonObject], measured: Mapping[str, np.ndarray]) -> JsonObject:
  """Numbers by which the page finds groups worth reading, and their sum, the "interest".

  "interest" adds the spread of rewards, the shares of "truncated" and "garbled" rollouts, the
  largest |log ratio|, and "bounded", the share of tokens that are clipped, dropped or vetoed. Each
  term is capped at 1. The last two are absent if they were not measured.
  """
  rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
  found: JsonObject = {
    "spread": float(np.ptp(rewards)) if rewards else 0.0,
    "truncated": sum(not sample["stopped"] for sample in samples) / len(samples),
    "garbled": sum(sample["garbled"] for sample in samples) / len(samples),
  }
  if "ratio" in measured:
    found["ratio"] = float(np.nanmax(np.abs(measured["ratio"]), initial=0.0))
  if marks := [measured[name] for name in _BOUNDED if name in measured]:
    counted = marks[0] == marks[0]  # NaN marks tokens that are not in the loss
    found["bounded"] = float(np.max(marks, axis=0)[counted].mean()) if counted.any() else 0.0
  return found | {"interest": sum(min(value, 1.0) for value in found.values())}


def is_garbled(text: str) -> bool:
  """Whether a text has broken or control characters, or repeats itself over and over."""
  if _ODD.search(text):
    return True
  data = text.encode(errors="replace")
  return len(text) >= _LONG and len(zlib.compress(data, 1)) < _REPEATS * len(data)


# --- geometry -------------------------------------------------------------------------------------


def geometry_steps(folder: pathlib.Path) -> list[int]:
  """The updates before which a run has measured its geometry, ascending."""
  paths = (folder / GEOMETRY_FOLDER).glob("*.npz")
  return sorted(int(path.stem) for path in paths if path.stem.isdigit())


def measured_updates(run: Run) -> dict[int, int]:
  """Batch → the last measured update on it, counted from 1; batches without one are absent."""
  steps = set(geometry_steps(run.folder))
  measured = {n: [t for t in updates if t - 1 in steps] for n, updates in run.updates.items()}
  return {number: updates[-1] for number, updates in measured.items() if updates}


def _load_geometry(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  """The arrays of a measurement that the page shows."""
  path = folder / GEOMETRY_FOLDER / f"{step:06d}.npz"
  try:
    with path.open("rb") as stream, np.load(stream) as file:
      found = {name: file[name] for name in ("gram", "reweighted", "rewards", "lengths")}
      found |= {name: file[name] for name in _MEASURED.values() if name in file}
      found["valid"] = file["valid"] if "valid" in file else np.ones(found["rewards"].shape, bool)
  except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
    raise DamagedFileError(f"{path} is damaged ({error}); remove it") from error
  return found


def read_geometry(run: Run, step: int) -> Part:
  """The geometry of a batch's gradients, measured before an update.

  Returns:
    Arrays of B = P·G rollouts, group by group:

      norm f32[B];  cosine f16[B, B];  reward f32[B];  valid u8[B]
      share f32[B]: each eigenvalue of the Gram matrix K divided by their sum, descending
      coefficient f32[B]: the coefficient A_i that the loss got
      part f32[B]: A_i (K A)_i / AᵀKA, the rollout's part of the update's squared norm; below 0 if
        the rollout cancels others; absent if AᵀKA is zero up to rounding
      by_reward u32[B]: order of the rollouts by decreasing reward within groups
      by_vector u32[B]: order of the rollouts by entries of the leading eigenvector
  Raises:
    FileNotFoundError: nothing was measured before this update.
    DamagedFileError: the file is not a measurement.
  """
  file = _load_geometry(run.folder, step)
  K, A = file["gram"].astype(np.float64), file["reweighted"].reshape(-1).astype(np.float64)
  rewards, valid = file["rewards"], file["valid"]
  P, G = rewards.shape
  within = np.argsort(-rewards, axis=1, kind="stable")
  by_reward = (within + G * np.arange(P)[:, None]).reshape(-1)
  usable = bool(np.isfinite(K).all() and np.trace(K) > 0)
  header: JsonObject = {"step": step, "size": [P, G], "usable": usable}
  arrays = {
    "coefficient": A.astype(np.float32),
    "reward": rewards.reshape(-1).astype(np.float32),
    "valid": valid.reshape(-1).astype(np.uint8),
    "by_reward": by_reward.astype(np.uint32),
  }
  if not usable:
    return Part(header, arrays)
  K = (K + K.T) / 2
  norms = np.sqrt(np.maximum(np.diagonal(K), 0.0))
  outer = norms[:, None] * norms
  cosines = np.divide(K, outer, out=np.zeros_like(K), where=outer > 0)
  eigenvalues, vectors = np.linalg.eigh(K)
  eigenvalues = np.maximum(eigenvalues[::-1], 0.0)
  pulls = A * (K @ A)
  if pulls.sum() > 1e-6 * eigenvalues[0] * (A @ A):
    arrays["part"] = (pulls / pulls.sum()).astype(np.float32)
  arrays |= {
    "norm": norms.astype(np.float32),
    "cosine": np.clip(cosines, -1, 1).astype(np.float16),
    "share": (eigenvalues / eigenvalues.sum()).astype(np.float32),
    "by_vector": np.argsort(vectors[:, -1], kind="stable").astype(np.uint32),
  }
  return Part(header, arrays)
