"""A page says near its beginning what it answers, so that the search of the site finds it."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FIRST = {  # what a person types → the page that answers
  "LoRA": "checkpoints",
  "pretrained": "checkpoints",
  "resume": "resume",
  "fleet": "fleet",
  "context length": "sampling",
  "teacher": "distillation",
  "gradient checkpointing": "how_to",
  "learning rate": "how_to",
  "out of memory": "troubleshooting",
  "SALT": "methods/salt",
}


@pytest.mark.parametrize("words", FIRST)
def test_the_words_are_in_a_heading_or_the_first_lines_of_that_page(words):
  text = (ROOT / "docs" / f"{FIRST[words]}.md").read_text(encoding="utf-8")
  headings = re.findall(r"^#+ .*", text, re.MULTILINE)
  assert words.lower() in "\n".join([*headings, *text.splitlines()[:6]]).lower()


def test_each_question_of_the_front_page_leads_to_a_page():
  text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
  rows = re.findall(r"^\| (.*) \| \[.*\]\((\S+\.md)\).*\|$", text, re.MULTILINE)
  assert len(rows) == 10 and len({page for _, page in rows}) == 10
