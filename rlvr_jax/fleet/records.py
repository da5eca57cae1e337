"""The records of a fleet: small JSON objects with a checksum, and finished groups.

All are objects of WORKDIR/fleet, see `storage.shared`:

  trainer                  a `TrainerRecord`, rewritten every few seconds
  plans/DRAW-ID            a `Plan`, by the trainer
  leases/DRAW-LEASE        of `leases`
  groups/DRAW-GROUP        a `GradedGroup`, by the first sampler that finished it
  samplers/ID              a `SamplerRecord`, rewritten every few seconds
  failures/ID              a `FailureRecord`: an error that must end the run
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from rlvr_jax.rollouts.group import DamagedError as DamagedArraysError
from rlvr_jax.rollouts.group import FormatError, Group, decode, encode
from rlvr_jax.storage.files import parse_checked_line, with_crc32

MARKER = "rlvr_jax fleet 1"
TRAINER = "trainer"


class RecordError(RuntimeError):
  """An object of a fleet is damaged, or of another version of this package."""


class DamagedError(RecordError):
  """An object of a fleet is damaged."""


class _Json:
  """Converts a NamedTuple of JSON values to bytes and back; a mix-in of the records."""

  def encode(self) -> bytes:
    """A line of JSON with format and checksum."""
    content = {"format": MARKER, **self._asdict()}  # type: ignore[attr-defined]
    return json.dumps(with_crc32(content)).encode() + b"\n"

  @classmethod
  def decode(cls, data: bytes, name: str) -> Self:
    """The inverse of `encode`; `name`: of the object, for the message.

    Raises:
      DamagedError: the object is damaged.
      RecordError: it has another format.
    """
    return cls(**_read_fields(data, name, cls._fields))  # type: ignore[attr-defined]


def _read_fields(line: bytes, name: str, fields: tuple[str, ...]) -> dict[str, Any]:
  """The fields of a record in a line of JSON; raises as `_Json.decode`."""
  content = parse_checked_line(line)
  if content is None:
    raise DamagedError(f"fleet/{name} is damaged")
  if content.pop("format", None) != MARKER or content.keys() != set(fields):
    raise RecordError(
      f"fleet/{name} was written by another version of rlvr_jax; run one version everywhere"
    )
  return content


class _TrainerFields(NamedTuple):
  incarnation: str  # of the trainer's process
  code: str  # version and commit
  config: str  # fingerprint of the configuration
  data: str  # fingerprint of problems and tokenizer
  settings: str  # fingerprint of what a resumed trainer may change, and samplers must follow
  policies: list[list[Any]]  # [version, fingerprint] of those that can be restored, newest last
  draws: list[int]  # the lowest draw that is still needed, and the newest that has a plan
  ended: bool  # whether all batches have been sampled
  beat: int  # number of this record


class TrainerRecord(_Json, _TrainerFields):
  """What the trainer says: who it is, what it publishes and needs."""


class _PlanFields(NamedTuple):
  draw: int
  number: int  # of the batch that is to train on it
  lowest_version: int  # that may sample it
  problems: list[int]  # P checksums, by which a sampler verifies that it draws the same
  position: dict[str, Any]  # state of the problems' order before the draw
  drawn_by: int  # version that the draw is for, see `Draws.draw`
  leases: list[list[int]]  # [first group, one past the last] of each lease


class Plan(_Json, _PlanFields):
  """A draw of problems that samplers sample. All its random keys are those of seed and draw."""

  @property
  def id(self) -> str:
    """8 hexadecimal digits, other ones for another draw of this number."""
    content = json.dumps([self.draw, self.problems, self.leases]).encode()
    return f"{zlib.crc32(content):08x}"


class _SamplerFields(NamedTuple):
  host: str
  version: int  # of the policy that it samples; −1: none so far
  restore_seconds: float  # of the last policy
  restore_gib: float
  tokens_per_second: float  # that it sampled, since the last record
  idle_share: float  # of the time, since the last record
  leases: int  # that it has
  groups: int  # that it wrote, in all
  duplicate_groups: int  # that another sampler had finished first
  duplicate_tokens: int
  message: str  # what it does or waits for
  beat: int


class SamplerRecord(_Json, _SamplerFields):
  """What a sampler says of itself."""

  def describe(self) -> str:
    """The line of the sampler on a console."""
    return (
      f"version {self.version}, {self.tokens_per_second:,.0f} tokens/s, {self.leases} leases,"
      f" {self.idle_share:.0%} idle, {self.groups} groups{self.message and f'; {self.message}'}"
    )


class _FailureFields(NamedTuple):
  message: str


class FailureRecord(_Json, _FailureFields):
  """An error that must end the run, such as one of agreement."""


class _GroupFields(NamedTuple):
  plan: str  # `Plan.id`
  sampler: str
  policies: dict[str, str]  # version → fingerprint, of those that sampled its tokens
  grades: list[list[Any]]  # [outcome, score, detail, answer] of the rollouts that a grader judged
  details: list[str] | None  # of dialogues, see `Group.details`
  gaps: dict[str, float]  # of the agreement check, if this group was compared


class GroupRecord(_Json, _GroupFields):
  """What belongs to a finished group, besides its arrays."""


class GradedGroup(NamedTuple):
  """A finished and graded group."""

  record: GroupRecord
  arrays: dict[str, np.ndarray]  # of `serve.Group`, those that are not None

  def encode(self) -> bytes:
    """The record, and the arrays as a file of one group."""
    return self.record.encode() + encode([Group(0, 0, 0, {}, self.arrays, [], {})], {})

  @classmethod
  def decode(cls, data: bytes, name: str) -> GradedGroup:
    """The inverse of `encode`; raises RecordError as `TrainerRecord.decode`."""
    line, _, rest = data.partition(b"\n")
    record = GroupRecord.decode(line + b"\n", name)
    try:
      (group,), _ = decode(rest)
    except DamagedArraysError as error:
      raise DamagedError(f"fleet/{name} is damaged: {error}") from error
    except FormatError as error:
      raise RecordError(
        f"fleet/{name} is not what this version of rlvr_jax reads: {error}"
      ) from error
    return cls(record, group.arrays)


def plan_name(plan: Plan) -> str:
  """Name of the object of a plan; another plan of the same draw has another name."""
  return f"plans/{plan.draw:08d}-{plan.id}"


def lease_name(draw: int, lease: int) -> str:
  """Name of the object of a lease."""
  return f"leases/{draw:08d}-{lease:04d}"


def group_name(draw: int, group: int) -> str:
  """Name of the object of a finished group; `group`: its index in the draw."""
  return f"groups/{draw:08d}-{group:06d}"


def draw_of(name: str) -> int:
  """The draw that a plan, lease or group belongs to, by its name."""
  return int(name.rpartition("/")[2].partition("-")[0])


def index_of(name: str) -> int:
  """The number of a lease or group, by its name."""
  return int(name.rpartition("-")[2])


def problem_checksum(question: str, reference: Mapping[str, Any]) -> int:
  """CRC-32 of what a problem asks and how it is graded."""
  return zlib.crc32(json.dumps([question, reference], sort_keys=True, default=str).encode())
