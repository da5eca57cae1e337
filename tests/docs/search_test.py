"""The search of the site finds first the page that answers.

CHROMIUM=/usr/bin/chromium python -m pytest -m slow tests/docs/search_test.py
"""

import contextlib
import functools
import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from view.browser import CHROMIUM, Browser

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
BUILD = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
FIELD = "[data-md-component=search-query]"
HIT = ".md-search-result__item a"


class Quiet(http.server.SimpleHTTPRequestHandler):
  def log_message(self, *_):
    pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
  """Where the built site is served."""
  for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
    pytest.importorskip(needed, reason="the extra docs is not installed")
  folder = tmp_path_factory.mktemp("site")
  environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
  subprocess.run([*BUILD, str(folder)], cwd=ROOT, env=environment, check=True, timeout=600)
  handler = functools.partial(Quiet, directory=str(folder))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
  with contextlib.ExitStack() as stack:
    yield stack.enter_context(Browser())


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="CHROMIUM, the path of a Chromium, is not set")
@pytest.mark.parametrize("words", FIRST)
def test_the_first_hit_is_the_page_that_answers(address, browser, words):
  browser.call("Page.navigate", url=address)
  browser.wait(f"document.readyState === 'complete' && document.querySelector('{FIELD}')")
  browser.run(f"document.querySelector('{FIELD}').focus()")
  browser.call("Input.insertText", text=words)
  browser.wait(f"document.querySelector('{HIT}')")
  found = browser.run(f"document.querySelector('{HIT}').href")
  assert found.removeprefix(address).partition("?")[0].partition("#")[0] == f"{FIRST[words]}/"


@pytest.mark.parametrize("words", FIRST)
def test_the_words_are_in_a_heading_or_the_first_lines_of_that_page(words):
  text = (ROOT / "docs" / f"{FIRST[words]}.md").read_text(encoding="utf-8")
  headings = re.findall(r"^#+ .*", text, re.MULTILINE)
  assert words.lower() in "\n".join([*headings, *text.splitlines()[:6]]).lower()


def test_each_question_of_the_front_page_leads_to_a_page():
  text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
  rows = re.findall(r"^\| (.*) \| \[.*\]\((\S+\.md)\).*\|$", text, re.MULTILINE)
  assert len(rows) == 10 and len({page for _, page in rows}) == 10
