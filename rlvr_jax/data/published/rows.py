"""Published rows, and the record format into which all data sets are converted."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Record:
  """One problem of a published data set."""

  id: str
  question: str  # as published, before any prompt template
  answer: str  # "" if the grader needs more than a text
  solution: str  # in the form of a completion; "" if none is published
  reference: Mapping[str, Any]  # what the grader needs; JSON-serializable
  difficulty: float = math.nan  # as published: a level or a rate; NaN if unknown
  subject: str = ""


class Row:
  """A published row; fields are found by any of their published names, case-insensitively.

  Attributes:
    fields: fields as published.
    where: file and line or record, for messages.
  """

  def __init__(self, fields: Mapping[str, Any], *, where: str, name: str):
    """Initializes the row.

    Args:
      fields: fields as published.
      where: file and line or record, for messages.
      name: identifier of the row if the publisher gives none.
    """
    self.fields = fields
    self._fields = {field.lower(): value for field, value in fields.items()}
    self.where, self.name = where, name

  def error(self, message: str) -> ValueError:
    """Returns an error whose message begins with the row's file and line or record."""
    return ValueError(f"{self.where} {message}")

  def get(self, *names: str, default: Any = _MISSING) -> Any:
    """The value of the first of the named fields that is present and not null.

    Raises:
      ValueError: no such field is present, and there is no default.
    """
    return self._find(names, default)[1]

  def _find(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
    """The name and the value of the field that `get` finds; a default has the first name."""
    for name in names:
      if self._fields.get(name) is not None:
        return name, self._fields[name]
    if default is _MISSING:
      given = [name for name in names if name in self._fields]
      none = f"has no field {' or '.join(map(repr, names))}, only {sorted(self._fields)}"
      raise self.error(f"has {given[0]} = null, expected a value" if given else none)
    return names[0], default

  def text(self, *names: str, default: str | None = None) -> str:
    """The text of the first of the named fields that is present; a number is converted to text.

    Raises:
      ValueError: the value is neither text nor a number; or, without a default, it is missing or
        blank.
    """
    name, value = self._find(names, _MISSING if default is None else default)
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
      return str(value)
    if isinstance(value, str) and (value.strip() or default is not None):
      return self.check_text(name, value) if value.strip() else default or ""
    raise self.error(f"has {name} = {str(value)[:80]!r}, expected a text")

  def check_text(self, what: str, text: str) -> str:
    """The text; raises ValueError if it has a lone surrogate, which UTF-8 cannot encode."""
    if half := re.search("[\ud800-\udfff]", text):
      raise self.error(
        f"has a lone surrogate, {half.group()!r}, at character {half.start() + 1} of {what}: UTF-8"
        " cannot encode it, so leave it out"
      )
    return text

  def texts(self, *names: str, default: list[str] | None = None) -> list[str]:
    """The list of texts in the first of the named fields that is present.

    Raises:
      ValueError: no such field is present, or it is not a list of texts.
    """
    name, value = self._find(names, _MISSING if default is None else default)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
      raise self.error(f"has {name} = {str(value)[:80]!r}, expected a list of texts")
    return value

  def level(self, *names: str) -> float:
    """The number in a field, or N for "Level N"; NaN if the field is missing or "?".

    Raises:
      ValueError: the field has any other value.
    """
    text = self.text(*names, default="?").removeprefix("Level ")
    if text != "?" and not re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", text):
      name, _ = self._find(names, None)
      raise self.error(f"has {name} = {text[:80]!r}, expected a number or 'Level N'")
    return math.nan if text == "?" else float(text)
