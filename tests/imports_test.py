"""Enforces the design: who may import whom, and how long files and functions may be."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

import rlvr_jax

PACKAGE = pathlib.Path(rlvr_jax.__file__).parent
ROOT = pathlib.Path(__file__).parents[1]
STAGES = {"advantages", "reweighting", "geometry", "losses"}
LEAVES = {"types", "files", "specs", "sampling", "bucket", "segments", "storage"}
BELOW_THE_LOOP = LEAVES | {"ops", "models", "data", "rewards", "rollouts"} | STAGES

# What an update computes; stricter than the rest of train.
STEP = ("step", "accumulate", "objective")

# Room → rooms it may import, itself apart.
ALLOWED = {
  "": set(),  # rlvr_jax/__init__.py
  **{leaf: set() for leaf in LEAVES},
  "types": {"sampling"},
  "segments": {"bucket"},
  "storage": {"files", "bucket", "segments"},
  "ops": {"types"},
  **{stage: {"types", "ops"} for stage in STAGES},
  "parts": {"types", "ops"} | STAGES,
  "models": {"types", "ops", "files"},
  "data": LEAVES,
  "codejudge": set(),
  "rewards": {"specs", "codejudge"},
  "rollouts": {"types", "ops", "files", "bucket", "storage", "data", "rewards"},
  "update.step": {"types", "ops"},
  "evaluate": BELOW_THE_LOOP,
  "train": BELOW_THE_LOOP | {"codejudge", "evaluate", "update.step"},
  "commands": BELOW_THE_LOOP | {"evaluate", "train", "update.step"},
  # What notebooks call; nothing imports it.
  "colab": BELOW_THE_LOOP | {"parts", "evaluate", "train", "update.step", "commands", "configs"},
  "launch": set(),
  "integrations": {"types", "ops"} | STAGES,  # other frameworks' plug-ins; nothing imports them
  "main": {"commands", "train"},
  "console": set(),
}
JAX = {"jax", "jaxlib", "chex", "flax", "optax", "orbax"}
NNX = {"Module", "Param", "Rngs", "split", "merge", "to_pure_dict"}
MAX_FILE_LINES = 400
MAX_LINES_OF = {"train/loop.py": 300, "update/step.py": 150}  # what a newcomer reads first
MAX_FUNCTION_LINES = 60
# Functions that may be longer; each says why in a comment that starts with LONG.
LONG = "# Over 60 lines: "
LONG_FUNCTIONS = {
  "configs/base.py: get_config",
  "rlvr_jax/advantages/fade.py: fade",
  "rlvr_jax/data/jsonl.py: jsonl",
  "rlvr_jax/data/published/from_files.py: published",
  "rlvr_jax/data/reasoning_gym.py: reasoning_gym",
  "rlvr_jax/data/tour.py: tour",
  "rlvr_jax/geometry/diagnostics.py: diagnose",
  "rlvr_jax/reweighting/salt.py: salt",
}
STANDARD_LIBRARY_ONLY = {"codejudge", "launch"}
NEVER = {"configs", "experiments", "colabs", "tests", "tensorflow", "torch"}


def imported_names(tree, module, is_package):
  """Dotted names a module imports, relative ones resolved; `from a import b` gives a and a.b."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        base = ".".join(parts + ([base] if base else []))
      yield base
      yield from (f"{base}.{alias.name}" for alias in node.names)


def room(name):
  """The room of a dotted name in rlvr_jax; "" for the package itself."""
  parts = name.split(".")[1:]
  is_step = parts[:1] == ["train"] and parts[1:2] and parts[1] in STEP
  return "update.step" if is_step else (parts or [""])[0]


def modules(root):
  """(dotted name, syntax tree, names it imports) of all under `root`, laid out as rlvr_jax."""
  for path in sorted(root.rglob("*.py")):
    relative = path.relative_to(root).with_suffix("")
    is_package = relative.name == "__init__"
    module = ".".join(("rlvr_jax", *(relative.parts[:-1] if is_package else relative.parts)))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield module, tree, set(imported_names(tree, module, is_package))


def imported_rooms(root):
  """Room → the other rooms that its modules import."""
  graph = {}
  for module, _, names in modules(root):
    here = graph.setdefault(room(module), set())
    here |= {room(name) for name in names if name.split(".")[0] == "rlvr_jax"}
  return {here: there - {here, ""} for here, there in graph.items()}


def cycle(graph):
  """Rooms that import one another in a circle, if there are any; [] if not."""
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    return error.args[1]
  return []


