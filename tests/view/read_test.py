"""What the page shows is what the run has stored; what it has not stored is absent."""

import json

import numpy as np
import pytest
from view import made

from rlvr_jax.data import ByteTokenizer
from rlvr_jax.data.by_name import make_tokenizer
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.view import read

TEXTS = [text for of_group in made.COMPLETIONS for text in of_group]
LENGTHS = [len(text.encode()) + 1 for text in TEXTS]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return read.open_run(made.write_run(tmp_path_factory.mktemp("view") / "run"))


def texts_of(part):
  """The text of each rollout, put together from its tokens."""
  characters = {first: (text, width) for first, text, width in part.header["characters"]}
  found, place = [], 0
  for length in part.header["lengths"]:
    text, end = "", place + length
    while place < end:
      known = part.header["vocabulary"][part.arrays["token"][place]]
      shown, width = characters.get(place, (known, 1))
      text, place = text + shown, place + width
    found.append(text)
  return found


def test_a_batch_has_its_tokens_and_nothing_that_was_not_stored(run):
  part = read.read_batch(run, 2)
  assert part.header["lengths"] == LENGTHS and part.header["size"] == [2, 2]
  assert texts_of(part) == [f"{text}⟨end⟩" for text in TEXTS]
  expected = np.concatenate([-0.25 * (1 + np.arange(length)) for length in LENGTHS])
  np.testing.assert_array_equal(part.arrays["logprob"], expected.astype(np.float16))
  assert part.arrays["mask"].all() and len(part.arrays["mask"]) == sum(LENGTHS)
  assert set(part.arrays) == {"token", "logprob", "mask", "version", "lag", "advantage"}
  assert (part.arrays["version"] == 2).all() and not part.arrays["lag"].any()
  assert (read.read_batch(run, 1).arrays["lag"] == 1).all()  # trained on after an update
  assert part.header["updates"] == [3] and part.header["measured"] is None
  assert part.header["groups"][0]["answer"] == "12"
  assert [sample["completion"] for sample in part.header["samples"]] == TEXTS


def test_an_estimator_without_state_is_applied_to_the_stored_rewards(run, tmp_path):
  part = read.read_batch(run, 0)
  deviation = np.std([1, 0], ddof=1)
  np.testing.assert_allclose(
    part.arrays["advantage"], [0.5 / deviation, -0.5 / deviation, 0, 0], rtol=1e-4
  )
  for number, advantage in enumerate(("fade", "opob", "nowhere:estimator")):
    other = read.open_run(made.write_run(tmp_path / str(number), advantage=advantage))
    assert "advantage" not in read.read_batch(other, 0).arrays


def test_what_a_run_may_store_besides(tmp_path):
  T = LENGTHS[0]
  places = np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))
  within = np.arange(T) < np.array(LENGTHS[:2])[:, None]
  turns = places // 3 * within
  arrays = {
    "token_versions": np.where(within, places % 2, -1).astype(np.int32),
    "turns": turns.astype(np.int32),
    "turn_scores": np.where(places == 2, np.float32(0.5), np.float32(np.nan)),
    "mask": (within & (turns % 2 == 0)).astype(np.float32),
    "routes": np.stack([np.stack([places % 4, places % 3], -1)] * 2, 2).astype(np.uint8),
  }
  groups = [made.group(0, made.COMPLETIONS[0], [1, 0], **arrays)]
  run = made.write_run(tmp_path / "run", batches=[groups], advantage="fade")
  part = read.read_batch(read.open_run(run), 0)
  cut = lambda array: array[within]
  for name, array in {
    "version": cut(arrays["token_versions"]), "turn": cut(turns), "mask": cut(arrays["mask"]),
    "score": cut(arrays["turn_scores"]), "expert": np.stack([cut(places % 4)] * 2),
  }.items():  # fmt: skip
    np.testing.assert_array_equal(part.arrays[name], array.astype(part.arrays[name].dtype))
  assert part.header["layers"] == [0, 1]


def test_without_a_tokenizer_there_are_ids(tmp_path):
  run = read.open_run(made.write_run(tmp_path / "run", tokenizer="checkpoint"))  # of no folder
  part = read.read_batch(run, 0)
  assert not part.header["has_texts"] and part.header["characters"] == []
  assert part.header["vocabulary"][part.arrays["token"][0]] == ord("7")


