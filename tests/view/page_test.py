"""The page in a browser: a test clicks through it; pictures of it are for a person to look at.

CHROMIUM=/usr/bin/chromium VIEW_PICTURES=pictures python -m pytest -m slow tests/view/page_test.py
"""

import os
import pathlib
import threading
import time

import numpy as np
import pytest
from view import made
from view.browser import CHROMIUM, Browser

from rlvr_jax.colab.rollouts import Page
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.view import read, write

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not CHROMIUM, reason="CHROMIUM, the path of a Chromium, is not set"),
]
LONGEST_S = 1.0  # until the page of a large batch is open
SLACK = 3.0  # of a busy machine


@pytest.fixture(scope="module")
def browser():
  with Browser() as found:
    yield found


@pytest.fixture(autouse=True)
def no_errors(browser):
  """The page raises nothing, and its policy has nothing to refuse."""
  browser.errors.clear()
  browser.resize(1280, 900)
  yield
  assert browser.errors == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
  folder = os.environ.get("VIEW_PICTURES")
  found = pathlib.Path(folder) if folder else tmp_path_factory.mktemp("pictures")
  found.mkdir(exist_ok=True, parents=True)
  return found


def dialogue(index):
  """A group of dialogues: "7", the reply "<", "3", in tokens that have versions and routes."""
  tokens = [[ord("7"), made.STOP, ord("<"), ord("3"), made.STOP]] * 2
  turns = np.array([[0, 0, 1, 2, 2]] * 2, np.int32)
  group = made.group(
    index,
    ["7<3x", "7<3x"],
    [1, 0],
    tokens=np.array(tokens, np.int32),
    turns=turns,
    turn_scores=np.where(np.arange(5) == 1, np.float32(0.5), np.float32(np.nan))[None].repeat(2, 0),
    mask=(turns % 2 == 0).astype(np.float32),
    token_versions=np.array([[0, 0, -1, 1, 1]] * 2, np.int32),
    routes=np.arange(20, dtype=np.uint8).reshape(1, 5, 2, 2).repeat(2, 0) % 4,
  )
  for sample in group.samples:
    sample["turns"] = ["7", "<", "3"]
  return group


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  """A file with two runs: attacking texts, dialogues, geometry."""
  folder = tmp_path_factory.mktemp("page")
  gram = np.array([[4, 2, 0, 1], [2, 3, 0, 0], [0, 0, 1, -1], [1, 0, -1, 2]])
  records = [
    {"step": step, "phase": "train", "reward/mean": 0.5 + step / 100, "policy/entropy": 1 / step,
     "time/generate_seconds": 2.0, "time/optimise_seconds": 1.0, "response/truncated": 0.6}
    for step in range(1, 31)
  ]  # fmt: skip
  evaluation = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6}
  records += [{"step": step, "phase": "eval", **evaluation} for step in (0, 30)]
  batches = [made.batch(), made.batch(), [dialogue(0)]]
  for sample in batches[2][0].samples:
    sample["messages"] = [
      {"role": "system", "content": f"Find it. {made.ATTACK}"},
      {"role": "user", "content": "Go."},
    ]
  lengths = np.stack([group.arrays["mask"].sum(-1) for group in batches[0]])
  count = int(lengths.sum())
  of_tokens = dict(
    token_log_ratio=np.linspace(-0.5, 1, count, dtype=np.float32),
    token_entropy=np.linspace(0, 3, count, dtype=np.float32),
    token_clipped=np.arange(count) % 3 == 0,
    token_vetoed=np.arange(count) == count - 1,  # of the last group
  )
  measured = [(0, gram, [[1, -1], [0.5, 0.2]], [[1, 0], [0, 0]], lengths, of_tokens)]
  first = made.write_run(
    folder / "first", batches=batches, measured=measured, records=records, num_updates=9
  )
  second = made.write_run(folder / "second", measured=measured, records=records)
  runs = [read.open_run(first), read.open_run(second)]
  base = {"num_updates": 9}
  write.write_page(folder / "one.html", runs[:1], base, [[0, 2]])
  write.write_page(folder / "two.html", runs, base, [[0, 1, 2], [0, 1]])
  damaged = made.write_run(folder / "damaged", measured=measured, records=records)
  path = damaged / "geometry" / "000000.npz"
  path.write_bytes(path.read_bytes()[:99])
  write.write_page(folder / "damaged.html", [read.open_run(damaged)], base, [[0]])
  return folder


