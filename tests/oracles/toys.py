"""A toy run: real samplers, batches and stores over programs, graders and environments of NumPy.

A token depends on the weights, the rollout's key and all tokens before it; weights are whole
numbers, and an update makes new ones of everything in its batch. So a fault of the host's logic
changes all that follows.
"""

import concurrent.futures
import dataclasses
import random
import threading
import time
import types
import zlib
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.data import ByteTokenizer, Problem
from rlvr_jax.data.draws import problem_draws
from rlvr_jax.environments.base import Turn
from rlvr_jax.environments.dialogues import Started
from rlvr_jax.rewards import Grade, Outcome, outcome_policy
from rlvr_jax.rollouts.answers import ALONE, Answers
from rlvr_jax.rollouts.batches import (
  Batches,
  BatchSettings,
  Hooks,
  Inputs,
  Measured,
  Position,
)
from rlvr_jax.rollouts.decoder import Emitted, Prefilled, Settings
from rlvr_jax.rollouts.dialogues import Dialogues, DialogueSettings
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.rollouts.group import Policy
from rlvr_jax.rollouts.sampler import LocalSampler, SamplerSettings, SamplingSource
from rlvr_jax.types import Sampling

TOKENIZER = ByteTokenizer()
STOP = TOKENIZER.stop_ids[0]
G, S, T, STEPS, SLOTS = 3, 8, 14, 4, 4  # a batch of two prompts has more rollouts than slots


def digest(*parts: Any) -> int:
  return zlib.crc32(repr(parts).encode())


# --- programs -------------------------------------------------------------------------------------


class Slot(NamedTuple):
  """What a slot decodes."""

  tokens: tuple[int, ...]  # of prompt and response
  key: tuple[int, ...]
  generated: int
  known: tuple[int, ...]  # tokens of the response that come next
  runs: bool = True


