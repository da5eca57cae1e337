"""Reads the configuration file and its overrides on the command line, and reports errors."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import glob
import inspect
import json
import os
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder
from ml_collections.config_flags import config_flags

import rlvr_jax
from rlvr_jax import specs
from rlvr_jax.storage.files import JsonObject
from rlvr_jax.storage.places import parse_path

_RECIPES = os.path.join(os.path.dirname(rlvr_jax.__file__), "configs")
_OF_A_RUN = "config.json"
_TRUST = "--trust_run"
_NAMED_BY_DATA = ("by_reference", "weighted")  # graders that call graders named in the data
_SAY_EVERY_S = 30.0  # seconds between printed lines while a sampler waits for a run
_POLL_S = 1.0
_TYPES = {kind.__name__: kind for kind in (bool, int, float, str, tuple)}

# Errors of Python and absl on a flag's value, and what the value has to be.
_NEEDED = (
  ("invalid literal for int()", "an integer, such as 2"),
  ("could not convert string to float", "a number, such as 0.5"),
  ("('Non-boolean argument to boolean flag'", "True or False"),
)

# Traceback frames in these folders are not in the configuration file.
_LIBRARIES = (
  *("<frozen", os.path.dirname(rlvr_jax.__file__)),
  *(os.path.dirname(str(module.__file__)) for module in (os, ml_collections, flags)),
)


def parse_flags(argv: list[str]) -> list[str]:
  """Parses all flags; an error in flags or configuration ends the process with a message.

  The program's flag for the configuration must be called config. If this flag is missing, an
  evaluation or an export uses the configuration of the run that --checkpoint names.
  """
  try:
    argv = _with_config_of_run(argv)
  except (flags.Error, ValueError, OSError) as error:  # in a file of flags, or in a run's path
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit("interrupted")
  rest, _ = _parse(flags.FLAGS, argv)
  return rest


def _parse(values: flags.FlagValues, argv: list[str]) -> tuple[list[str], ConfigDict]:
  """(arguments that are no flags, configuration); an error ends the process with a message.

  Args:
    values: the flags that `argv` may set.
    argv: the command line.
  """
  values["config"].parser = Parser("config", argv)
  try:
    rest: list[str] = values(argv)
    config = values["config"].value
    getattr(config, "seed", None)  # raises if the file was not loaded
  except Exception as error:
    missing = None if _value_of("config", argv) else _MISSING
    sys.exit(f"error: {missing or _flag_message(error, argv)}")
  if config is None:
    sys.exit(f"error: {_MISSING}")
  _check_is_complete(config)
  return rest, config


_MISSING = (
  "--config is missing; add --config=NAME, a recipe such as quickstart, or your own FILE.py. An"
  " evaluation or an export with --checkpoint=RUN uses the configuration of that run"
)


def _with_config_of_run(argv: list[str]) -> list[str]:
  """The arguments; if they lack --config, the configuration of the run that they name is added.

  The run may be given as RUN, RUN/checkpoints/STEP or RUN/warm_start/STEP; --config becomes
  RUN/config.json. For --mode=view, --config becomes the recipe base.py instead, with which the view
  compares the run's configuration.
  """
  mode, checkpoint = _value_of("mode", argv), _value_of("checkpoint", argv)
  if mode == "view" and not _value_of("config", argv):
    return [argv[0], f"--config={os.path.join(_RECIPES, 'base.py')}", *argv[1:]]
  flag = "workdir" if mode == "sample" else "checkpoint"
  named = _value_of("workdir", argv) if mode == "sample" else checkpoint
  if mode == "sample" and not named:
    raise ValueError("--workdir is missing; --mode=sample needs the trainer's workdir")
  if _value_of("config", argv) or not named or mode not in ("eval", "export", "sample"):
    return argv
  folder = parse_path(f"--{flag}", named)
  if mode == "sample":
    return [argv[0], f"--config={_wait_for_run(folder)}", *argv[1:]]
  files = [parent / _OF_A_RUN for parent in (folder, *folder.parents[:2])]
  recipe = next((file for file in files if file.exists()), None)
  if recipe is None:
    raise ValueError(
      f"--config is missing, and neither --checkpoint={checkpoint} nor the two folders above it"
      f" have a run's {_OF_A_RUN}; add --config=FILE"
    )
  return [argv[0], f"--config={recipe}", *argv[1:]]


def _wait_for_run(folder: pathlib.Path) -> pathlib.Path:
  """Waits until a trainer has begun its run in a folder; returns the run's configuration.

  A sampler may get its machine before the trainer does, so the sampler waits, and prints
  now and then that it waits.

  Raises:
    ValueError: the folder is a file.
  """
  if folder.is_file():
    raise ValueError(f"--workdir={folder} is a file; give the trainer's --workdir, a folder")
  recipe = folder / _OF_A_RUN
  said = -_SAY_EVERY_S
  while not recipe.exists():
    if time.monotonic() - said > _SAY_EVERY_S:
      said = time.monotonic()
      print(
        f"waits for a run: {folder} has no {_OF_A_RUN} yet; is it the trainer's --workdir, and was"
        " the trainer started with --config.fleet.samplers=True?",
        flush=True,
      )
    time.sleep(_POLL_S)
  return recipe


def read(arguments: Sequence[str], *, trusting: bool = False) -> ConfigDict:
  """The configuration that a list of flags describes, independent of this process's flags.

  Args:
    arguments: --config=FILE, then --config.FIELD=VALUE of any fields.
    trusting: whether --trust_run was given.
  Raises:
    ValueError: the file or a field is wrong.
  """
  values, argv = flags.FlagValues(), ["", *arguments, *[_TRUST] * trusting]
  options: dict[str, object] = dict(lock_config=True, flag_values=values, sys_argv=argv)
  config_flags.DEFINE_config_file("config", **options)
  flags.DEFINE_bool("trust_run", False, "", flag_values=values)
  try:
    return _parse(values, argv)[1]
  except SystemExit as error:
    raise ValueError(str(error).removeprefix("error: ")) from error


def _check_is_complete(config: Any) -> None:
  """Ends the process unless get_config() returned a configuration with the fields of the base."""
  fields = ("seed", "num_updates", "task", "model", "batch", "schedule", "mesh", "evaluation")
  is_one = isinstance(config, ConfigDict)
  missing = [name for name in fields if not is_one or name not in config]
  if missing:
    what = f"has no {', '.join(missing)}" if is_one else f"is {config!r:.100}"
    sys.exit(
      f"error: the result of get_config() of --config {what}; start from"
      " rlvr_jax.configs.base.get_config(), change its fields, and return it"
    )


def missing_field(error: AttributeError | KeyError) -> str | None:
  """A message if the error is a missing field of a configuration, else None."""
  frames = traceback.extract_tb(error.__traceback__)
  if not frames[-1].filename.startswith(os.path.dirname(str(ml_collections.__file__))):
    return None
  name = str(error.args[0]).strip("\"'").partition("\n")[0].strip("\"'")
  return (
    f"the configuration has no field {name!r}; a recipe that sets a section as a dict, such as"
    " c.batch = dict(…), replaces all of its fields: give all fields that configs/base.py has in"
    " this section, or set only the fields that change, such as c.batch.prompts = 8"
  )


def _flag_message(error: Exception, argv: list[str]) -> str:
  """A one-line message on an error in the flags or in the configuration file."""
  chain: list[BaseException] = [error]  # the libraries wrap errors, with their tracebacks as text
  while cause := chain[-1].__cause__ or chain[-1].__context__:
    chain.append(cause)
  for cause in reversed(chain):
    frames = traceback.extract_tb(cause.__traceback__)
    if any("config_module" in (frame.line or "") for frame in frames):
      file = _file_flag(argv)
      users = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
      position = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
      text = (str(cause).strip().splitlines() or [""])[0].strip()[:200]
      if unknown := re.search(r'Key \\*"([^"\\]+)\\*" does not exist', str(cause)):
        near = re.search(r'Did you mean \\*"([^"\\]+)', str(cause))
        text = f"no field {unknown[1]!r}" + (f"; did you mean {near[1]!r}?" if near else "")
      return f"{file}: {type(cause).__name__}: {text}{position}; fix or change the file"
  if "in argv before a value for --config" in str(error):
    return "--config=FILE must come before the fields that are set, such as --config.num_updates=2"
  if not isinstance(error, (AttributeError, KeyError)):
    return _needed_type(str(error).strip().partition("\n")[0])
  cause = error.args[0]
  near = str(cause.args[0] if isinstance(cause, KeyError) else cause).replace("\nDid", "; did")
  name = near.partition("; ")[0].strip("'")
  given = next((arg for arg in argv if arg.partition("=")[0].endswith(f".{name}")), "--config")
  return (
    f"{given}: the configuration has no field {near} (configs/base.py and the recipe list the"
    " fields; only task.kwargs and model.overrides take other fields)"
  )


def _needed_type(message: str) -> str:
  """A flag library's message, with the needed type in place of a known error text of Python."""
  for pythons, needed in _NEEDED:
    before, separator, _ = message.partition(f": {pythons}")
    if separator:
      return f"{before}: needs {needed}"
  return message


