"""What the source of the host half says: assertions, signatures, lines, and who imports whom."""

import ast
import functools

import imports_test

HOST = (
  "rollouts", "train", "workers", "rewards", "environments", "fleet", "storage", "data"
)  # fmt: skip
SERVICES = ("storage", "train/cluster", "train/reporting")  # folders
WHOLES = {  # what a parameter is called or annotated as that holds the whole
  "parts": lambda name, kind: kind in ("Parts", "Run"),
  "configuration": lambda name, kind: name == "config" and kind.endswith("ConfigDict"),
}


def is_host(file):
  """Whether a file below the package belongs to the host half."""
  return file.partition("/")[0] in HOST


def is_service(file):
  """Whether a reader knows by its name what a file below the package does for the run."""
  return file.rpartition("/")[0] in SERVICES


def trees(package):
  """(file below the package, its lines, syntax tree) of the host half."""
  for path in sorted(package.rglob("*.py")):
    file = path.relative_to(package).as_posix()
    if is_host(file):
      text = path.read_text(encoding="utf-8")
      yield file, text.count("\n"), ast.parse(text)


def assertions(tree):
  """Assertions that something is not None."""
  return sum(
    isinstance(node, ast.Assert)
    and any(
      isinstance(part, ast.Compare) and any(isinstance(op, ast.IsNot) for op in part.ops)
      for part in ast.walk(node.test)
    )
    for node in ast.walk(tree)
  )


def signatures(tree, whole):
  """Functions with a parameter that holds the whole of something, of `WHOLES`."""
  return sum(
    any(
      whole(argument.arg, ast.unparse(argument.annotation))
      for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
      if argument.annotation is not None
    )
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
  )


def room(module):
  """The room of a dotted name of the host half: a folder; "" for what is in no such folder."""
  parts = module.split(".")[1:]
  if not parts or parts[0] not in HOST:
    return ""
  return ".".join(parts[:2]) if len(parts) > 2 and parts[0] == "train" else parts[0]


def arrows(package):
  """Room → the other rooms of the host half that its files import."""
  graph = {}
  for module, _, names in imports_test.modules(package):
    if here := room(module):
      found = {room(name) for name in names if name.startswith("rlvr_jax.")} - {here, "", "train"}
      graph.setdefault(here, set()).update(found)
  graph.pop("train", None)  # its __init__, which is empty
  return graph


def floors(graph):
  """The number of rooms in the longest chain of rooms that import one another."""

  @functools.cache
  def height(here):
    return 1 + max(map(height, graph.get(here, ())), default=0)

  return max(map(height, graph), default=0)


def table(package, readings):
  """The figures as a table in Markdown.

  Args:
    package: folder of the package.
    readings: variant → its `Reading`.
  """
  rows = []
  plain = readings.get("plain")
  for variant, reading in readings.items():
    more = len(set(reading.host) - set(plain.host)) if plain and reading is not plain else None
    rows += [
      (f"{variant}: files of the host half", len(reading.host)),
      *([(f"{variant}: of these not in plain", more)] if more is not None else []),
      (f"{variant}: of these services", sum(map(is_service, reading.host))),
      (f"{variant}: files that a reader follows", len(reading.followed)),
      (f"{variant}: returns into files of the host half", len(reading.returns)),
      (f"{variant}: of these that lead on", len(reading.passing)),
      (f"{variant}: files of the numeric half", len(reading.numeric)),
    ]
  host = list(trees(package))
  rows.append(("assertions that something is not None", sum(assertions(t) for *_, t in host)))
  for name, whole in WHOLES.items():
    rows.append((f"signatures with all of the {name}", sum(signatures(t, whole) for *_, t in host)))
  graph = arrows(package)
  of_train = {
    here: {there for there in found if there.startswith("train.")}
    for here, found in graph.items()
    if here.startswith("train.")
  }
  for name, rooms in (("the host half", graph), ("train", of_train)):
    count = sum(map(len, rooms.values()))
    rows.append((f"{name}: rooms / floors / arrows", f"{len(rooms)} / {floors(rooms)} / {count}"))
  lines = {}
  for file, count, _ in host:
    here = (
      file.rpartition("/")[0].replace("/", ".")
      if file.startswith("train/")
      else file.partition("/")[0]
    )
    lines[here] = lines.get(here, 0) + count
  rows += [(f"lines of {here}", count) for here, count in sorted(lines.items())]
  rows.append(("lines of the host half", sum(lines.values())))
  return "\n".join(["| what | figure |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])