def text(browser, selector="#main"):
  return browser.run(f"document.querySelector({selector!r})?.innerText ?? ''")


def count(browser, selector):
  return browser.run(f"document.querySelectorAll({selector!r}).length")


def test_a_person_clicks_from_the_run_to_a_token(browser, page, pictures):
  browser.open(f"file://{page}/one.html")
  shown = text(browser)
  assert "Held-out pass@k" in shown and "60% of the responses" in shown
  assert "2 of 3 batches are in this file" in shown and count(browser, ".chart canvas") >= 4
  browser.picture(pictures / "run.png")
  browser.click("#tabs a[href='#batch']")
  browser.wait("document.querySelectorAll('.row').length === 1")  # the last one that it holds
  browser.go("#batch/0/0")
  assert count(browser, ".row") == 2 and count(browser, ".row .mark") == 4
  browser.picture(pictures / "batch.png")
  browser.click(".row")
  browser.wait("document.querySelectorAll('.answer').length === 2")
  assert "correct" in text(browser, ".answer") and "✓" in text(browser, ".answer .mark")
  browser.click(".answer .t:nth-child(3)")
  tip = text(browser, "#tip")
  assert "log-probability (sampler)\t−0.75" in tip and "advantage\t0.707" in tip
  browser.picture(pictures / "group.png")
  browser.click(".answer h3 a")
  browser.wait(
    "document.querySelector('.open') !== null && document.querySelector('.minimap canvas')"
  )
  browser.picture(pictures / "rollout.png")


@pytest.mark.parametrize(
  ("low", "high", "shown"),
  [
    (0.992, 1.004, "0.995 1.000"),
    (100.1, 100.7, "100.2 100.4 100.6"),
    (0.0, 1.0, "0 0.5 1"),
    (-1200, 900, "−1,000 0"),
    (1.2e-5, 2.4e-5, "1.5e−5 2e−5"),
  ],
)
def test_ticks_differ(browser, page, low, high, shown):
  browser.open(f"file://{page}/one.html")
  found = browser.run(f"((m) => m.map((y) => showTick(y, m)).join(' '))(ticks({low}, {high}))")
  assert found == shown


def test_texts_show_as_text(browser, page):
  browser.open(f"file://{page}/one.html")
  browser.go("#group/0/0/0")
  assert made.ATTACK in text(browser, ".answer .tokens") and made.EURO in text(browser, ".answers")
  assert browser.run("window.attacked === undefined && document.images.length === 0")
  browser.go("#group/0/0/1")
  assert "right U+202Eto left" in text(browser, ".answers").replace("\n", "")
  assert "\u202e" not in browser.run("document.body.innerText")


def test_colours_are_those_that_were_stored(browser, page, pictures):
  browser.open(f"file://{page}/one.html")
  browser.go("#group/0/0/0")
  options = "[...document.querySelectorAll('.colours option')]"
  off = browser.run(f"{options}.filter((o) => o.disabled).map((o) => o.value)")
  assert off == ["proximal", "dropped", "turn", "expert"]
  assert "dropped — the method has none" in text(browser, ".colours")
  colours = "[...document.querySelectorAll('.answer .t')].map((t) => t.style.backgroundColor)"
  by_probability = browser.run(colours)
  browser.choose("colour", "advantage")
  browser.wait(f"JSON.stringify({colours}) !== {str(by_probability)!r}")
  browser.wait(f"new Set({colours}).size === 2")  # one for each rollout
  for name in ("ratio", "entropy", "clipped", "vetoed"):
    browser.choose("colour", name)
    browser.wait("document.querySelector('.colours').innerText.includes('before update 1')")
    browser.picture(pictures / f"{name}.png")
  browser.click(".answer .t:nth-child(1)")
  tip = text(browser, "#tip")
  assert "log ratio to the sampler\t−0.5" in tip and "clipped\t1" in tip and "vetoed\t0" in tip
  browser.go("#group/0/2/0")
  assert "no update on this batch was measured" in text(browser, ".colours")
  for name in ("expert", "turn", "version", "mask", "logprob"):
    browser.choose("colour", name)
    browser.wait("document.querySelectorAll('.answer .t').length === 10")
  turns = browser.run("[...document.querySelectorAll('.answer .turn')].map((t) => t.className)")
  assert turns[:3] == ["turn policy", "turn environment", "turn policy"]
  assert "score 0.5" in text(browser, ".answer .turn")
  browser.choose("colour", "expert")
  browser.choose("layer", "1")
  browser.picture(pictures / "dialogue.png")