class Parser(config_flags.ConfigFileFlagParser):
  """Reads a recipe; the command line may also set keywords of the task and fields of the model."""

  def __init__(self, name: str, argv: Sequence[str]):
    """`name` is the flag's name, `argv` the complete command line."""
    super().__init__(name)
    self._argv = argv

  def parse(self, path: str) -> object:
    path = installed_recipe(path)
    config = self._of_run(path) if path.endswith(".json") else super().parse(_existing(path))
    if config is None:
      sys.exit(f"error: get_config() of {path} returns None; end it with: return c")
    if not isinstance(config, ConfigDict):  # `_check_is_complete` reports it
      return config
    given = overrides(self.name, self._argv)
    if message := _inside_a_string(self.name, config, given):
      sys.exit(f"error: {message}")
    try:
      if "task" in config:
        open_task(config, given)
      if "model" in config:
        open_model(config, given)
    except ValueError as error:
      sys.exit(f"error: {error}")
    return config

  def _of_run(self, path: str) -> ConfigDict:
    """The configuration that a run has written; its fields have the types of the base."""
    try:
      values = json.loads(parse_path(f"--{self.name}", path).read_text(encoding="utf-8"))
      if not isinstance(values, dict):
        raise ValueError(f"it is a JSON {type(values).__name__}, not an object")
    except (OSError, ValueError) as error:
      sys.exit(f"error: --{self.name}={path} cannot be read as a run's configuration: {error}")
    _check_trust(path, values, self._argv)
    config = super().parse(os.path.join(_RECIPES, "base.py"))
    config.task.kwargs = ConfigDict()
    with config.unlocked():
      _set_fields(config, values)
    return config


