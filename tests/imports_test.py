"""Enforces the design: who may import whom, and that no files or rooms do so in a circle."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

import rlvr_jax

PACKAGE = pathlib.Path(rlvr_jax.__file__).parent
STAGES = {"advantages", "reweighting", "geometry", "losses", "distillation"}  # none imports another
# Checks of arguments need the standard library only, so that any room may use them.
PURE = {"types", "ops", "ops.checks"}
LEAVES = ("specs", "sampling", "storage", "codejudge", "launch", "console")
BELOW_THE_LOOP = {
  "specs",
  "sampling",
  "storage",
  "models",
  "data",
  "workers",
  "rewards",
  "environments",
} | PURE
BELOW_THE_LOOP |= {"rollouts", "fleet", "update", "corrections"} | STAGES

# The rooms of train, the lowest first: each may import those before it, and the loop all of them.
TRAIN = ("cluster", "reporting", "checkpointing", "setup", "start", "generation", "fleet")
BELOW_TRAIN = BELOW_THE_LOOP | {"evaluate", "codejudge", "update.diagnostics"}

# Room → rooms it may import, itself apart.
ALLOWED = {
  "": set(),  # rlvr_jax/__init__.py
  **{leaf: set() for leaf in LEAVES},
  "types": {"sampling"},
  "ops.checks": set(),
  "ops": {"types", "sampling", "ops.checks"},
  **{stage: PURE for stage in STAGES},
  "corrections": {"losses"} | PURE,  # a loss made of another
  "update": PURE,
  "update.diagnostics": {"geometry", "update"} | PURE,
  "parts": PURE | STAGES | {"corrections"},
  "models": {"storage"} | PURE,
  "data": {"types", "specs", "storage", "ops.checks"},
  "workers": {"ops.checks"},
  "environments": {"specs", "workers", "codejudge", "ops.checks"},
  "rewards": {"specs", "workers", "codejudge", "ops.checks"},
  "rollouts": {"storage", "data", "workers", "rewards", "environments"} | PURE,
  "fleet": {"types", "data", "storage", "rollouts"},
  "evaluate": BELOW_THE_LOOP - {"update", "fleet"},
  **{
    f"train.{name}": BELOW_TRAIN | {f"train.{lower}" for lower in TRAIN[:index]}
    for index, name in enumerate(TRAIN)
  },
  "train": BELOW_TRAIN | {f"train.{name}" for name in TRAIN},
  "costs": BELOW_THE_LOOP | {"train.cluster", "train.reporting", "train.setup"},
  "view": BELOW_TRAIN | {"train.checkpointing", "train.reporting", "train.setup"},
  "commands": BELOW_TRAIN | {"costs", "view", "train", *(f"train.{name}" for name in TRAIN)},
  # What notebooks call; nothing imports it.
  "colab": BELOW_TRAIN
  | {"parts", "view", "train", "configs", *(f"train.{name}" for name in TRAIN)},
  "integrations": PURE
  | STAGES
  | {"corrections"},  # other frameworks' plug-ins; nothing imports them
  "main": {"commands", "train.cluster", "train.setup"},
}
JAX = {"jax", "jaxlib", "chex", "flax", "optax", "orbax"}
NNX = {"Module", "Param", "Rngs", "split", "merge", "to_pure_dict"}
STANDARD_LIBRARY_ONLY = {"codejudge", "launch", "workers"}
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
  own = ".".join(parts[:2])
  return own if own in ALLOWED else (parts or [""])[0]


@functools.cache
def parse(text, module, is_package):
  """(syntax tree, names it imports) of a text; several tests read the package."""
  tree = ast.parse(text)
  return tree, frozenset(imported_names(tree, module, is_package))


def modules(root):
  """(dotted name, syntax tree, names it imports) of all under `root`, laid out as rlvr_jax."""
  for path in sorted(root.rglob("*.py")):
    relative = path.relative_to(root).with_suffix("")
    is_package = relative.name == "__init__"
    module = ".".join(("rlvr_jax", *(relative.parts[:-1] if is_package else relative.parts)))
    yield module, *parse(path.read_text(encoding="utf-8"), module, is_package)


def imported_rooms(root):
  """Room → the other rooms that its modules import."""
  graph = {}
  for module, _, names in modules(root):
    here = graph.setdefault(room(module), set())
    here |= {room(name) for name in names if name.split(".")[0] == "rlvr_jax"}
  return {here: there - {here, ""} for here, there in graph.items()}


def imported_files(root):
  """File → the other files that it imports, wherever in its code; packages are not counted."""
  found = {module: names for module, _, names in modules(root)}
  packages = {module.rpartition(".")[0] for module in found}
  return {
    module: (names & found.keys()) - packages - {module}
    for module, names in found.items()
    if module not in packages
  }


def cycle(graph):
  """Nodes that import one another in a circle, if there are any; [] if not."""
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
      elif here in ("rewards", "environments") and top in JAX:
        found.append(f"{module} imports {name}: workers never load jax")
      elif top == "flax" and here not in ("models", "integrations"):
        found.append(f"{module} imports {name}: flax stays in models")
    for node in ast.walk(tree) if any("nnx" in name for name in names) else ():
      is_nnx = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
      if is_nnx and node.value.id == "nnx" and node.attr not in NNX:
        found.append(f"{module} uses nnx.{node.attr}")
  return found


def test_imports_keep_to_the_table():
  assert violations(PACKAGE) == []


def test_no_rooms_import_one_another_in_a_circle():
  assert cycle(ALLOWED) == []
  assert cycle(imported_rooms(PACKAGE)) == []


def test_no_files_import_one_another_in_a_circle():
  assert cycle(imported_files(PACKAGE)) == []


def test_a_circle_is_seen(tmp_path):
  for path, code in {
    "train/loop.py": "from rlvr_jax.evaluate import curves",
    "evaluate/curves.py": "def f():\n  from ..specs import names",
    "specs.py": "import rlvr_jax.train.loop",
    "data/a.py": "from rlvr_jax.data import b",
    "data/b.py": "from rlvr_jax.data.a import c",
  }.items():
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(code)
  assert set(cycle(imported_rooms(tmp_path))) == {"train", "evaluate", "specs"}
  (tmp_path / "specs.py").write_text("import rlvr_jax")
  assert cycle(imported_rooms(tmp_path)) == []
  assert set(cycle(imported_files(tmp_path))) == {"rlvr_jax.data.a", "rlvr_jax.data.b"}
  (tmp_path / "data" / "b.py").write_text("c = 1")
  assert cycle(imported_files(tmp_path)) == []


@pytest.mark.parametrize(
  ("path", "code", "reported"),
  [
    ("__init__.py", "import os", "imports os"),
    ("ops/a.py", "from rlvr_jax import losses", "imports rlvr_jax.losses"),
    ("ops/__init__.py", "from .. import losses", "imports rlvr_jax.losses"),
    ("losses/a.py", "def f():\n  import rlvr_jax.advantages.grpo", "imports rlvr_jax.advantages"),
    ("rewards/a.py", "import jax.numpy as jnp", "never load jax"),
    ("rewards/a.py", "from rlvr_jax.types import Array", "imports rlvr_jax.types"),
    ("ops/checks.py", "from rlvr_jax.types import Array", "imports rlvr_jax.types"),
    ("codejudge/harness/a.py", "import absl.flags", "codejudge has the standard library only"),
    ("update/step.py", "from rlvr_jax.geometry import per_rollout", "imports rlvr_jax.geometry"),
    ("train/loop.py", "from flax import nnx", "flax stays in models"),
    ("train/loop.py", "import configs.base", "imports configs.base"),
    ("train/setup/a.py", "from rlvr_jax.train import loop", "imports rlvr_jax.train.loop"),
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


@pytest.mark.parametrize("room", ["rewards", "environments"])
def test_workers_do_not_load_jax_through_others(room):
  names = [
    ".".join(("rlvr_jax", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in sorted((PACKAGE / room).glob("*.py"))
    if path.stem not in ("__init__", "__main__")
  ]
  code = (
    "import importlib, sys\n"
    f"for name in {[f'rlvr_jax.{room}', *names]!r}: importlib.import_module(name)\n"
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
