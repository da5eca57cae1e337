"""The texts in the code of the package."""

import ast
import functools
import pathlib

PACKAGE = pathlib.Path(__file__).parents[2] / "rlvr_jax"


@functools.cache
def texts():
  """All strings of the package, each f-string as one, with {} for its values."""
  found = []
  for path in sorted(PACKAGE.rglob("*.py")):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    parts = {id(v) for node in nodes if isinstance(node, ast.JoinedStr) for v in node.values}
    for node in nodes:
      if isinstance(node, ast.JoinedStr):
        found.append("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
        found.append(node.value)
  return tuple(found)