def is_trusting(argv: Sequence[str]) -> bool:
  """Whether --trust_run is among the flags of a command and its flag files."""
  argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
  return any(re.fullmatch("--?trust_run(=(true|True|1))?", flag) for flag in argv)


def _find_code(values: JsonObject) -> Iterator[tuple[str, str]]:
  """Yields (field, text) for each field that makes a run execute code from outside this package."""
  yield from specs.outside_package(values)
  if consent := (values.get("grading") or {}).get("unsandboxed_code"):
    yield "config.grading.unsandboxed_code", str(consent)
  yield from ((f, text) for f, name, text in specs.components(values) if name in _NAMED_BY_DATA)


def _check_trust(path: str, values: JsonObject, argv: Sequence[str]) -> None:
  """Ends the process if a run's configuration names outside code and --trust_run is missing."""
  named = [f"  {field} = {text!r:.200}" for field, text in _find_code(values)]
  if not named or is_trusting(argv):
    return
  what = "\n".join([f"{path} names code outside of rlvr_jax, which would run here:", *named])
  sys.exit(f"error: {what}\nadd --trust_run if you trust the author of that run")


def _set_fields(section: ConfigDict, values: JsonObject) -> None:
  """Sets fields from JSON values; lists become tuples."""
  for name, value in values.items():
    if isinstance(value, dict) and isinstance(section.get(name), ConfigDict):
      _set_fields(section[name], value)
    else:
      section[name] = _with_tuples(value)


