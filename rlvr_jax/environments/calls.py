"""Tool calls in a policy's turn, in the formats of models whose chat templates support tools."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_BEGIN, _END = "<tool_call>", "</tool_call>"
# Values may contain any tag, so a value ends only at a closing tag that the next tag can follow.
_FUNCTION = re.compile(rf"<function=([^<>\s]+)>(.*?)</function>\s*(?={_END}|\Z)", re.DOTALL)
_PARAMETER = re.compile(
  r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
)


class Call(NamedTuple):
  """One call of a tool."""

  name: str
  arguments: Mapping[str, Any]


def without_thoughts(text: str) -> str:
  """The text after the last "</think>"; "" if a "<think>" is never closed."""
  _, closing, answer = text.rpartition("</think>")
  return "" if not closing and answer.lstrip().startswith("<think>") else answer


def find_call(text: str, names: Collection[str]) -> Call | None:
  """Finds the last tool call of a policy's turn; None if there is none.

  Three forms are read. Qwen 2.5 and 3, SmolLM3 and Hermes write `<tool_call>{"name": "f",
  "arguments": {…}}</tool_call>` anywhere after their thoughts. Qwen3-Coder and Qwen 3.5 write
  `<tool_call><function=f><parameter=x>…</parameter></function></tool_call>`; each argument is then
  a text, without the line breaks next to its tags. For Llama 3 the whole turn is
  `{"name": "f", "parameters": {…}}`; if f is not one of `names`, such a turn is not a call.

  Raises:
    ValueError: the text after `<tool_call>` is not a call.
  """
  answer = without_thoughts(text).strip()
  found, at = None, answer.find(_BEGIN)
  has_tag = at >= 0
  while at >= 0:  # tags within the text of a call are skipped
    call, end = _read(answer, at + len(_BEGIN))
    found = call or found
    at = answer.find(_BEGIN, end)
  if has_tag and found is None:
    example = '{"name": "…", "arguments": {…}}'
    raise ValueError(f"the tool call cannot be read: write {_BEGIN}{example}{_END}")
  if not has_tag and answer.startswith("{"):
    call, end = _read(answer, 0)
    found = call if call and call.name in names and end == len(answer) else None
  return found


def _read(text: str, start: int) -> tuple[Call | None, int]:
  """The call that begins at `start`, or None, and the index after the text that was read."""
  start = len(text) - len(text[start:].lstrip())
  if in_tags := _FUNCTION.match(text, start):
    return Call(in_tags[1], dict(_PARAMETER.findall(in_tags[2]))), in_tags.end()
  try:
    value, end = json.JSONDecoder().raw_decode(text, start)
  except (ValueError, RecursionError):
    return None, start
  if not isinstance(value, dict):
    return None, end
  name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None, end
  return Call(name, arguments), end
