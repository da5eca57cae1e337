"""Messages that give the new spelling of a configuration written for an earlier version.

In earlier versions a component was a group of fields, `name` and `kwargs`; now it is one string.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from rlvr_jax.specs import Spec, parse

_MOVED = {
  "loss.aggregation": "aggregation",
  "schedule.proximal_every": "proximal_every",
  "schedule.kwargs.deadline_s": "generation_deadline_s",
  "optimizer.max_gradient_norm": "max_gradient_norm",
  "task.kwargs.code_reward": "task.kwargs.grader",
  "warm_start.optimizer.max_gradient_norm": "warm_start.max_gradient_norm",
  "batch.micro_batches": "batch.tokens_per_micro_batch",
}
_COMPONENT = re.compile(r"(advantage|reweighting|gram|loss|schedule)\.(?:name|kwargs\.(\w+))")
_OPTIMIZER = re.compile(r"((?:warm_start\.)?)optimizer\.(\w+)")
_OF_RATE = {
  "learning_rate": "peak", "warmup_updates": "warmup", "final_fraction": "final_fraction",
  "decay": "",
}  # fmt: skip
_NAME = ""


def of_flags(flag: str, config: ConfigDict, given: Mapping[str, Any]) -> str | None:
  """A message if the command line sets fields of earlier versions, else None.

  Args:
    flag: name of the configuration's flag.
    config: of the recipe.
    given: path → value of the fields set on the command line.
  """
  old = {path: value for path, value in given.items() if _new_field(path)}
  new = [f'--{flag}.{field}="{value}"' for field, value in respelled(config, old).items()]
  given_as = " ".join(f"--{flag}.{path}" for path in old)
  return f"{given_as}: an old spelling; write {' '.join(new)}" if old else None


def of_recipe(error: BaseException) -> str | None:
  """A message if `error` comes from a recipe that sets a field of earlier versions, else None."""
  raised: list[BaseException] = [error]
  while (before := raised[-1].__context__) is not None:  # ml_collections replaces errors
    raised.append(before)
  for frame, line in itertools.chain(*(traceback.walk_tb(e.__traceback__) for e in raised)):
    file = frame.f_code.co_filename
    for target, value in _assigned_at("".join(linecache.getlines(file)), line):
      root, _, path = target.partition(".")
      old = dict(_flat(path, value))
      config = frame.f_locals.get(root)
      if old and all(map(_new_field, old)) and isinstance(config, ConfigDict):
        new = [
          f'config.{field} = "{v}"' if isinstance(v, str | Spec) else f"config.{field} = {v!r}"
          for field, v in respelled(config, old).items()
        ]
        message = f"config.{path} is an old spelling; write {' and '.join(new)}"
        return f"{file}, line {line}: {message}"
  return None


def of_config(config: ConfigDict) -> str | None:
  """A message if a recipe made a section that has a field of earlier versions, else None."""
  fields = itertools.chain(*(_flat(name, value) for name, value in config.to_dict().items()))
  old = {path: value for path, value in fields if path in _MOVED}
  new = [f"config.{field} = {value!r}" for field, value in respelled(config, old).items()]
  return (
    f"config.{', config.'.join(old)}: an old spelling; write {' and '.join(new)}" if old else None
  )


def respelled(config: ConfigDict, old: Mapping[str, Any]) -> dict[str, Any]:
  """The current fields that correspond to fields of earlier versions.

  Args:
    config: with current fields; the source of hyper-parameters that `old` does not set.
    old: path → value of fields of earlier versions.
  Returns:
    path → `Spec`, or a plain value if the field is not a component.
  """
  new: dict[str, Any] = {}
  fields = [(*found, value) for path, value in old.items() if (found := _new_field(path))]
  # Names first: they decide which of the recipe's hyper-parameters are kept.
  for field, keyword, value in sorted(fields, key=lambda entry: entry[1] != _NAME):
    if keyword is None:
      new[field] = _moved(config, field, value)
      continue
    spec = new.get(field) or parse(field, functools.reduce(getattr, field.split("."), config))
    if keyword == _NAME:
      keep = value == spec.name or field.endswith("learning_rate")
      new[field] = Spec(value, spec.arguments if keep else {})
    elif value is not None and (spec.name, keyword) != ("constant", "final_fraction"):
      new[field] = Spec(spec.name, {**spec.arguments, keyword: value})
  return new


def _moved(config: ConfigDict, field: str, value: Any) -> Any:
  """The value of a field that was moved, in its new unit."""
  if field.endswith(".grader"):
    return Spec("code", {"reward": value})
  if field != "batch.tokens_per_micro_batch":
    return value
  # Of prompts they were; now of at most so many tokens on each device.
  prompts, tokens = config.batch.prompts, config.max_response_length * config.batch.group_size
  devices = config.mesh.data * config.mesh.fsdp
  return -(-prompts * (config.max_prompt_length + tokens) // (int(value) * devices))


def _new_field(path: str) -> tuple[str, str | None] | None:
  """(current field, keyword of its component) if `path` is of earlier versions, else None."""
  if path in _MOVED:
    return _MOVED[path], None
  if found := _COMPONENT.fullmatch(path):
    return found[1], found[2] or _NAME
  if found := _OPTIMIZER.fullmatch(path):
    if found[2] == "name":
      return f"{found[1]}optimizer", _NAME
    field = "learning_rate" if found[2] in _OF_RATE else "optimizer"
    return found[1] + field, _OF_RATE.get(found[2], found[2])
  return None


def _assigned_at(source: str, line: int) -> Iterator[tuple[str, Any]]:
  """(target, value) of the assignments that include a line of a program."""
  try:
    nodes = list(ast.walk(ast.parse(source)))
  except SyntaxError:
    return
  for node in nodes:
    if isinstance(node, ast.Assign) and node.lineno <= line <= (node.end_lineno or node.lineno):
      for target in node.targets:
        yield ast.unparse(target), _value(node.value)


def _value(node: ast.expr) -> Any:
  """The value of a literal or of a call of dict; "…" for any other expression."""
  if isinstance(node, ast.Call):
    return {str(k.arg): _value(k.value) for k in node.keywords}
  try:
    return ast.literal_eval(node)
  except ValueError:
    return "…"


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
  if isinstance(value, Mapping):
    for key, child in value.items():
      yield from _flat(f"{path}.{key}", child)
  else:
    yield path, value