def _with_tuples(value: object) -> object:
  """A JSON value with tuples for lists, at any depth."""
  return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _existing(path: str) -> str:
  """The path; ends the process if there is no such file, and lists the recipes."""
  file = path.partition(":")[0]
  if os.path.exists(file):
    return path
  files = [*glob.glob("[a-z]*.py", root_dir=_RECIPES), *glob.glob("*/[a-z]*.py", root_dir=_RECIPES)]
  recipes = sorted(name.removesuffix(".py") for name in files)
  meant = file.removeprefix("configs/").removesuffix(".py")
  near = difflib.get_close_matches(meant, recipes, n=1)
  hint = f"; did you mean {near[0]}?" if near else "."
  sys.exit(
    f"error: --config={path}: there is no such file{hint} Give your own FILE.py, or the name of a"
    f" recipe: {', '.join(recipes)}"
  )


def installed_recipe(path: str) -> str:
  """The path of a configuration file; for a recipe's name, the path of the installed recipe.

  quickstart and full_size/gsm8k_qwen25_05b are names of recipes. configs/quickstart.py, as the
  documentation writes it, is also a name if there is no such file. Text after a colon is the
  argument of get_config().
  """
  file, colon, argument = path.partition(":")
  name = re.fullmatch(r"configs/([\w/]+)\.py|([\w/]+)", file)
  if not name or os.path.isfile(file):
    return path
  installed = os.path.join(_RECIPES, f"{name[1] or name[2]}.py")
  return f"{installed}{colon}{argument}" if os.path.isfile(installed) else path


def _flags_like(pattern: str, argv: Sequence[str]) -> Iterator[tuple[re.Match[str], str]]:
  """Yields (match of the name, value) for each matching flag, `--name=value` or `--name value`."""
  for argument, following in zip(argv, [*argv[1:], ""], strict=True):
    name, equals, value = argument.partition("=")
    if match := re.fullmatch(rf"--?{pattern}", name):
      yield match, value if equals else following


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
  """The last value of a flag of the command line and its flag files; None if it is not given."""
  argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
  return next((text for _, text in reversed(list(_flags_like(flag, argv)))), None)


def _file_flag(argv: Sequence[str]) -> str:
  """The flag that names the configuration file, as written on the command line."""
  return next((f"{name[0]}={path}" for name, path in _flags_like("config", argv)), "--config")


def _inside_a_string(flag: str, config: ConfigDict, given: Mapping[str, object]) -> str | None:
  """A message if a flag sets a part of a field that is a string, such as learning_rate.peak."""
  for path in given:
    node: object = config
    *names, _ = path.split(".")
    for depth, name in enumerate(names, start=1):
      node = node[name] if isinstance(node, ConfigDict) and name in node else None
      if isinstance(node, str):
        field = ".".join(names[:depth])
        return (
          f"--{flag}.{path}: config.{field} is a string, {node!r}; set it as one string,"
          f" --{flag}.{field}=…"
        )
  return None


def texts(name: str, argv: Sequence[str]) -> dict[str, str]:
  """The text of each field that a command line sets, by the field's path."""
  argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
  return {path[1]: text for path, text in _flags_like(rf"{name}\.([\w.]+)", argv)}


def overrides(name: str, argv: Sequence[str]) -> dict[str, object]:
  """The value of each field that a command line sets, by path; text unless it is a literal."""
  found = texts(name, argv)
  given: dict[str, object] = dict(found)
  for path, text in found.items():
    with contextlib.suppress(ValueError, SyntaxError):
      given[path] = ast.literal_eval(text)
  return given


