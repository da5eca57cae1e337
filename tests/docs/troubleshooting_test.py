"""docs/troubleshooting.md quotes messages that the code has, and fields that exist."""

import pathlib
import re

import pytest
from ml_collections import ConfigDict

from docs import strings
from rlvr_jax.configs import base

ROOT = pathlib.Path(__file__).parents[2]
ROWS = [
  line.split("|")[1].strip()
  for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
  if line.startswith("| `")
]
MESSAGES = [found[1] for row in ROWS if (found := re.fullmatch(r"`([^`]+)`", row))]
OF_OTHERS = {"`RESOURCE_EXHAUSTED` (jax)"}


@pytest.fixture(name="texts", scope="module")
def _texts():
  return "\n".join(strings.texts())


def test_every_row_is_a_message():
  assert len(MESSAGES) > 25 and set(ROWS) - {f"`{m}`" for m in MESSAGES} == OF_OTHERS


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_has_the_message(message, texts):
  spelled = r"[^\n]*?".join(re.escape(part.strip()) for part in message.split("…"))
  assert re.search(spelled, texts)


@pytest.mark.parametrize(
  "page", ["troubleshooting.md", "reading_a_run.md", "reading_geometry.md", "terms.md"]
)
def test_fields_exist(page):
  """Dotted names that begin with a section of the configuration are fields of it."""
  text = (ROOT / "docs" / page).read_text(encoding="utf-8")
  if page == "terms.md":  # the other columns are other programs'
    text = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
  config = base.get_config()
  sections = "|".join(name for name, value in config.items() if isinstance(value, ConfigDict))
  named = re.findall(rf"`((?:{sections})\.[\w.]+)[`=]", text)
  assert named
  for name in named:
    assert is_field(name), name


def is_field(name):
  """Whether the configuration has a field of this dotted name; some are open to any."""
  value = base.get_config()
  for part in name.split("."):
    if not isinstance(value, ConfigDict) or part not in value:
      return name.startswith(("task.kwargs.", "model.overrides."))
    value = value[part]
  return True


def test_fields_in_messages_exist(texts):
  named = set(re.findall(r"(?<![\w./])(?:--)?config\.([a-z_]+(?:\.[a-z_]+)*)", texts))
  assert len(named) > 60
  assert {name for name in named - {"json", "py", "field"} if not is_field(name)} == set()
