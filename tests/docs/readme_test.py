"""README, first run and layout: lines of one recorded run, code that works, every room."""

import hashlib
import importlib
import json
import pathlib
import re

import pytest

from docs import snippets

ROOT = pathlib.Path(__file__).parents[2]
RECORD = ROOT / "experiments/quickstart/readme_run.json"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = [
  path.parent
  for path in (ROOT / "rlvr_jax").rglob("__init__.py")
  if len(path.relative_to(ROOT).parts) == 3 or path.parents[1].name == "train"
]


def lines_of_a_run(text):
  return re.findall(r"^    ((?:held-out after|step) .*?)(?: …)?$", text, re.MULTILINE)


@pytest.mark.parametrize("document", ["README.md", "docs/first_run.md"])
def test_the_lines_shown_are_of_the_recorded_run(document):
  """From the first evaluation to the last, in order."""
  printed = json.loads(RECORD.read_text())["printed"]
  shown = lines_of_a_run((ROOT / document).read_text(encoding="utf-8"))
  places = [next(i for i, p in enumerate(printed) if p.startswith(line)) for line in shown]
  assert places == sorted(set(places)) and len(places) == 3
  assert (places[0], places[-1]) == (0, len(printed) - 1)


def test_the_readme_shows_the_picture_and_the_commit_of_the_recorded_run():
  record = json.loads(RECORD.read_text())
  picture = ROOT / record["picture"]["path"]
  assert f"at commit {record['commit']}" in README
  assert hashlib.sha256(picture.read_bytes()).hexdigest() == record["picture"]["sha256"]
  assert f"]({record['picture']['path']})" in README


def test_the_readme_begins_with_commands_of_the_makefile():
  targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
  commands = re.findall(r"^    make ([\w-]+) ", README, re.MULTILINE)
  assert commands == ["quickstart", "test"] and set(commands) <= set(targets)


def test_the_configuration_in_the_readme_is_that_of_the_guide(tmp_path, monkeypatch):
  (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
  guide = snippets.page("your_data.md")
  with_readme = guide._replace(files={**guide.files, "from_readme.py": code})
  for _ in snippets.in_folder(with_readme, tmp_path, monkeypatch):
    configs = [importlib.import_module(name).get_config() for name in ("from_readme", "my_run")]
    assert configs[0].to_dict() == configs[1].to_dict()
  assert "--config=my_run.py" in README


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_the_layout_has_every_room(room):
  page = (ROOT / "docs" / "life_of_a_batch.md").read_text(encoding="utf-8")
  layout = page.partition("## All rooms")[2]
  assert re.search(rf"^ +([\w.]+, )*{room.name}/ ", layout, re.MULTILINE)