def violations(root):
  """What breaks the table under `root`, a folder laid out as the package rlvr_jax."""
  found = []
  for module, tree, names in modules(root):
    here = room(module)
    if here not in ALLOWED:
      found.append(f"{module} is in no room of the design")
      continue
    for name in sorted(names):
      top = name.split(".")[0]
      there = room(name)
      if here == "" and top != "__future__":
        found.append(f"{module} imports {name}")
      elif top == "rlvr_jax" and there and there != here and there not in ALLOWED[here]:
        found.append(f"{module} imports {name}")
      elif top in NEVER:
        found.append(f"{module} imports {name}")
      elif here in STANDARD_LIBRARY_ONLY and top not in {"rlvr_jax", *sys.stdlib_module_names}:
        found.append(f"{module} imports {name}: {here} has the standard library only")
      elif here == "rewards" and top in JAX:
        found.append(f"{module} imports {name}: grading workers never load jax")
      elif top == "flax" and here not in ("models", "integrations"):
        found.append(f"{module} imports {name}: flax stays in models")
    for node in ast.walk(tree):
      is_nnx = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
      if is_nnx and node.value.id == "nnx" and node.attr not in NNX:
        found.append(f"{module} uses nnx.{node.attr}")
  return found


def test_imports_keep_to_the_table():
  assert violations(PACKAGE) == []


def test_no_rooms_import_one_another_in_a_circle():
  assert cycle(ALLOWED) == []
  assert cycle(imported_rooms(PACKAGE)) == []


def test_a_circle_is_seen(tmp_path):
  for path, code in {
    "train/loop.py": "from rlvr_jax.evaluate import curves",
    "evaluate/curves.py": "def f():\n  from ..files import names",
    "files.py": "import rlvr_jax.train.loop",
  }.items():
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(code)
  assert set(cycle(imported_rooms(tmp_path))) == {"train", "evaluate", "files"}
  (tmp_path / "files.py").write_text("import rlvr_jax")
  assert cycle(imported_rooms(tmp_path)) == []


@pytest.mark.parametrize(
  ("path", "code", "reported"),
  [
    ("__init__.py", "import os", "imports os"),
    ("files.py", "from rlvr_jax.types import Array", "imports rlvr_jax.types"),
    ("ops/a.py", "from rlvr_jax.losses import b", "imports rlvr_jax.losses"),
    ("ops/a.py", "from rlvr_jax import losses", "imports rlvr_jax.losses"),
    ("ops/a.py", "from ..losses import b", "imports rlvr_jax.losses"),
    ("ops/__init__.py", "from .. import losses", "imports rlvr_jax.losses"),
    ("losses/a.py", "def f():\n  import rlvr_jax.advantages.grpo", "imports rlvr_jax.advantages"),
    ("rewards/a.py", "import jax.numpy as jnp", "never load jax"),
    ("rewards/a.py", "from rlvr_jax.types import Array", "imports rlvr_jax.types"),
    ("codejudge/a.py", "import numpy", "codejudge has the standard library only"),
    ("codejudge/harness/a.py", "import absl.flags", "codejudge has the standard library only"),
    ("codejudge/a.py", "from .. import files", "imports rlvr_jax.storage.files"),
    ("launch/a.py", "import absl.flags", "launch has the standard library only"),
    ("launch/a.py", "from rlvr_jax.storage.files import located", "imports rlvr_jax.storage.files"),
    ("train/loop.py", "from rlvr_jax.launch import local", "imports rlvr_jax.launch"),
    ("codejudge/harness/a.py", "from ...rewards import outcome", "imports rlvr_jax.rewards"),
    ("evaluate/a.py", "from rlvr_jax.codejudge import cgroups", "imports rlvr_jax.codejudge"),
    ("update/step.py", "from rlvr_jax.train import optimizer", "imports rlvr_jax.update.optimizer"),
    ("update/accumulate.py", "from rlvr_jax.train import sharding", "imports rlvr_jax.train"),
    ("update/objective.py", "from rlvr_jax import losses", "imports rlvr_jax.losses"),
    ("train/loop.py", "from flax import nnx", "flax stays in models"),
    ("train/loop.py", "import configs.base", "imports configs.base"),
    ("train/loop.py", "from rlvr_jax.configs import base", "imports rlvr_jax.configs"),
    ("train/loop.py", "import rlvr_jax.main", "imports rlvr_jax.main"),
    ("losses/a.py", "from rlvr_jax.integrations import tunix", "imports rlvr_jax.integrations"),
    ("integrations/a.py", "from rlvr_jax.train import loop", "imports rlvr_jax.train"),
    ("train/loop.py", "from rlvr_jax.commands import fits", "imports rlvr_jax.commands"),
    ("commands/a.py", "from rlvr_jax.colab import display", "imports rlvr_jax.colab"),
    ("evaluate/a.py", "from rlvr_jax.train import metrics", "imports rlvr_jax.train"),
    ("models/a.py", "from flax import nnx\nnnx.jit(f)", "uses nnx.jit"),
    ("tricks/a.py", "", "in no room"),
  ],
)
def test_the_checker_sees_a_violation(tmp_path, path, code, reported):
  file = tmp_path / path
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(code)
  found = violations(tmp_path)
  assert found and any(reported in line for line in found), found


