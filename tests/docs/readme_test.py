"""README and docs/first_run.md show what one recorded run has printed and drawn."""

import hashlib
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
RECORD = ROOT / "experiments/quickstart/readme_run.json"


def lines_of_a_run(text):
  return re.findall(r"^    ((?:held-out after|step) .*?)(?: …)?$", text, re.MULTILINE)


def test_what_the_first_run_shows_is_of_the_recorded_run():
  printed = json.loads(RECORD.read_text())["printed"]
  shown = lines_of_a_run((ROOT / "docs" / "first_run.md").read_text(encoding="utf-8"))
  assert len(shown) == 3 and all(any(p.startswith(line) for p in printed) for line in shown)


def test_what_the_readme_shows_is_of_the_recorded_run():
  record = json.loads(RECORD.read_text())
  readme = (ROOT / "README.md").read_text(encoding="utf-8")
  shown = lines_of_a_run(readme)
  assert len(shown) == len(record["printed"]) == 5
  assert all(full.startswith(line) for line, full in zip(shown, record["printed"], strict=True))
  assert f"at commit {record['commit']}" in readme
  picture = ROOT / record["picture"]["path"]
  assert hashlib.sha256(picture.read_bytes()).hexdigest() == record["picture"]["sha256"]
  assert f"]({record['picture']['path']})" in readme
