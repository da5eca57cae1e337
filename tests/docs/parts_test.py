"""The loop of docs/parts.md learns, with the versions that are installed."""

import runpy

import pytest

from docs import snippets

PAGE = snippets.page("parts.md")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PAGE.files))
def test_a_loop_of_ones_own_learns(name, tmp_path, monkeypatch, capsys):
  (tmp_path / name).write_text(PAGE.files[name])
  found = runpy.run_path(str(tmp_path / name))
  assert found["rewards"].mean() > 0.8  # at random: 1 in 6
  assert capsys.readouterr().out.startswith("reward ")


def test_the_commands_are_those_of_the_files():
  assert PAGE.commands == [f"python {name}" for name in PAGE.files]