@pytest.mark.parametrize(
  ("path", "code"),
  [
    ("ops/a.py", "import jax\nfrom rlvr_jax.types import Array\nfrom . import b"),
    ("train/loop.py", "from rlvr_jax.update.step import train_step\nfrom rlvr_jax import evaluate"),
    ("update/step.py", "from rlvr_jax.update.accumulate import update_gradient"),
    ("models/a.py", "from flax import nnx\nclass A(nnx.Module): pass"),
    ("integrations/a.py", "import tunix\nfrom flax import nnx\nfrom rlvr_jax import losses"),
    ("rollouts/a.py", "from rlvr_jax import files"),
    ("launch/a.py", "import json\nfrom rlvr_jax.launch import local"),
    ("codejudge/a.py", "import json\nfrom . import cgroups\nfrom .harness import messages"),
    ("rewards/a.py", "from rlvr_jax.codejudge import sandbox"),
    (
      "colab/a.py",
      "from rlvr_jax.commands.train import train\nfrom rlvr_jax.evaluate import curves",
    ),
    ("main.py", "from rlvr_jax.train import loop"),
  ],
)
def test_the_checker_allows_what_is_allowed(tmp_path, path, code):
  file = tmp_path / path
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(code)
  assert violations(tmp_path) == []


def test_rewards_do_not_load_jax_through_others():
  names = [
    ".".join(("rlvr_jax", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted((PACKAGE / "rewards").glob("*.py"))
    if path.stem not in ("__init__", "__main__")
  ]
  code = (
    "import importlib, sys\n"
    f"for name in {['rlvr_jax.rewards', *names]!r}: importlib.import_module(name)\n"
    f"print(sorted({JAX!r} & sys.modules.keys()))"
  )
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == "[]"


def test_a_configuration_and_its_mistakes_are_read_without_jax():
  """So that --help and a misspelled field answer immediately."""
  code = (
    "import sys, rlvr_jax.main\n"
    "from rlvr_jax.configs import quickstart\n"
    "quickstart.get_config()\n"
    f"print(sorted({JAX!r} & sys.modules.keys()))"
  )
  result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == "[]"


def long_functions(path):
  """(name, whether it says why) of the functions in a file with more lines than are allowed."""
  text = path.read_text(encoding="utf-8")
  lines = text.splitlines()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      own = lines[node.lineno - 1 : node.end_lineno]
      if len(own) > MAX_FUNCTION_LINES:
        yield node.name, any(line.strip().startswith(LONG) for line in own)


def test_files_of_the_package_are_short():
  lengths = {
    path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines())
    for path in PACKAGE.rglob("*.py")
  }
  limits = dict.fromkeys(lengths, MAX_FILE_LINES) | MAX_LINES_OF
  assert {path: n for path, n in lengths.items() if n > limits[path]} == {}


def test_long_functions_are_listed_and_say_why():
  found = {
    f"{path.relative_to(ROOT)}: {name}": says_why
    for folder in ("rlvr_jax", "configs", "experiments")
    for path in (ROOT / folder).rglob("*.py")
    for name, says_why in long_functions(path)
  }
  assert found == dict.fromkeys(LONG_FUNCTIONS, True), (
    f"Shorten {sorted(set(found) - LONG_FUNCTIONS)} to {MAX_FUNCTION_LINES} lines, or say why not"
    f" in a comment that starts with {LONG!r} and add it to LONG_FUNCTIONS. Remove from there"
    f" {sorted(LONG_FUNCTIONS - set(found))}."
  )


def test_a_long_function_is_seen(tmp_path):
  path = tmp_path / "a.py"
  body = [f"    x{i} = {i}" for i in range(MAX_FUNCTION_LINES - 1)]
  path.write_text("\n".join(["class A:", "  def fits(self):", *body]))
  assert list(long_functions(path)) == []
  path.write_text("\n".join(["class A:", "  async def long(self):", "    y = 0", *body]))
  assert list(long_functions(path)) == [("long", False)]
  path.write_text("\n".join(["class A:", "  def long(self):", f"    {LONG}a table.", *body]))
  assert list(long_functions(path)) == [("long", True)]