def test_many_layers_of_long_responses_are_cut_to_some():
  assert read._shown_layers(4, 1000) == [0, 1, 2, 3]
  assert read._shown_layers(48, read.MAX_ROUTE_BYTES // 3) == [0, 24, 47]
  assert read._shown_layers(48, 10 * read.MAX_ROUTE_BYTES) == [0]


def test_instructive_groups_come_first(run):
  mixed, constant = read.read_batch(run, 0).header["groups"]
  assert (mixed["spread"], constant["spread"]) == (1.0, 0.0)
  assert mixed["interest"] > constant["interest"] == 0.0 and "ratio" not in mixed


@pytest.mark.parametrize("text", ["a\ufffdb", "a\x1b[0m", "again and " * 60])
def test_garbled_texts(text):
  assert read.is_garbled(text)


@pytest.mark.parametrize("text", ["", "3 + 4\n= 7", "Sei x die Zahl – 中文, €.", "no " * 20])
def test_sound_texts(text):
  assert not read.is_garbled(text)


# --- the run --------------------------------------------------------------------------------------


def test_a_summary_has_all_metrics_and_the_recipe_as_a_difference(run):
  base = json.loads(made.config(num_updates=9).to_json_best_effort())
  summary = read.read_summary(run, base)
  assert summary.header["recipe"] == [["num_updates", "9", "4"]]
  assert summary.header["batches"] == [0, 1, 2, 3]
  assert summary.header["updates"] == [[1], [2], [3], [4]] and summary.header["messages"] == []
  np.testing.assert_array_equal(summary.arrays["train|step"], [1, 2])
  np.testing.assert_array_equal(summary.arrays["train|reward/mean"], [0.25, 0.5])
  np.testing.assert_array_equal(summary.arrays["train|policy/entropy"], [1.5, np.nan])
  np.testing.assert_array_equal(summary.arrays["eval|eval/pass@1_high"], np.float32([0.6]))


def test_messages_of_a_run(tmp_path):
  truncated = lambda step, share: {"step": step, "phase": "train", "response/truncated": share}
  records = [truncated(1, 0.9), truncated(2, 0.8), truncated(3, 0.0), truncated(4, 0.7)]
  run = read.open_run(made.write_run(tmp_path / "run", records=records))
  found = read.read_summary(run, {}).header["messages"]
  assert [step for step, _ in found] == [1, 4] and "90% of the responses" in found[0][1]
  (tmp_path / "run" / "output.log").write_text("step 1\nwarning: it is so\n")
  assert read.read_summary(run, {}).header["messages"] == [[None, "it is so"]]


def test_code_of_a_run_s_author_is_not_imported(tmp_path, monkeypatch):
  (tmp_path / "their_code.py").write_text("raise SystemError('it was run')\n")
  monkeypatch.syspath_prepend(tmp_path)
  folder = made.write_run(
    tmp_path / "run", schedule="their_code:schedule", advantage="their_code:advantage"
  )
  run = read.open_run(folder)
  assert run.updates == {} and run.advantage is None
  part = read.read_batch(run, 0)
  assert part.header["updates"] == [] and not {"lag", "advantage"} & part.arrays.keys()


def test_folders_that_are_no_run(tmp_path):
  with pytest.raises(ValueError, match=r"--beside=.* has no config.json: give the --workdir of a"):
    read.open_run(tmp_path / "nowhere", "--beside")
  (tmp_path / "config.json").write_text("[1]")
  with pytest.raises(ValueError, match="JSON list"):
    read.open_run(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="has no rollouts: its run has not sampled a batch yet"):
    read.open_run(tmp_path)
  RolloutStore(tmp_path / "rollouts", writable=True).close()
  with pytest.raises(ValueError, match="its store has no batches: none was stored yet, or"):
    read.open_run(tmp_path)
  (tmp_path / "rollouts" / "index.jsonl").write_text("")
  with pytest.raises(ValueError, match="has the former format"):
    read.open_run(tmp_path)
  with pytest.raises(ValueError, match="must be a folder on a disk"):
    read.open_run("s3://bucket/run")


NUMBERS = [*range(3, 43)]


@pytest.mark.parametrize(
  ("spec", "chosen"),
  [
    ("3", [3]),
    ("-1,5", [42, 5]),
    ("10:12", [10, 11, 12]),
    ("40:-1, 3,41", [40, 41, 42, 3]),
    ("all", NUMBERS),
    (read.DEFAULT_BATCHES, [3, 42, 7, 12, 16, 20, 25, 29, 33, 38]),
  ],
)
def test_batches_are_chosen(spec, chosen):
  assert read.choose_batches(spec, NUMBERS) == chosen


@pytest.mark.parametrize("spec", ["2", "43", "50:60", "12:10", "one", "", "1:2:3", "-99"])
def test_batches_that_are_not_there(spec):
  told = rf"--batches={spec}: .*(is neither a number nor a range; give|3 to 42)"
  with pytest.raises(ValueError, match=told):
    read.choose_batches(spec, NUMBERS)


def test_measured_batches_are_preferred_between_the_first_and_the_last():
  choose = lambda preferred: read.choose_batches(read.DEFAULT_BATCHES, NUMBERS, preferred)
  assert choose({9: 1, 30: 1}) == [3, 42, 9, 30, 7, 12, 20, 25, 33, 38]
  assert choose([99]) == choose(())
  assert choose(range(4, 24)) == [3, 42, 4, 7, 9, 12, 15, 18, 20, 23]


def test_few_batches_are_all_chosen():
  assert sorted(read.choose_batches(read.DEFAULT_BATCHES, [4, 6, 9])) == [4, 6, 9]


# --- geometry -------------------------------------------------------------------------------------


def test_geometry_is_that_of_the_gram_matrix(tmp_path):
  gradients = np.random.default_rng(0).normal(size=(4, 7)) * [[1], [2], [3], [0]]
  A = np.array([1.0, -1.0, 0.5, 2.0])
  measured = [(2, gradients @ gradients.T, A.reshape(2, 2), [[0, 1], [0, 1]])]
  run = read.open_run(made.write_run(tmp_path / "run", measured=measured))
  part = read.read_geometry(run, 2)
  total = A @ gradients
  np.testing.assert_allclose(
    part.arrays["part"], A * (gradients @ total) / (total @ total), rtol=1e-4, atol=1e-7
  )
  units = gradients[:3] / np.linalg.norm(gradients[:3], axis=1, keepdims=True)
  np.testing.assert_allclose(part.arrays["cosine"][:3, :3], units @ units.T, atol=2e-3)
  assert not part.arrays["cosine"][3].any()  # its gradient is zero
  singular = np.linalg.svd(gradients, compute_uv=False) ** 2
  np.testing.assert_allclose(part.arrays["share"], singular / singular.sum(), atol=1e-6)
  assert part.arrays["by_reward"].tolist() == [1, 0, 3, 2]
  assert sorted(part.arrays["by_vector"]) == [0, 1, 2, 3]
  assert read.read_summary(run, {}).header["geometry"] == [2]


def measurement(step, groups, **of_tokens):
  """A measurement of two groups of two rollouts, whose loss tokens have these arrays."""
  lengths = np.stack([group.arrays["mask"].sum(-1) for group in groups])
  A = [[step, -1], [0.5, 0]]
  return (step, np.eye(4), A, [[1, 0], [0, 0]], lengths, of_tokens)


def test_what_an_update_found_at_each_token(tmp_path):
  """Of two measured updates on a batch the last one counts; tokens without a loss have NaN."""
  groups = [made.group(0, ["12", "3"], [1, 0]), made.group(1, ["4", "5"], [0, 0])]
  groups[0].arrays["mask"][0, 1] = 0  # of "12" and its end: the "2"
  of_tokens = dict(
    token_log_ratio=np.float32([0.25, 0.5, -1, 0, 0, 0, 0, 0]),
    token_entropy=np.arange(8, dtype=np.float32),
    token_clipped=np.arange(8) == 1,
    token_vetoed=np.arange(8) == 2,
  )
  first = measurement(0, groups, token_log_ratio=np.ones(8, np.float32))
  folder = made.write_run(
    tmp_path / "run",
    batches=[groups, groups],
    measured=[first, measurement(2, groups, **of_tokens)],
    schedule="updates_per_refresh(batches=2, epochs=2)",
  )
  run = read.open_run(folder)
  assert run.updates == {0: [1, 3], 1: [2, 4]} and read.measured_updates(run) == {0: 3}
  assert read.read_summary(run, {}).header["measured"] == [3, None]
  part = read.read_batch(run, 0)
  assert part.header["updates"] == [1, 3] and part.header["measured"] == 3
  nan = np.nan
  for name, expected in {
    "ratio": [0.25, nan, 0.5, -1, 0, 0, 0, 0, 0],
    "entropy": [0, nan, 1, 2, 3, 4, 5, 6, 7],
    "clipped": [0, nan, 1, 0, 0, 0, 0, 0, 0],
    "vetoed": [0, nan, 0, 1, 0, 0, 0, 0, 0],
    "coefficient": [2, -1, 0.5, 0],
  }.items():
    np.testing.assert_array_equal(part.arrays[name], np.array(expected), err_msg=name)
  assert not {"dropped", "proximal"} & part.arrays.keys()
  group, other = part.header["groups"]
  assert (group["ratio"], group["bounded"]) == (1.0, 0.5)
  assert (other["ratio"], other["bounded"]) == (0.0, 0.0) and group["interest"] > 2
  part = read.read_batch(run, 1)
  assert part.header["measured"] is None and not {"ratio", "coefficient"} & part.arrays.keys()
  assert "ratio" not in part.header["groups"][0]


@pytest.fixture(name="chat_model")
def _chat_model(tmp_path):
  """The folder of a tokenizer of bytes with a chat template."""
  (tmp_path / "model").mkdir()
  for name, content in ByteTokenizer().huggingface_files().items():
    (tmp_path / "model" / name).write_bytes(content)
  template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
  (tmp_path / "model" / "chat_template.jinja").write_text(template)
  return str(tmp_path / "model")


def test_prompts_of_a_chat_have_their_roles(tmp_path, chat_model):
  """Messages as they were given, a question as the user's, and what the policy read of them."""
  told = [{"role": "user", "content": "3 *"}, {"role": "assistant", "content": "And?"}]
  told.append({"role": "user", "content": "4 ="})
  groups = made.batch()
  for sample in groups[1].samples:
    sample |= {"prompt": "3 *\nAnd?\n4 =", "messages": told}
  text = "[system]Be brief.<|end|>[user]3 * 4 =<|end|>[assistant]"
  fields = {"tokenizer": chat_model, "prompts.format": "chat", "prompts.system": "Be brief."}
  tokenizer = make_tokenizer(chat_model, made.config(**fields).prompts, "")
  ids = np.array([256, *tokenizer.encode_prompt("3 * 4 =")], np.int32)  # the first one is padding
  arrays = {"prompts.tokens": ids, "prompts.lengths": np.array(len(ids) - 1, np.int32)}
  groups[0] = groups[0]._replace(arrays=groups[0].arrays | arrays)
  groups[1] = groups[1]._replace(arrays=groups[1].arrays | arrays)
  run = read.open_run(made.write_run(tmp_path / "run", batches=[groups], **fields))
  first, second = read.read_batch(run, 0).header["groups"]
  system = {"role": "system", "content": "Be brief."}
  assert first["messages"] == [system, {"role": "user", "content": "3 * 4 ="}]
  assert first["as_read"] == text and second["messages"] == [system, *told]
  assert all("messages" not in x for x in read.read_batch(run, 0).header["samples"])
  plain = read.open_run(made.write_run(tmp_path / "plain", batches=[groups]))
  first, second = read.read_batch(plain, 0).header["groups"]
  assert "messages" not in first and second["messages"] == told and "as_read" not in second


def test_a_measurement_of_other_rollouts_is_not_shown(tmp_path):
  groups = made.batch()
  wrong = (0, np.eye(4), np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)), {})
  folder = made.write_run(tmp_path / "run", batches=[groups], measured=[wrong])
  part = read.read_batch(read.open_run(folder), 0)
  assert part.header["measured"] is None and "coefficient" not in part.arrays
  told = "the measurement before update 1 has other rollouts than the batch"
  assert part.header["unread"] == told
  path = folder / "geometry" / "000000.npz"
  path.write_bytes(path.read_bytes()[:99])
  part = read.read_batch(read.open_run(folder), 0)
  assert part.header["unread"].startswith(f"{path} is damaged (") and "ratio" not in part.arrays


