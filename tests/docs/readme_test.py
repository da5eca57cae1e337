"""README shows what one recorded run has printed and drawn."""

import hashlib
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_what_the_readme_shows_is_of_the_recorded_run():
  record = json.loads((ROOT / "experiments/quickstart/readme_run.json").read_text())
  readme = (ROOT / "README.md").read_text(encoding="utf-8")
  shown = re.findall(r"^    ((?:held-out after|step) .*?)(?: …)?$", readme, re.MULTILINE)
  assert len(shown) == len(record["printed"]) == 5
  assert all(full.startswith(line) for line, full in zip(shown, record["printed"], strict=True))
  assert f"at commit {record['commit']}" in readme
  picture = ROOT / record["picture"]["path"]
  assert hashlib.sha256(picture.read_bytes()).hexdigest() == record["picture"]["sha256"]
  assert f"]({record['picture']['path']})" in readme
