"""The folder or bucket through which trainer and samplers of a run exchange files, without locks.

  terms/E          term E: one start of a trainer, with the identity that samplers must have
  policies/E.V     says that version V of the policy can be restored
  draws/E.N        draw N of problems, and which of its groups are requested
  groups/N.I       group I of draw N, written by the first sampler that has finished it
  samplers/NAME    a counter, and what the sampler does; only these objects are overwritten
  ends/E           says that the trainer of term E has all its batches

All objects except groups are a line of JSON with a checksum. Anybody may have written the files. So
files whose names do not match the list are ignored, and contents are checked here. Nothing is
unpickled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

from rlvr_jax.data.problems import Problem
from rlvr_jax.rollouts import group as group_file
from rlvr_jax.rollouts.group import Draw, Group
from rlvr_jax.storage.files import JSON, JsonObject, parse_checked_line, with_crc32
from rlvr_jax.storage.objects import Listed, Objects

MARKER = "rlvr_jax fleet 2"
MAX_RECORD_BYTES = 2**28  # the most bytes of a draw with its problems; larger records are ignored
MAX_GROUP_BYTES = 2**31  # the most bytes of a group, its padding included
_NUMBER = r"(0|[1-9]\d{0,11})"
_NAMES = {
  "terms": re.compile(_NUMBER),
  "policies": re.compile(rf"{_NUMBER}\.{_NUMBER}"),
  "draws": re.compile(rf"{_NUMBER}\.{_NUMBER}"),
  "groups": re.compile(rf"{_NUMBER}\.{_NUMBER}"),
  "samplers": re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,79})"),
  "ends": re.compile(_NUMBER),
}

Place = tuple[int, int]  # (draw, index) of a group
Fields: TypeAlias = Mapping[str, Callable[[object], bool]]  # name → whether a value is allowed


class RecordError(ValueError):
  """An object is damaged, or has contents that this version would not write."""


class View(NamedTuple):
  """The contents of the exchange in one listing, for the newest term."""

  term: int  # −1: no term has begun yet
  policies: list[int]  # versions, ascending
  draws: list[int]  # numbers, ascending
  groups: dict[Place, Listed]
  samplers: dict[str, Listed]
  ended: bool


class WantedDraw(NamedTuple):
  """A draw with its wanted groups, in the form that samplers read."""

  draw: Draw
  indices: list[int]  # indices of the wanted groups
  digest: str  # digest of problems, seed and sources


class SamplerRecord(NamedTuple):
  """The record that a sampler writes about itself."""

  term: int  # term of the trainer that the sampler samples for; −1: none yet
  beat: int  # number of this record, so that each record differs from the last
  version: int  # version of the policy that samples; −1: none yet
  message: str  # what the sampler does or waits for
  error: str  # the error that has ended the sampler; "" for none
  ends_run: bool  # whether any sampler would meet this error
  doing: list[list[int]]  # [draw, index] of the groups that the sampler has begun
  duplicate_groups: int  # number of groups that another sampler wrote first
  duplicate_tokens: int  # number of tokens in duplicate groups


class Exchange:
  """Reads and writes the objects of a fleet; safe to use from several threads."""

  def __init__(self, objects: Objects):
    self._objects = objects

  def look(self) -> View:
    """Lists the exchange once and returns its present contents."""
    found: dict[str, dict[Any, Listed]] = {kind: {} for kind in _NAMES}
    for path, listed in self._objects.list().items():
      kind, name = _parse_name(path)
      if kind == "groups" or (kind and listed.size <= MAX_RECORD_BYTES):
        found[kind][name] = listed
    term = max(found["terms"], default=-1)
    of_term = lambda kind: sorted(number for e, number in found[kind] if e == term)
    return View(
      term=term,
      policies=of_term("policies"),
      draws=of_term("draws"),
      groups=found["groups"],
      samplers=found["samplers"],
      ended=term in found["ends"],
    )

  # --- the trainer --------------------------------------------------------------------------------

  def begin_term(self, identity: Mapping[str, str]) -> int:
    """Begins the next term; removes earlier terms and their files: ends, policies and draws.

    Args:
      identity: properties that samplers must share with this trainer; name → text.
    Returns:
      The number of the term.
    """
    term = self.look().term + 1
    while not self._put(f"terms/{term}", {"identity": dict(identity)}):
      term += 1
    for path in self._objects.list():
      kind, name = _parse_name(path)
      if (kind in ("terms", "ends") and name < term) or (
        kind in ("policies", "draws") and name[0] < term
      ):
        self._objects.remove(path)
    return term

  def announce(self, term: int, version: int, fingerprint: str) -> None:
    """Announces that a policy can be restored; only the newest two announcements are kept."""
    self._put(f"policies/{term}.{version}", {"fingerprint": fingerprint})
    view = self.look()
    if view.term == term:
      for old in view.policies[:-2]:
        self._objects.remove(f"policies/{term}.{old}")

  def put_draw(self, term: int, draw: Draw, indices: Collection[int]) -> str:
    """Requests groups of a draw; returns the digest of the draw."""
    digest = digest_draw(draw)
    content = draw_to_json(draw) | {"indices": sorted(indices)}
    self._put(f"draws/{term}.{draw.number}", content)
    return digest

  def remove_draw(self, term: int, number: int) -> None:
    """Withdraws the request for groups of a draw."""
    self._objects.remove(f"draws/{term}.{number}")

  def remove_group(self, place: Place) -> None:
    """Removes a group, which is sampled again if its draw still requests it."""
    self._objects.remove(_group_name(place))

  def get_group(self, place: Place, listed: Listed) -> tuple[Group, str] | None:
    """A group and the digest of its draw; None if the group was removed.

    Raises:
      RecordError: the group is damaged or too large, or its draw and index are not `place`.
    """
    name = _group_name(place)
    if listed.size > MAX_GROUP_BYTES:
      raise RecordError(
        f"{name} has {listed.size} bytes, but at most {MAX_GROUP_BYTES} are allowed"
      )
    if (data := self._objects.get(name)) is None:
      return None
    try:
      groups, info = group_file.decode(data, max_bytes=MAX_GROUP_BYTES)
    except ValueError as error:
      raise RecordError(f"{name}: {error}") from error
    if [(group.draw, group.index) for group in groups] != [place]:
      raise RecordError(f"{name} contains other groups than its name says")
    return groups[0], str(info.get("draw"))

  def remove_sampler(self, name: str) -> None:
    """Removes a sampler's record."""
    self._objects.remove(f"samplers/{name}")

  def end(self, term: int) -> None:
    """Announces that the trainer has all its batches."""
    self._put(f"ends/{term}", {})

  # --- samplers -----------------------------------------------------------------------------------

  def identity(self, term: int) -> dict[str, str] | None:
    """The identity that a term's trainer requires of samplers; None if a later term has begun."""
    content = self._get(f"terms/{term}", {"identity": _is_texts})
    return None if content is None else content["identity"]

  def fingerprint(self, term: int, version: int) -> str | None:
    """The fingerprint of an announced policy; None if newer policies have replaced it."""
    content = self._get(f"policies/{term}.{version}", {"fingerprint": _is_text})
    return None if content is None else content["fingerprint"]

  def get_draw(self, term: int, number: int) -> WantedDraw | None:
    """Reads a draw; None if it was removed. Raises RecordError if it is damaged."""
    content = self._get(f"draws/{term}.{number}", _DRAW)
    if content is None:
      return None
    size = len(content["problems"])
    indices = content["indices"]
    if content["number"] != number or len(content["sources"]) != size:
      raise RecordError(
        f"draws/{term}.{number} has the number {content['number']} and {len(content['sources'])}"
        f" sources for {size} problems, but must have the number {number} and a source per problem"
      )
    if any(index >= size for index in indices):
      raise RecordError(
        f"draws/{term}.{number} requests the groups {indices}, but has only {size} problems"
      )
    draw = draw_from_json(content)
    return WantedDraw(draw, indices, digest_draw(draw))

  def put_group(self, group: Group, digest: str) -> bool:
    """Writes a group; False if another sampler was first."""
    data = group_file.encode([group], {"draw": digest})
    return self._objects.put(_group_name((group.draw, group.index)), data)

  # --- what samplers say --------------------------------------------------------------------------

  def beat(self, name: str, record: SamplerRecord) -> None:
    """Overwrites a sampler's record."""
    self._objects.replace(f"samplers/{check_sampler_name(name)}", _to_line(record._asdict()))

  def sampler(self, name: str) -> SamplerRecord | None:
    """A sampler's record; None if the sampler has left, or the record is damaged."""
    try:
      content = self._get(f"samplers/{check_sampler_name(name)}", _SAMPLER)
    except RecordError:
      return None
    return None if content is None else SamplerRecord(**content)

  # --- records ------------------------------------------------------------------------------------

  def _put(self, name: str, content: Mapping[str, JSON]) -> bool:
    return self._objects.put(name, _to_line(content))

  def _get(self, name: str, fields: Fields) -> JsonObject | None:
    """The checked fields of a record; None if it does not exist."""
    data = self._objects.get(name)
    if data is None:
      return None
    if (content := parse_checked_line(data)) is None:
      raise RecordError(f"{name} is damaged")
    if content.pop("format", None) != MARKER or content.keys() != fields.keys():
      raise RecordError(
        f"{name} was written by another version of rlvr_jax; use one version in all programs"
      )
    for field, is_allowed in fields.items():
      if not is_allowed(content[field]):
        raise RecordError(f"{name} has {field} = {content[field]!r:.80}, which is not allowed")
    return content