def test_a_gram_matrix_that_says_nothing(tmp_path):
  ones = np.ones((4, 4))
  measured = [(0, 0 * ones, [1, 1, 1, 1], [[0, 1], [0, 1]])]
  measured += [(1, ones, [1, -1, 1, -1], [[0, 1], [0, 1]])]
  run = read.open_run(made.write_run(tmp_path / "run", measured=measured))
  unusable, cancelled = (read.read_geometry(run, step) for step in (0, 1))
  assert not unusable.header["usable"] and "cosine" not in unusable.arrays
  assert cancelled.header["usable"] and "part" not in cancelled.arrays


def test_graders_have_their_scores(tmp_path):
  scores = np.array([[1, 0.5], [0, 0.25]], np.float32)
  groups = [made.group(0, ["1", "2"], [1, 0], rewards_by_name=scores)]
  extra = (("boxed", 0.5),)
  folder = made.write_run(tmp_path / "run", batches=[groups], **{"grading.extra": extra})
  samples = read.read_batch(read.open_run(folder), 0).header["samples"]
  assert [sample["scores"] for sample in samples] == [
    {"main grader": 1, "boxed": 0.5}, {"main grader": 0, "boxed": 0.25}
  ]  # fmt: skip


def test_a_crash_is_told(tmp_path):
  crashed = made.group(0, ["1", "2"], [1, 0])
  crashed.samples[1].update(outcome="crashed", reward=None, detail="MemoryError", stopped=False)
  groups = [crashed._replace(arrays=crashed.arrays | {"valid": np.array([True, False])})]
  part = read.read_batch(read.open_run(made.write_run(tmp_path / "run", batches=[groups])), 0)
  assert part.header["samples"][1]["detail"] == "MemoryError"
  assert part.header["groups"][0]["truncated"] == 0.5 and part.header["groups"][0]["spread"] == 0
  assert not part.arrays["advantage"].any()