class ToyPrograms:
  """As `EnginePrograms`, for the real `Engine`."""

  pad_token, max_prompt_length = TOKENIZER.pad_id, S

  def __init__(self, *, slots=SLOTS, has_replies=False, burst_s=0.0):
    config = types.SimpleNamespace(compute_dtype="float32", routes=None)
    self.settings = Settings(
      model=types.SimpleNamespace(config=config),
      sampling=Sampling(),
      slots=slots,
      shape=types.SimpleNamespace(steps=STEPS),
      max_new_tokens=T,
      stop_tokens=(STOP,),
      has_replies=has_replies,
    )
    self._burst_s = burst_s
    self.programs = types.SimpleNamespace(
      empty_slots=lambda: (None,) * slots, insert=_insert, halt=_halt, resume=_resume
    )
    self.compiled = types.SimpleNamespace(bursts=types.SimpleNamespace(run=self._burst))

  def prefill_rows(self, length):
    return 2

  def padded_length(self, tokens, *, has_response):
    return -(-tokens // 8) * 8

  def prefill(self, params, tokens, prompts, *, length, has_response):
    assert max(map(len, tokens)) <= length and params is not None
    return Prefilled(prompts=tuple(tuple(x.tolist()) for x in tokens), states=())

  def to_host(self, tree):
    return tree

  def _burst(self, params, slots, *, prompt, response, has_halted):
    time.sleep(self._burst_s)
    shape = (len(slots), STEPS)
    tokens, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    after, stopped = [*slots], np.zeros(len(slots), bool)
    for number, slot in enumerate(slots):
      for step in range(STEPS):
        if slot is None or not slot.runs:
          break
        found = digest(params, slot.key, slot.tokens)
        token = slot.known[0] if slot.known else (STOP if found % 9 == 0 else 97 + found % 8)
        tokens[number, step] = token
        logprobs[number, step] = -(found % 1000 + 1) / 1000
        stopped[number] = not slot.known and token == STOP
        ends = stopped[number] or slot.generated + 1 == T
        tokens_so_far = (*slot.tokens, int(token))
        slot = Slot(tokens_so_far, slot.key, slot.generated + 1, slot.known[1:], not ends)
      after[number] = slot
    generated = np.array([slot.generated if slot else 0 for slot in after], np.int32)
    runs = np.array([slot is not None and slot.runs for slot in after], bool)
    return tuple(after), Emitted(tokens, logprobs, generated, runs, stopped, np.int32(STEPS))


def _insert(slots, prefilled, fresh):
  new = [*slots]
  for number, row in enumerate(fresh.row.tolist()):
    if row >= 0:
      cached = 0 if fresh.generated is None else int(fresh.generated[number])
      tokens = (*prefilled.prompts[row], int(fresh.token[number]))
      new[number] = Slot(tokens, tuple(fresh.keys[number].tolist()), cached, _known(fresh, number))
  return tuple(new)


def _known(of, number):
  known = of.known
  return () if known is None else tuple(known.tokens[number, : known.number[number]].tolist())


def _halt(slots, mask):
  return tuple(x._replace(runs=False) if halt else x for x, halt in zip(slots, mask, strict=True))


def _resume(slots, mask, token, known):
  return tuple(x._replace(runs=True) if run else x for x, run in zip(slots, mask, strict=True))


# --- graders and environments ---------------------------------------------------------------------


class Workers:
  """A grader, and an environment of some turns; answers come late, and in any order."""

  def __init__(self, *, turns=1, delay_s=0.002, seed=None):
    self.turns, self._delay_s = turns, delay_s
    self._random, self._lock = random.Random(seed), threading.Lock()
    self._pool = concurrent.futures.ThreadPoolExecutor(4)
    self.dialogues: dict[int, list[Any]] = {}  # problem, seed and texts so far
    self.graded: list[str] = []

  def grade(self, texts, references):
    """Right or wrong by the text, and by what the problem is."""
    assert len(texts) == len(references) == 1
    self.graded += texts
    is_right = "always" in references[0] or digest(texts[0], references[0]) % 2 == 0
    grade = Grade(Outcome.CORRECT, 1.0) if is_right else Grade(Outcome.WRONG)
    return self._later(lambda: [grade])

  def reset(self, problem, seed, reference=None):
    with self._lock:
      number = len(self.dialogues)
      self.dialogues[number] = [problem["question"], seed]
    return self._later(lambda: Started(number, None))

  def step(self, dialogue, text):
    """A reply of some letters, or the end with a score."""
    history = self.dialogues[dialogue]
    history.append(text)
    found = digest(history)
    turn = Turn("ABCDEF"[: 1 + found % 3])
    if len(history) == 2 + self.turns:
      turn = Turn(done=True, score=float(found % 2))
    return self._later(lambda: turn)

  def close_dialogue(self, dialogue):
    self.dialogues[dialogue].append("closed")

  def _later(self, answer):
    with self._lock:
      delay_s = self._random.random() * self._delay_s
    return self._pool.submit(lambda: time.sleep(delay_s) or answer())

  def answers(self, processes=ALONE):
    dialogues = None
    if self.turns > 1:
      settings = DialogueSettings(max_turns=self.turns)
      pool: Any = self if processes.index == 0 else None
      dialogues = Dialogues(settings, TOKENIZER, pool)
    return Answers(TOKENIZER, self.grade, dialogues, processes)


def grading():
  return Grading(TOKENIZER, S, outcome_policy())


def local(
  workers=None, *, sources=1, processes=ALONE, slots=SLOTS, burst_s=0.0, loads=None, **settings
):
  """A sampler of training; a second source samples with other weights, and is not of this run.

  Args:
    loads: gets (source, version) whenever weights are loaded.
  """
  workers = workers or Workers()

  def source(number):
    def load(policy):
      if loads is not None:
        loads.append((number, policy.version))
      return policy.params["w"] if number == 0 else f"weights of source {number}"

    programs: Any = ToyPrograms(slots=slots, has_replies=workers.turns > 1, burst_s=burst_s)
    return SamplingSource(programs, load, of_this_run=number == 0)

  sampler_settings = SamplerSettings(**{"group_size": G} | settings)
  lanes = [source(number) for number in range(sources)]
  return LocalSampler(lanes, grading(), workers.answers(processes), sampler_settings)


class Watched:
  """A sampler that remembers what was asked of it."""

  def __init__(self, inner):
    self.inner, self.wanted = inner, []
    self.offer, self.take, self.poll = inner.offer, inner.take, inner.poll
    self.measure, self.close = inner.measure, inner.close

  def want(self, draw, indices):
    self.wanted += [(draw.number, index) for index in sorted(indices)]
    self.inner.want(draw, indices)


# --- a run ----------------------------------------------------------------------------------------


class Killed(BaseException):
  """The process ends here."""


@dataclasses.dataclass
class Around:
  """What batches call of a run around them.

  Attributes:
    fingerprints: by version.
    kill_at: number of the write or read of the store at which the process is killed.
    kills_before: whether it is killed before it, else after it.
  """

  fingerprints: dict[int, str] = dataclasses.field(default_factory=dict)
  kill_at: int | None = None
  kills_before: bool = False
  num_calls: int = 0
  counted: list[int] = dataclasses.field(default_factory=list)
  warnings: list[str] = dataclasses.field(default_factory=list)

  def functions(self):
    """The functions that batches call."""
    return Hooks(self.fingerprint, self.compare, self.flops, self.on_first, self.warn)

  def fingerprint(self, version):
    return self.fingerprints.get(version)

  def on_first(self, action):
    self.num_calls += 1
    is_last = self.num_calls == self.kill_at
    if is_last and self.kills_before:
      raise Killed
    result = action()
    if is_last:
      raise Killed
    return result

  def compare(self, groups, version, checked_version):
    gap = {"gap": float(version)} if version > checked_version else {}
    return Measured(groups, gap, max(version, checked_version))

  def flops(self, arrays):
    return float(arrays["lengths"].sum())

  def warn(self, text):
    self.warnings.append(text)


class Now(NamedTuple):
  """Where a run stands."""

  step: int
  weights: int
  position: Position
  fingerprints: dict[int, str]


class Update(NamedTuple):
  """What a run has trained on."""

  step: int
  batch: int
  versions: tuple[int, ...]  # that have sampled it
  bits: int  # of all groups, with samples and statistics


def problems(count=10):
  references = [{"level": n} for n in range(count)]
  return [Problem(f"{n}+{n}=", str(n), "", references[n]) for n in range(count)]


def make_batches(sampler, store, around, *, source=None, recorded=None, **settings):
  settings = BatchSettings(**{"quotas": [2], "seed": 5} | settings)
  live = sum(settings.quotas[:-1] if recorded else settings.quotas)
  draws = problem_draws(source or problems(), batch_size=max(live, 1), seed=3)
  return Batches(Inputs(sampler, draws, recorded), store, settings, around.functions())


def bits_of(batch):
  """A checksum of all that a batch is, whatever the order of names.

  But for versions by token, which a run that is repeated need not have.
  """
  names = sorted({name for group in batch.groups for name in group.arrays} - {"token_versions"})
  arrays = [
    (name, group.arrays[name].tobytes())
    for group in batch.groups
    for name in names
    if name in group.arrays
  ]
  others = [group._replace(arrays={}) for group in batch.groups]
  return digest(arrays, others, sorted(batch.statistics.items()), batch.after)


def train(schedule, num_updates, sampler, batches, around, now=None, saved=None, update_s=0.0):
  """The updates of a run; `saved` gets a `Now` before every one."""
  if now is None:
    now = Now(0, 1, batches.position(), {})
  else:
    batches.move_to(now.position)
    around.fingerprints.update(now.fingerprints)
  updates = []
  for step in range(now.step, num_updates):
    if saved is not None:
      saved[step] = now
    if schedule.refreshes(step):
      weights = now.weights
      fingerprint = f"{digest(weights):08x}"
      around.fingerprints[step] = fingerprint
      sampler.offer(Policy(step, {"w": weights}, lambda fingerprint=fingerprint: fingerprint))
    limit = schedule.limit(step)
    batches.open(until=min(limit, num_updates) if schedule.threaded else limit, version=step)
    batch = batches.take(schedule.batch(step))
    around.counted += [new.number for new in batches.added()]
    time.sleep(update_s)
    bits = bits_of(batch)
    updates.append(Update(step, batch.number, tuple(batch.fingerprints), bits))
    batches.forget(before=schedule.first(step + 1))
    weights = digest(now.weights, bits)
    now = Now(step + 1, weights, batches.position(), dict(around.fingerprints))
  return updates
