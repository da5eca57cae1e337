"""The pages have every metric that the code writes, and none that it does not."""

import pathlib
import re

import pytest
from train import tiny

from docs import glossary, strings
from rlvr_jax.commands.train import train
from rlvr_jax.train.setup.build import build

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = "advantage|agreement|behavior|correction|counter|curriculum|dynamic_sampling|eval|"
FAMILIES += "geometry|gram|groups|hosts|loss|memory|outcome|policy|reference|response|reward|"
FAMILIES += "reweighting|routing|source|stage|staleness|teacher|time|update|veto|warm_start"
NAME = re.compile(rf"(?:{FAMILIES})/[\w.@{{}}\[\]'/]+[\w}}]")


def test_names_in_the_code_are_on_a_page():
  named = {text for text in strings.texts() if NAME.fullmatch(text)}
  found = {name for name in named if not name.endswith("_")}
  assert len(found) > 60
  missing = []
  for name in found:
    spelled = re.compile(".+".join(re.escape(part) for part in name.split("{}")) + "$")
    if not glossary.has(name) and not any(spelled.match(other) for other in glossary.documented()):
      missing.append(name)
  assert not missing, "describe them in docs/metrics.md, or on the page of their subject"


def test_names_of_the_pages_are_in_the_code():
  sources = [p.read_text(encoding="utf-8") for p in (ROOT / "rlvr_jax").rglob("*.py")]
  words = {word for text in sources for word in re.findall(r"[\w.@]+", text)}
  parts = {part for word in words for part in [word, *word.split("_")]}
  for name in glossary.documented():
    last = re.sub(r"[A-Z]{2,}|K", "", name.split("/")[-1]).strip("_@")
    assert not last or last in words or set(last.split("_")) <= parts, name


VARIANTS = {  # together they have the names that no tiny run has and no string of the code
  "salt": dict(reweighting="salt", diagnostics__every=1, diagnostics__compared="last_block"),
  "icepop": dict(loss="kl_cov", correction="icepop"),
  "m2po": dict(loss="m2po", veto__enabled=True, gram="sketch", diagnostics__every=1),
  "sources": dict(
    advantage="fade",
    loss="p3o",
    schedule="stages(count=2)",
    sources__temperature__fraction=0.5,
    sources__temperature__recorded="raw",
    dynamic_sampling__enabled=True,
    warm_start__num_steps=40,  # so that some groups have both outcomes
  ),
  "experts": dict(
    expert_balance=0.01,
    model__record_routes=True,
    diagnostics__every=1,
    model__overrides__num_experts=4,
    model__overrides__experts_per_token=2,
    model__overrides__expert_width=16,
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_what_methods_write_is_on_a_page(fields, tmp_path):
  few = dict(num_updates=2, warm_start__num_steps=2, evaluation__every=2)
  c = tiny.config(**few | fields)
  train(build(c.lock()), tmp_path)
  assert not glossary.missing(tmp_path)
