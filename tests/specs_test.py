"""Strings that name components: how they are read and refused, and that nothing is evaluated."""

import sys
import types

import pytest

from rlvr_jax import specs
from rlvr_jax.specs import Spec


def scale(*, by: float = 2.0, seed: int, text: str = "") -> tuple:
  return by, seed, text


def bare() -> tuple:
  return ()


def anything(**given) -> tuple:
  return tuple(given.items())


def raising(*, by: int = 1) -> tuple:
  raise ValueError(f"by = {by} is odd")


PACKAGE = types.SimpleNamespace(
  __all__=["scale", "bare", "raising"], scale=scale, bare=bare, raising=raising, hidden=bare
)


def make(text, kind=tuple, **of_run):
  return specs.make("config.thing", PACKAGE, text, kind, **({"seed": 7} | of_run))


@pytest.mark.parametrize(
  ("text", "spec"),
  [
    ("fade", Spec("fade", {})),
    (" fade ( ) ", Spec("fade", {})),
    ("fade(alpha_max=3.0, delta_min=-1e-3)", Spec("fade", {"alpha_max": 3.0, "delta_min": -1e-3})),
    ("a(b='x(y)', c=None, d=(1, 'é'), e=True,)",
     Spec("a", {"b": "x(y)", "c": None, "d": (1, "é"), "e": True})),
    ("a(b='p:q')", Spec("a", {"b": "p:q"})),
    ("my.module:factory(x=[1, {'k': 2}])", Spec("my.module:factory", {"x": [1, {"k": 2}]})),
    ("a(\n  b=1,\n)", Spec("a", {"b": 1})),
  ],
)  # fmt: skip
def test_a_string_is_a_name_and_literals(text, spec):
  assert specs.parse("config.thing", text) == spec
  assert specs.parse("config.thing", str(spec)) == spec


def test_the_factory_gets_what_is_given_and_what_the_run_knows():
  assert make("scale") == make("scale()") == (2.0, 7, "")
  assert make("scale(by=3, text='x')", steps=5) == (3, 7, "x")
  assert make("bare") == ()
  assert make(f"{__name__}:scale(by=1)") == (1, 7, "")
  assert make(f"{__name__}:anything(by=1)") == (("by", 1),)
  assert specs.has_parameter("config.thing", PACKAGE, "scale(by=1)", "seed")
  assert not specs.has_parameter("config.thing", PACKAGE, "bare", "seed")


def test_a_module_of_the_current_directory(tmp_path, monkeypatch):
  (tmp_path / "of_the_user.py").write_text("def factory(*, x=1):\n  return (x,)\n")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
  assert make("of_the_user:factory(x=4)") == (4,)


def test_a_module_that_lacks_another_says_so_itself(tmp_path, monkeypatch):
  (tmp_path / "lacking.py").write_text("import no_such_library\n")
  monkeypatch.syspath_prepend(tmp_path)
  message = (
    r"^config\.thing = 'lacking:factory': importing lacking raised ModuleNotFoundError: No module"
    r" named 'no_such_library' \(.*lacking\.py, line 1\)$"
  )
  with pytest.raises(ValueError, match=message):
    make("lacking:factory")


def test_an_error_of_a_user_s_module_is_one_line_with_its_place(tmp_path, monkeypatch):
  (tmp_path / "broken.py").write_text("def (\n")
  (tmp_path / "careless.py").write_text("def factory():\n  return {}['two\\nlines']\n")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match=r"importing broken raised SyntaxError: .*broken\.py"):
    make("broken:factory")
  with pytest.raises(
    ValueError, match=r"factory raised KeyError: .*careless\.py, line 2\)"
  ) as error:
    make("careless:factory")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (
      "scael",
      r"^config\.thing = 'scael': 'scael' is unknown; did you mean 'scale'\? To",
    ),
    ("hidden", r"'hidden' is unknown; .*\['bare', 'raising', 'scale'\]"),
    ("", "is not a component: write name, name\\(keyword=value"),
    ("scale(", "is not a component"),
    (None, "config.thing = None is not a component"),
    ({"name": "scale"}, "is not a component"),
    ("scale(1)", "not a list of keyword=value; write name"),
    ("scale(by=x)", r"the value of by is not a literal \(is it by='x'\?\)"),
    ("scale(by=1, by=2)", "by is given twice"),
    ("scale(**{'by': 1})", r"\*\* is not a keyword"),
    ("scale(by=)", "invalid syntax|expected argument value"),  # by the version of Python
    ("scale(tex='')", r"scale takes no 'tex'; did you mean 'text'\? scale takes \['by'"),
    ("scale(zz=1)", r"scale takes no 'zz'; scale takes \['by', 'text'\]"),
    ("bare(by=1)", r"bare takes no 'by'; bare takes \[\]"),
    ("scale(seed=1)", "seed of scale comes from the run; leave it out"),
    ("raising(by=3)", r"^config\.thing = 'raising\(by=3\)': by = 3 is odd$"),
    (
      "no_such_module:f",
      "No module named 'no_such_module'; start the program in the folder of 'no_such_module'",
    ),
    ("os.:getcwd", "start the program in the folder of 'os', set PYTHONPATH"),
    ("specs_test:scael(by=1)", r"has no function 'scael'; did you mean 'scale'"),
    ("specs_test:PACKAGE", "has no function 'PACKAGE'"),
  ],
)
def test_what_is_refused_and_how_it_is_told(text, message):
  with pytest.raises(ValueError, match=message) as error:
    make(text)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("signature", ["(*, by=1)", "()", "(\n  *,\n  by=1,\n)"])