@functools.lru_cache(2**14)
def _parse_name(path: str) -> tuple[str, Any]:
  """(kind, numbers or a sampler's name) of an object; ("", None) if its name is not allowed."""
  kind, _, name = path.partition("/")
  match = _NAMES[kind].fullmatch(name) if kind in _NAMES else None
  if match is None:
    return "", None
  parts = match.groups() if kind == "samplers" else tuple(map(int, match.groups()))
  return kind, parts if len(parts) > 1 else parts[0]


def check_sampler_name(name: str) -> str:
  """Returns a sampler's name; raises ValueError if its form is not allowed."""
  if not _NAMES["samplers"].fullmatch(name):
    raise ValueError(
      f"{name!r} is not allowed as a sampler's name: use 1 to 80 letters, digits, - and _,"
      " beginning with a letter or digit"
    )
  return name


def digest_draw(draw: Draw) -> str:
  """A digest of a draw's number, problems, seed and sources: 16 hexadecimal digits."""
  text = json.dumps(draw_to_json(draw._replace(version=0)), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _group_name(place: Place) -> str:
  return "groups/" + ".".join(map(str, place))


def _to_line(content: Mapping[str, JSON]) -> bytes:
  return json.dumps(with_crc32({"format": MARKER, **content}), allow_nan=False).encode() + b"\n"


def draw_from_json(content: JsonObject) -> Draw:
  """A draw from the JSON of `draw_to_json`, whose content has been checked."""
  problems = [_problem_from_json(problem) for problem in content["problems"]]
  fields = (content[name] for name in ("seed", "version", "sources"))
  return Draw(content["number"], problems, *fields)


def draw_to_json(draw: Draw) -> dict[str, JSON]:
  """A draw as JSON, without `Draw.plan`, the versions of its tokens in a recorded run."""
  return {
    "number": draw.number,
    "seed": draw.seed,
    "version": draw.version,
    "sources": [int(source) for source in draw.sources],
    "problems": [_problem_to_json(problem) for problem in draw.problems],
  }


def _problem_to_json(problem: Problem) -> dict[str, JSON]:
  fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
  json_values: dict[str, JSON] = json.loads(json.dumps(fields))
  return json_values


def _problem_from_json(fields: JsonObject) -> Problem:
  tuples = {name: tuple(fields[name]) for name in ("history", "messages")}
  return Problem(**{**fields, **tuples})


# --- what a field may contain ---------------------------------------------------------------------


def _is_text(value: object) -> bool:
  return isinstance(value, str)


def _is_texts(value: object) -> bool:
  return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_count(value: object) -> bool:
  return type(value) is int and 0 <= value < 2**53


def _is_count_or_none(value: object) -> bool:
  return value == -1 or _is_count(value)


def _are(is_item: Callable[[object], bool]) -> Callable[[object], bool]:
  """A check whether a value is a list of items that pass `is_item`."""
  return lambda value: isinstance(value, list) and all(map(is_item, value))


def _is_place(value: object) -> bool:
  return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_problem(value: object) -> bool:
  return isinstance(value, dict) and value.keys() == _PROBLEM.keys() and _have(value, _PROBLEM)


def _have(value: Mapping[str, object], fields: Fields) -> bool:
  return all(is_allowed(value[name]) for name, is_allowed in fields.items())


_PROBLEM: Fields = {
  **dict.fromkeys(("question", "answer", "solution", "where"), _is_text),
  "reference": lambda value: isinstance(value, dict),
  "history": _are(_is_text),
  "messages": _are(_is_texts),
  "inner": lambda value: value is None or isinstance(value, dict),
}
_DRAW: Fields = {
  "number": _is_count,
  "seed": lambda value: type(value) is int,
  "sources": _are(_is_count),
  "problems": _are(_is_problem),
  "version": _is_count,
  "indices": _are(_is_count),
}
_SAMPLER: Fields = {
  **dict.fromkeys(("term", "version"), _is_count_or_none),
  **dict.fromkeys(("message", "error"), _is_text),
  "ends_run": lambda value: type(value) is bool,
  "doing": _are(_is_place),
  **dict.fromkeys(("beat", "duplicate_groups", "duplicate_tokens"), _is_count),
}


class Watch:
  """Tracks which samplers live: those whose records changed lately, by this machine's clock."""

  def __init__(self, limit_s: float, clock: Callable[[], float]):
    """`limit_s`: seconds without a change after which a sampler is dead."""
    self._limit_s, self._clock = limit_s, clock
    self._seen: dict[str, tuple[Hashable, float]] = {}  # name → (`Listed.change`, time first seen)

  def look(self, samplers: Mapping[str, Listed]) -> list[str]:
    """The sorted names of the living samplers of a listing; a new name counts as alive at first."""
    now = self._clock()
    for name, listed in samplers.items():
      if name not in self._seen or self._seen[name][0] != listed.change:
        self._seen[name] = listed.change, now
    self._seen = {name: seen for name, seen in self._seen.items() if name in samplers}
    return sorted(name for name, (_, since) in self._seen.items() if now - since <= self._limit_s)

  def dead(self, since_s: float) -> list[str]:
    """The names of samplers whose records have not changed for `since_s` seconds."""
    now = self._clock()
    return sorted(name for name, (_, since) in self._seen.items() if now - since > since_s)