def test_a_prompt_of_messages_is_a_conversation(browser, page, pictures):
  browser.open(f"file://{page}/one.html")
  browser.go("#group/0/2/0")
  roles = browser.run("[...document.querySelectorAll('.question .who')].map((n) => n.innerText)")
  assert roles == ["system", "user"] and made.ATTACK in text(browser, ".question .turn")
  browser.picture(pictures / "messages.png")
  browser.go("#batch/0/2")
  browser.run("(() => { const s = document.getElementById('search'); s.value = 'go.';"
              " s.dispatchEvent(new Event('input')); })()")  # fmt: skip
  browser.wait("document.querySelectorAll('.row').length === 1")


def test_a_damaged_measurement_is_said(browser, page):
  browser.open(f"file://{page}/damaged.html")
  browser.go("#group/0/0/0")
  assert "are not shown: " in text(browser, ".colours") and "damaged" in text(browser, ".colours")


def test_filters_and_keys(browser, page):
  browser.open(f"file://{page}/one.html")
  browser.press("2")
  browser.wait("location.hash === '#batch' && document.querySelector('.row')")
  browser.press("[")
  browser.wait("location.hash === '#batch/0/0' && document.querySelectorAll('.row').length === 2")
  browser.press("/")
  assert browser.run("document.activeElement.id") == "search"
  for key in "left":
    browser.press(key)
  browser.wait("document.querySelectorAll('.row').length === 1")
  assert "1 of 2 groups" in text(browser)
  browser.press("Escape")
  browser.run("(() => { const s = document.getElementById('search'); s.value = '';"
              " s.dispatchEvent(new Event('input')); })()")  # fmt: skip
  browser.choose("rewards", "mixed")
  browser.wait("document.querySelectorAll('.row').length === 1")
  browser.choose("rewards", "")
  browser.choose("outcome", "correct")
  browser.wait("document.querySelectorAll('.row').length === 1")
  browser.choose("outcome", "")
  first = "document.querySelector('.row .number')?.innerText"
  browser.choose("order", "ratio")
  browser.wait(f"{first} === '1'")
  browser.choose("order", "index")
  browser.wait(f"{first} === '0'")
  browser.press("Enter")
  browser.wait("location.hash === '#group/0/0/0'")
  browser.wait("document.getElementById('main').dataset.drawn === '#group/0/0/0'")
  browser.press("c")
  browser.wait("document.querySelector('.colours select').value === 'ratio'")
  browser.press("j")
  browser.wait("location.hash === '#group/0/0/1'")
  browser.press("Escape")
  browser.wait("location.hash === '#batch/0/0'")
  browser.press("3")
  browser.wait("location.hash === '#geometry'")
  browser.press("?")
  browser.wait("document.getElementById('help').open")


def test_geometry(browser, page, pictures):
  browser.open(f"file://{page}/one.html")
  browser.go("#geometry/0/0")
  assert browser.run("document.querySelector('.heat canvas:last-child').width") == 4
  assert "Rollouts that cancel" in text(browser)
  browser.picture(pictures / "geometry.png")
  browser.choose("order", "by_vector")
  browser.wait("document.querySelector('.heat') !== null")
  browser.click(".heat canvas:last-child")
  browser.wait("location.hash.startsWith('#rollout/0/0/')")