def test_a_file_of_the_package_that_is_not_exported(signature, tmp_path):
  (tmp_path / "mine.py").write_text(f"import os\n\n\ndef mine{signature}:\n  pass\n")
  (tmp_path / "helper.py").write_text("def helper(x, *, by=1):\n  pass\n")
  package = types.SimpleNamespace(__all__=["scale"], scale=scale, __path__=[str(tmp_path)])
  room = tmp_path.name
  with pytest.raises(ValueError) as told:
    specs.make("config.thing", package, "mine(by=2)", tuple)
  assert str(told.value) == (
    f"config.thing = 'mine(by=2)': 'mine' is unknown; {room}/mine.py exists but is not exported:"
    f" import mine in {room}/__init__.py and name it in __all__. To use your own, write"
    " my_module:function"
  )
  with pytest.raises(ValueError, match="'helper' is unknown; did you mean 'scale'"):
    specs.make("config.thing", package, "helper", tuple)


def test_a_factory_of_a_module_that_is_not_exported():
  module = types.ModuleType("rooms.things")
  exec("def mine(*, by=1): ...\n__all__ = []", vars(module))
  with pytest.raises(ValueError) as told:
    specs.make("config.thing", module, "mine(by=2)", tuple)
  assert str(told.value) == (
    "config.thing = 'mine(by=2)': 'mine' is unknown; things.py has it but does not export it: name"
    " mine in __all__ there. To use your own, write my_module:function"
  )


def positional(by, /, *args, text=""):
  return by, args, text


def test_no_keyword_is_suggested_that_would_be_refused():
  with pytest.raises(ValueError, match=r"takes no 'arg'; .* takes \['text'\]$"):
    make(f"{__name__}:positional(arg=1)")
  with pytest.raises(ValueError, match=r"takes no 'by'; .* takes \['text'\]$"):
    make(f"{__name__}:positional(by=1)")


def test_what_is_lacking_or_of_another_kind():
  with pytest.raises(ValueError, match=r"config\.thing = 'scale': scale needs a value of seed"):
    specs.make("config.thing", PACKAGE, "scale", tuple)
  with pytest.raises(ValueError, match=r"scale returned tuple, expected dict"):
    make("scale", kind=dict)


def plain(tokens):
  return (tokens,)


def test_a_component_in_place_of_its_factory():
  with pytest.raises(
    ValueError, match=r"plain needs a value of tokens; the name must be of a"
  ) as e:
    make(f"{__name__}:plain")
  assert str(e.value).endswith("parameters are hyper-parameters and which returns tuple")
  with pytest.raises(ValueError, match=r"needs a value of seed$"):  # a keyword: it is a factory
    specs.make("config.thing", PACKAGE, "scale", tuple)


@pytest.mark.parametrize(
  "text",
  [
    "scale(by=open({path!r}, 'w'))",
    "scale(by=__import__('os').mkdir({path!r}))",
    "scale(text=f'{{open({path!r}, \"w\")}}')",
    "scale(by=[open({path!r}, 'w') for _ in (1,)])",
    "scale(by=(lambda: open({path!r}, 'w'))())",
    "scale()(by=open({path!r}, 'w'))",
    "scale() or open({path!r}, 'w')",
    "scale();open({path!r}, 'w')",
    "__import__('os').mkdir({path!r})",
    "pathlib:Path({path!r}).touch()",
    "os:mkdir({path!r})",
    "scale(by=1)\nopen({path!r}, 'w')",
    "scale(by=\0)",
    "scale(by=10**10**10)",
    "scale(by=" + "(" * 5000 + ")" * 5000 + ")",
    "scale(by=" + "-" * 100_000 + "1)",
    "scale(by=" + "9" * 100_000 + ")",
    "scale" * 100_000 + "(",
  ],
)
def test_nothing_is_evaluated(text, tmp_path):
  path = tmp_path / "made"
  with pytest.raises(ValueError):
    make(text.replace("{path!r}", repr(str(path))).replace("{{", "{").replace("}}", "}"))
  assert not path.exists()


@pytest.mark.parametrize("name", ["evil-mod:f", "evil: f", "1evil:f", "évil:f", "a:b:c"])
def test_a_name_that_is_none_imports_nothing(name):
  assert list(specs.outside_package(name)) == []  # so that nobody was asked
  with pytest.raises(ValueError, match="is not of the form my_module:function"):
    specs.find_factory("config.thing", PACKAGE, name)
