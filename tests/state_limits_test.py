"""Enforces the design: how much state a class has, who changes it, and how large a room is."""

import ast
import functools
import pathlib

import pytest

import rlvr_jax

PACKAGE = pathlib.Path(rlvr_jax.__file__).parent
MAX_ATTRIBUTES = 8
MAX_FILES = 12
# Collections, such as ops, data, losses or configs, may have any number of files, and rollouts:
# each of its files is one idea.
ROOMS = ("update", "storage", "costs", "commands", "train")
# Classes with more attributes, and why.
LARGE = {
  "data/curriculum.py: CurriculumDraws": "estimates and visits of cells, and what was observed",
  "data/huggingface_tokenizer.py: HuggingFaceTokenizer": "constants of the loaded tokenizer",
}
# Objects of libraries, of the standard library and of the sandbox's own syntax trees, which take
# their settings as attributes; configurations; and a module's hook.
OUTSIDE = {
  "codejudge/harness/judge.py": {"node", "test", "elements"},
  "codejudge/harness/processes.py": {"raw"},
  "codejudge/harness/system_calls.py": {"library"},
  "colab": {"c"},
  "costs/programs.py": {"config"},
  "data/byte_pairs.py": {"tokenizer", "parser"},
  "data/huggingface_tokenizer.py": {"self._tokenizer"},
  "integrations/tunix/salt.py": {"trunk"},
  "models/gguf.py": {"tokenizer", "parser"},
  "ops/precision.py": {"traced"},
  "train/checkpointing/checkpoint_files.py": {"sys"},
  "train/setup/config_file.py": {"config", "task", "values['config']"},
}
THREAD_SETTINGS = {"daemon"}


def is_frozen(node):
  """Whether instances cannot change, or belong to flax or to an exception."""
  decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
  bases = [ast.unparse(base) for base in node.bases]
  frozen = any("frozen=True" in decorator for decorator in decorators)
  return frozen or any(
    name in base for base in bases for name in ("NamedTuple", "Module", "Error", "Exception")
  )


def attributes(node):
  """Names that methods of a class set on `self`, and the fields of a dataclass."""
  names = {
    child.attr
    for child in ast.walk(node)
    if isinstance(child, ast.Attribute)
    and isinstance(child.ctx, ast.Store)
    and isinstance(child.value, ast.Name)
    and child.value.id == "self"
  }
  if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
    names |= {child.target.id for child in node.body if isinstance(child, ast.AnnAssign)}
  return names


@functools.cache
def trees(root):
  """Place of a file below the root → its syntax tree."""
  return {
    path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in root.rglob("*.py")
  }


def large_classes(root):
  """Classes that change after they are made and have too many attributes, as in `LARGE`."""
  return {
    f"{file}: {node.name}"
    for file, tree in trees(root).items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
    and not is_frozen(node)
    and len(attributes(node)) > MAX_ATTRIBUTES
  }


def set_from_outside(root):
  """Assignments to attributes of anything but `self` or `cls`, those in `OUTSIDE` left out."""
  found = []
  for file, tree in trees(root).items():
    allowed = {n for place, names in OUTSIDE.items() if file.startswith(place) for n in names}
    for node in ast.walk(tree):
      if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        owner = ast.unparse(node.value)
        root_name = owner.partition(".")[0]
        if owner in ("self", "cls") or node.attr in THREAD_SETTINGS:
          continue
        if owner not in allowed and root_name not in allowed:
          found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
  return found


def sizes(root):
  """Room → number of its files, `__init__.py` aside; the rooms within train are rooms."""
  folders = [root / name for name in ROOMS]
  folders += [path for path in (root / "train").iterdir() if path.is_dir()]
  return {
    folder.relative_to(root).as_posix(): len([*folder.glob("[!_]*.py")])
    for folder in folders
    if folder.is_dir()
  }


def test_classes_have_few_attributes():
  found = large_classes(PACKAGE)
  assert found == set(LARGE), (
    f"at most {MAX_ATTRIBUTES} attributes in a class that changes after it is made: group the"
    " constants in a frozen record, or move a part of the state into a class of its own"
  )


def test_no_attribute_is_set_from_outside_its_class():
  assert set_from_outside(PACKAGE) == [], "give the class a method that says what happens"


def test_rooms_are_small():
  assert {room: size for room, size in sizes(PACKAGE).items() if size > MAX_FILES} == {}


@pytest.mark.parametrize(
  ("code", "large", "outside"),
  [
    ("class A:\n  def f(self):\n    " + "; ".join(f"self.x{i} = 0" for i in range(9)), True, 0),
    ("class A:\n  def f(self):\n    " + "; ".join(f"self.x{i} = 0" for i in range(8)), False, 0),
    ("@dataclass\nclass A:\n" + "".join(f"  x{i}: int\n" for i in range(9)), True, 0),
    ("@dataclass(frozen=True)\nclass A:\n" + "".join(f"  x{i}: int\n" for i in range(9)), False, 0),
    ("class A(NamedTuple):\n" + "".join(f"  x{i}: int\n" for i in range(9)), False, 0),
    ("def f(a):\n  a.b = 1", False, 1),
    ("def f(a):\n  a.b.c += 1\n  del a.b", False, 2),
    ("def f(timer):\n  timer.daemon = True", False, 0),
  ],
)
def test_what_is_wrong_is_seen(tmp_path, code, large, outside):
  (tmp_path / "a.py").write_text(code)
  assert bool(large_classes(tmp_path)) == large
  assert len(set_from_outside(tmp_path)) == outside
