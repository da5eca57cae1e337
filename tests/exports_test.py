"""What packages export: each has a docstring and a list, and what is on it is typed."""

import importlib
import inspect
import pathlib
import pkgutil
import types

import pytest

import rlvr_jax
from rlvr_jax import parts

PACKAGES = ["rlvr_jax"] + sorted(
  found.name
  for found in pkgutil.walk_packages(rlvr_jax.__path__, "rlvr_jax.")
  # Plug-ins need their frameworks; tests/integrations has this test for them.
  if found.ispkg and not found.name.startswith(("rlvr_jax.configs", "rlvr_jax.integrations"))
)


def exported(package):
  """Name → what a package, or a module, exports by it."""
  module = importlib.import_module(package)
  found = {}
  for name in module.__all__:
    known = vars(module).get(name)
    found[name] = importlib.import_module(f"{package}.{name}") if known is None else known
  return found


def untyped(function):
  """Parameters without an annotation, and "return"."""
  signature = inspect.signature(function)
  names = [n for n, p in signature.parameters.items() if p.annotation is p.empty]
  return names + (["return"] if signature.return_annotation is signature.empty else [])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_and_what_it_exports(package):
  assert importlib.import_module(package).__doc__
  found = exported(package)
  assert found and len(found) == len(importlib.import_module(package).__all__)
  assert not [name for name, value in found.items() if not inspect.getdoc(value)]
  functions = {n: v for n, v in found.items() if isinstance(v, types.FunctionType)}
  missing = {name: untyped(value) for name, value in functions.items() if untyped(value)}
  assert not missing, f"annotate these parameters and results in their def: {missing}"


def test_every_module_is_found_and_has_what_others_import():
  for found in pkgutil.walk_packages(rlvr_jax.__path__, "rlvr_jax."):
    if "integrations" not in found.name and not found.name.endswith(("__main__", "system_calls")):
      importlib.import_module(found.name)


def test_parts_are_typed_with_a_docstring_that_names_every_argument():
  for name, function in exported(parts.__name__).items():
    missing = untyped(function)
    assert not missing, f"annotate these parameters and results of {name}: {missing}"
    if function.__module__ == parts.__name__:
      named = [n for n in inspect.signature(function).parameters if n not in function.__doc__]
      assert not named, name


def test_editors_are_told_that_it_is_typed():
  assert (pathlib.Path(rlvr_jax.__file__).parent / "py.typed").exists()
  assert len(PACKAGES) > 10 and rlvr_jax.__version__.count(".") == 2
