"""The version of a release is the same in the package, the changelog and the citation."""

import pathlib
import re

import yaml

import rlvr_jax

ROOT = pathlib.Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_changelog_begins_with_unreleased_changes_and_this_version():
  headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
  assert headings[:2] == ["Unreleased", rlvr_jax.__version__]


def test_the_citation_has_this_version_and_what_the_format_requires():
  assert CITATION["version"] == rlvr_jax.__version__
  required = {"authors", "cff-version", "message", "title"}  # of Citation File Format 1.2.0
  assert required <= set(CITATION) and CITATION["cff-version"] == "1.2.0"
  assert all(author["name"] for author in CITATION["authors"])
  assert CITATION["license"] == "Apache-2.0"