def recipe_path(argv: Sequence[str]) -> str:
  """The path of the configuration file, as given on the command line or in a flag file."""
  argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
  return _file_flag(argv).partition("=")[2]


def open_task(config: ConfigDict, given: Mapping[str, object]) -> None:
  """Adds placeholders to `config.task.kwargs` for the keywords that a command line sets.

  If the command line chooses another task, the recipe's keywords are dropped.

  Args:
    config: the config of the recipe; changed in place.
    given: see `overrides`.
  Raises:
    ValueError: the task is unknown or does not take the keyword, or the command line sets a
      field of a keyword that has no value yet.
  """
  task, name = config.task, str(given.get("task.name", config.task.name))
  another = name != task.name
  paths = [path.split(".")[2:] for path in given if path.startswith("task.kwargs.")]
  missing = [keyword for keyword, *_ in paths if another or keyword not in task.kwargs]
  if not missing and not another:
    return
  from rlvr_jax.data import tasks  # here, so that other command lines do not wait for the import

  owner = f"config.task.name = {name!r}"
  factory = specs.find_factory(owner, tasks, specs.parse("config.task.name", name).name)
  specs.check_keywords(owner, name, factory, missing)
  for keyword, *inner in paths:
    if inner and keyword in missing:
      raise ValueError(
        f"config.task.kwargs.{keyword} has no field {inner[0]!r} yet; set it as a dict,"
        f' --config.task.kwargs.{keyword}="{{{inner[0]!r}: …}}"'
      )
  with config.unlocked():
    if another:
      task.kwargs = ConfigDict()
    for keyword in missing:
      task.kwargs[keyword] = placeholder(_type_of(factory, keyword))


def open_model(config: ConfigDict, given: Mapping[str, object]) -> None:
  """Adds placeholders to `config.model.overrides` for the fields that a command line sets.

  Recipes set the overrides as a dict, which has only the fields that the recipe sets.

  Args:
    config: the config of the recipe; changed in place.
    given: see `overrides`.
  Raises:
    ValueError: a network has no such field, or a command line cannot set it.
  """
  paths = [path.split(".")[2:] for path in given if path.startswith("model.overrides.")]
  listed = config.model.get("overrides")
  if not isinstance(listed, ConfigDict) or all(field in listed for field, *_ in paths):
    return
  if inner := [".".join(path) for path in paths if len(path) > 1]:
    raise ValueError(
      f"config.model.overrides.{inner[0]}: a command line can set a field of a network only as a"
      f" whole; set config.model.overrides.{inner[0].partition('.')[0]}"
    )
  missing = [field for field, *_ in paths if field not in listed]
  # Here, so that other command lines do not wait for the imports.
  from rlvr_jax.models.presets import check_overrides
  from rlvr_jax.models.transformer import TransformerConfig

  check_overrides(missing)
  annotations = {field.name: str(field.type) for field in dataclasses.fields(TransformerConfig)}
  with config.unlocked():
    for field in missing:
      kind = _TYPES.get(re.split(r"\[| \|", annotations[field])[0])
      if kind is None:
        raise ValueError(
          f"config.model.overrides.{field} is a {annotations[field]}, which a command line cannot"
          " set; set it in the recipe"
        )
      listed[field] = placeholder(kind)


def _type_of(factory: Callable[..., object], keyword: str) -> type:
  """The type of a keyword, from its default or else its annotation; object if it has neither."""
  parameter = inspect.signature(factory).parameters.get(keyword)
  if parameter is None:  # the factory takes the keyword by **kwargs
    return object
  if parameter.default is not parameter.empty and parameter.default is not None:
    return _TYPES.get(type(parameter.default).__name__, object)
  annotation = parameter.annotation
  text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
  return _TYPES.get(text.split(" | ")[0], object)
