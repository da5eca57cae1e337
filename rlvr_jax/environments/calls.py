"""Tool calls in a policy's turn, as models write them whose chat templates show them tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
  """One call of a tool."""

  name: str
  arguments: Mapping[str, Any]


def without_thoughts(text: str) -> str:
  """What follows the last "</think>"; "" in a "<think>" that is never closed."""
  _, closing, answer = text.rpartition("</think>")
  return "" if not closing and answer.lstrip().startswith("<think>") else answer


def find_call(text: str) -> Call | None:
  """Finds the last tool call of a policy's turn; None if there is none.

  Two forms are read. Qwen 2.5 and 3, SmolLM3 and Hermes write `<tool_call>{"name": "f",
  "arguments": {…}}</tool_call>` anywhere after their thoughts; one that is not closed extends to
  the end, for a stop string. Of Llama 3 the whole turn is `{"name": "f", "parameters": {…}}`.

  Raises:
    ValueError: what stands in `<tool_call>` is not such an object.
  """
  answer = without_thoughts(text)
  _, tag, rest = answer.rpartition(_BEGIN)
  if tag:
    call = _read(rest.partition(_END)[0])
    if call is None:
      example = '{"name": "…", "arguments": {…}}'
      raise ValueError(f"the tool call cannot be read: write {_BEGIN}{example}{_END}")
    return call
  answer = answer.strip()
  return _read(answer) if answer.startswith("{") and answer.endswith("}") else None


def _read(text: str) -> Call | None:
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  if not isinstance(value, dict):
    return None
  name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
  if not isinstance(name, str) or not isinstance(arguments, dict):
    return None
  return Call(name, arguments)
