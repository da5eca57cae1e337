"""What docs/your_method.md tells one to write and to run."""

import importlib

import pytest
from train import tiny

from docs import snippets
from rlvr_jax.train.setup.build import build

PAGE = snippets.page("your_method.md")


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
  yield from snippets.in_folder(PAGE, tmp_path, monkeypatch)


def test_its_tests_pass_and_its_configuration_builds(folder):
  module = importlib.import_module("my_method_test")
  tests = [value for name, value in vars(module).items() if name.startswith("test_")]
  for test in tests:
    test()
  config = importlib.import_module("my_run").get_config().lock()
  assert len(tests) == 3 and build(config).method.loss.statistics is None
  for field, wrong in {
    "loss": "my_method:tempered(tau=2.0)",
    "advantage": "my_method:power",
  }.items():
    with pytest.raises(ValueError, match=r"tau = 2\.0 is not a number|has no function 'power'"):
      build(tiny.config(**{field: wrong}))


@pytest.mark.slow
def test_the_commands_train_and_compare(folder, capfd):
  tested, trained, swept, compared = PAGE.commands
  snippets.run(tested, "-q", "-p", "no:cacheprovider")
  few = ("--config.num_updates=2", "--config.warm_start.num_steps=2")
  snippets.run(trained, *few)
  snippets.run(swept, *few)
  capfd.readouterr()
  snippets.run(compared)
  table = capfd.readouterr().out
  assert "| GRPO" in table and "| mine" in table and "| 3 " in table