def test_two_runs_are_paired(browser, page, pictures):
  browser.open(f"file://{page}/two.html")
  assert "B − A, paired by update" in text(browser) and count(browser, ".tile-row") == 2
  assert "num_updates" in text(browser, ".recipe .differs")
  browser.click("main input[type=checkbox]")
  browser.wait("document.querySelector('.keys').innerText.includes('B − A')")
  browser.picture(pictures / "two.png")
  browser.go("#batch/0/0")
  assert count(browser, ".row:first-child .strip") == 2 and "over 2 prompts" in text(browser)
  browser.go("#group/1/0/1")
  assert "The same prompt in A" in text(browser) and count(browser, ".answer") == 4
  browser.go("#geometry/1/0")
  assert count(browser, ".heat") == 2


@pytest.mark.parametrize(
  "place", ["", "#batch/0/0", "#group/0/0/0", "#rollout/0/0/0/0", "#geometry"]
)
def test_a_phone_shows_it_without_scrolling_sideways(browser, page, pictures, place):
  browser.resize(390, 844, dark=True, phone=True)
  browser.open(f"file://{page}/two.html{place}")
  browser.wait("document.documentElement.scrollWidth <= innerWidth")
  browser.picture(pictures / f"phone_{place.strip('#').partition('/')[0] or 'run'}.png")


def test_it_works_in_the_frame_of_a_notebook(browser, page, tmp_path):
  """There a link to a place of the page would lead to one of the notebook."""
  frame = Page((page / "one.html").read_text())._repr_html_()
  (tmp_path / "notebook.html").write_text(f"<!doctype html><main id=main data-drawn=1>{frame}")
  browser.open(f"file://{tmp_path}/notebook.html")
  inside = "document.querySelector('iframe').contentDocument"
  browser.wait(f"{inside}.querySelector('.chart canvas')")
  browser.run(f"{inside}.querySelector('#tabs a[href=\"#batch\"]').click()")
  browser.wait(f"{inside}.querySelector('.row')")


def test_a_served_run_is_followed(browser, page, tmp_path):
  folder = made.write_run(tmp_path / "run")
  with write.Server([read.open_run(folder)], {}) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
      browser.open(server.address)
      assert "every stored batch can be loaded" in text(browser)
      with RolloutStore(folder / "rollouts", writable=True) as store:
        store.write(4, made.batch(), {})
      browser.run("reload()")
      browser.go("#batch/0/4")
      assert count(browser, ".row") == 2
    finally:
      browser.open(f"file://{page}/one.html")  # which asks the server for nothing
      server.shutdown()
      thread.join()


def test_a_large_batch_opens_at_once(browser, tmp_path, pictures):
  """64 × 8 rollouts of 4096 tokens."""
  rng = np.random.default_rng(0)
  T, G = 4096, 8
  groups = []
  for index in range(64):
    words = [bytes(rng.integers(97, 123, T - 1, dtype=np.uint8)).decode() for _ in range(G)]
    logprobs = -rng.exponential(size=(G, T)).astype(np.float32)
    groups.append(made.group(index, words, rng.integers(0, 2, G), behavior_logprobs=logprobs))
  run = read.open_run(made.write_run(tmp_path / "run", batches=[groups], advantage="fade"))
  written = write.write_page(tmp_path / "page.html", [run], {}, [[0]])
  seconds = {"page": browser.open(f"file://{tmp_path}/page.html")}
  for place in ("#batch/0/0", "#group/0/0/5", "#rollout/0/0/5/0"):
    began = time.monotonic()
    browser.go(place)
    seconds[place] = time.monotonic() - began
  browser.picture(pictures / "large.png")
  print(f"{written.size / 2**20:.1f} MiB", {name: f"{s:.2f} s" for name, s in seconds.items()})
  assert 400 < count(browser, ".t") < 4096  # drawn as far as they are seen
  assert max(seconds.values()) < SLACK * LONGEST_S
  began = time.monotonic()
  browser.click(".minimap")
  browser.wait("document.querySelector('.t.found') !== null")
  assert time.monotonic() - began < 10
