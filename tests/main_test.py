"""Bad inputs and broken surroundings: each ends with a message, or costs only itself."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time

import jax
import ml_collections
import optax
import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.data.task_utils import fill_template
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.rewards import Grade, Outcome
from rlvr_jax.rewards.grading import GraderStartError
from rlvr_jax.rollouts.batch import read_batch
from rlvr_jax.rollouts.staleness import stages, updates_per_refresh
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.checkpoint_files import saved_steps
from rlvr_jax.train.checkpointing.workdir import WorkdirError, check_config
from rlvr_jax.train.reporting.log import NonFiniteError
from rlvr_jax.train.setup import config_file
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.checks import may_differ

# --- mistakes in the configuration ----------------------------------------------------------------

MISTAKES = [
  # sizes
  (dict(batch__prompts=7, mesh__data=2), r"batch\.prompts = 7 .* over 2 devices .* example 8"),
  (dict(batch__tokens_per_micro_batch=-1), r"config\.batch: tokens_per_micro_batch = -1 is not an"),
  (dict(batch__tokens_per_row=512, mesh__fsdp=4),
   r"8 prompts with 4 rollouts each fill at most 3 rows of 512 tokens, fewer than the 4 devices"),
  (dict(warm_start__batch_size=9, mesh__data=2), r"config\.warm_start\.batch_size = 9"),
  (dict(mesh__tensor=4), r"tensor = 4 does not divide .* 2 key/value heads; allowed: \[1, 2\]"),
  (dict(batch__group_size=1), r"(?s)grpo.*group.*\b1\b"),
  (dict(batch__group_size=0), r"config\.batch: group_size = 0"),
  (dict(evaluation__seed=2**32), r"config\.evaluation: seed = 4294967296"),
  (dict(evaluation__ks=(1, 4)), r"1 ≤ k ≤ config\.evaluation\.num_samples = 2"),
  (dict(evaluation__ks=()), r"config\.evaluation\.ks = \[\]: pass@k needs at least one"),
  (dict(evaluation__ks=(1.5,)), r"config\.evaluation\.ks = \[1\.5\]"),
  (dict(seed=-1), r"config: seed = -1 is not an integer in \[0"),
  (dict(grading__timeout_s=float("inf")), r"config\.grading: timeout_s = inf"),
  (dict(entropy_bonus=float("inf")), r"entropy_bonus = inf"),
  (dict(policy_temperature=1e-38), r"policy_temperature = 1e-38 is not a number in \[0\.001"),
  (
    dict(sampling__temperature=float("inf")),
    r"temperature=inf; it must be 0, which decodes greedily, or finite",
  ),
  (dict(model__overrides={"compute_dtype": "float64"}), r"float64 needs jax_enable_x64"),
  (dict(schedule="stage"), r"config\.schedule = 'stage': 'stage' is unknown; .*'stages'\?"),
  (dict(max_behavior_gap=-1.0), r"config: max_behavior_gap = -1\.0 is not a number in \[0"),
  (dict(checkpoint__every=0), r"config\.checkpoint: every = 0"),
  (dict(evaluation__every=0), r"config\.evaluation: every = 0"),
  (dict(logging__print_every=0), r"config\.logging: print_every = 0"),
  (dict(max_skipped_in_a_row=0), r"config: max_skipped_in_a_row = 0"),
  (dict(grading__num_workers=-1), r"config\.grading: num_workers = -1"),
  (dict(num_updates=10**12), r"num_updates = 10{12} is not an integer in \[0, 10{7}\]"),
  (dict(batch={"prompts": "8", "group_size": 4, "tokens_per_micro_batch": 64, "tokens_per_row": 0}),
   r"config\.batch: prompts = '8' is not an integer in \[1, "),
  (dict(max_prompt_length=10**9), r"have 32000000128 tokens, .*_length = 10{9} \+ 4, but a batch"),
  (dict(evaluation__num_samples=10**9), r"num_samples = 4000000000 responses with .* lower"),
  (dict(warm_start__learning_rate="constant(peak=1e-3, warmup=2147483648)"),
   r"warmup = 2147483648 is not"),
  (dict(model__overrides={"vocab_size": 10**12}), r"vocab_size=1000000000000 must be .* below 2"),
  # texts
  (dict(max_prompt_length=4), r"a prompt has \d tokens but config\.max_prompt_length is 4: raise"),
  (dict(max_response_length=2), r"a demonstration has \d tokens, .* max_response_length is 2"),
  (dict(max_response_length=1), r"config: max_response_length = 1 is not an integer in \[2"),
  (dict(task__kwargs__warm_start_size=0), r"no demonstrations; set the task's warm_start_size"),
  # names
  (dict(task__name="reasoning_gim"), r"task\.name = 'reasoning_gim': .* 'reasoning_gym'\?"),
  (dict(tokenizer="byte"),
   r"tokenizer = 'byte' and .* give no tokenizer: .*byte is not a directory"),
  (dict(tokenizer="checkpoint"), r"config\.model\.checkpoint is empty; set it to a folder"),
  (dict(prompts__format="chat"), r"prompts\.format = 'chat' needs a chat template"),
  (dict(prompts__too_long="cut"), r"too_long = 'cut' is unknown; choose one of \['drop'"),
  (dict(prompts__too_long="drop", max_prompt_length=3, task__kwargs__train_size=200),
   r"none of the .* prompts of train has"),
  (dict(model__checkpoint="nowhere"), r"model\.checkpoint = 'nowhere'"),
  (dict(grading__grader="mathematic"), r"grading\.grader = 'mathematic': .*'mathematics'\?"),
  (dict(evaluation__grader="code(rewrd='all')"), r"evaluation\.grader = .*'rewrd'; .*'reward'"),
  (dict(grading__unsandboxed_code="yes"), r"unsandboxed_code = 'yes': leave it empty, or set"),
  (dict(grading__extra=(("a:b",),)), r"grading\.extra has \('a:b',\), expected pairs"),
  (dict(grading__extra=(("a:b", 0.1),), advantage="fade"), r"'fade' .*grading\.extra"),
  (dict(grading__outcomes={"wrong": "score"}, advantage="fade"), r"'wrong': 'score'"),
  (dict(correction="icepop", loss="p3o"), r"config\.loss = 'p3o': .*would do so a second time"),
  (dict(aggregation="mean"), r"aggregation = 'mean' .*'token_mean'"),
  (dict(reference__estimator="k4"), r"estimator = 'k4' .*'k3'"),
  (dict(grading__outcomes={"wrogn": "0"}), r"unknown outcome 'wrogn'.*did you mean 'wrong'"),
  # hyper-parameters
  (dict(optimizer="main_test:fixed_rate()"), r"has no parameter .*config\.learning_rate"),
  (dict(max_gradient_norm=0.0), r"config: max_gradient_norm = 0\.0 is not a number in \(0"),
  (dict(generation_deadline_s=0.0), r"config: generation_deadline_s = 0\.0 is not a number in \("),
  (dict(generation_deadline_s=float("inf")), r"config: generation_deadline_s = inf"),
  (dict(reference__kl_coefficient=-0.1), r"kl_coefficient = -0\.1"),
  (dict(sampling__temperature=0.0),
   r"temperature = 0 is greedy decoding, .* set config\.sampling\.temperature > 0"),
  (dict(sampling__top_p=0.9), r"top_p = 0\.9: .* config\.allow_truncated_behavior = True"),
  (dict(evaluation__sampling__top_p=1.5), r"^config\.evaluation\.sampling.*top_p"),
  # geometry
  (dict(reweighting="salt(scope=5)"),
   r"scope = 5 rollouts does not divide the 32 rollouts of a batch .* choose one of \[2, 4, 8, 16, "
   r"32\]"),
  (dict(diagnostics__every=1, diagnostics__compared="no_such"), r"'no_such' matches none of the"),
  (dict(veto__scope="sufix"), r"scope = 'sufix' is unknown; choose one of .*'suffix'"),
  (dict(proximal_every=2),
   r"proximal_every = 2 needs .* no proximal policy; set config\.proximal_every = 0"),
]  # fmt: skip


def fixed_rate():
  """An optimizer that does not ask for the learning rate."""
  return optax.sgd(0.1)


def compiled(log):
  """Names of the functions compiled; the key that stands for any other in shapes is none."""
  return set(re.findall(r"Compiling jit\((.*?)\)", log)) - {"stage", "_threefry_seed"}


@pytest.mark.parametrize(
  ("fields", "message"), MISTAKES, ids=["-".join(fields) for fields, _ in MISTAKES]
)
def test_a_mistake_has_a_message_before_anything_is_compiled(fields, message, caplog):
  config = tiny.get_config()
  flat = {name.replace("__", "."): value for name, value in fields.items()}
  with config.unlocked():
    config.update_from_flattened_dict(flat)
  with jax.log_compiles(), caplog.at_level(logging.WARNING), pytest.raises(ValueError) as error:
    build(config)
  assert re.search(message, str(error.value)), str(error.value)
  assert not compiled(caplog.text)


def test_a_prompt_that_would_fill_the_memory_is_refused():
  with pytest.raises(ValueError, match=r"has a width of 30+; at most 100000"):
    fill_template("config.task.kwargs.prompt", "{number:>3000000000}", {"number": 1})


def numbers_of(section, prefix=""):
  """Dotted names and values of a configuration's numbers."""
  for name, value in section.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from numbers_of(value, f"{prefix}{name}.")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
      yield f"{prefix}{name}", value


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), list(numbers_of(tiny.on_reasoning_gym())))
def test_an_extreme_number_works_or_has_a_message(name, value):
  # The settings of a dataset are its library's, which would begin to write 10**12 terms.
  largest = 10**4 if name.startswith("task.kwargs.settings.") else 10**12
  extremes = (largest, -1, 0) if isinstance(value, int) else (float("nan"), float("inf"), -1.0, 0.0)
  for extreme in extremes:
    config = tiny.on_reasoning_gym()
    with config.unlocked():
      config.update_from_flattened_dict({name: extreme})
    with contextlib.suppress(ValueError):
      build(config)


@tiny.needs_compile_log
def test_a_right_configuration_compiles_nothing_either(caplog):
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    build(tiny.get_config())
  assert "tracing train_step" in caplog.text and not compiled(caplog.text)


def assert_error(output, message):
  """The last line is the message, and no traceback of ours frightens anyone."""
  last = output.strip().splitlines()[-1]
  assert last.startswith("error: ") and re.search(message, last), output[-3000:]
  # On a full disk tensorstore's threads may complain on their own; that is not our code.
  assert "rlvr_jax/" not in "".join(re.findall(r'  File "(.*?)", line', output))


CONFIG_FILES = [  # get_config's body, what follows --config=FILE, the message
  ("raise ValueError('an odd seed')", [""], r"wrong\.py: ValueError: an odd seed \(.*, line 3"),
  ("c.width = 3", [""], r"AttributeError: no field 'width' \(.*, line 3"),
  ("(", [""], r"SyntaxError: '\(' was never closed \(wrong\.py, line 3"),
  ("return 5", [""], r"result of get_config\(\) of --config is 5; start from"),
  ("import ml_collections as m; return m.ConfigDict({'seed': 1})", [""], r"has no num_updates, t"),
  ("", [":unknown"], r"wrong\.py:unknown: TypeError"),
  ("", ["x"], r"--config=.*wrong\.pyx: there is no such file"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "flags", "message"), CONFIG_FILES)
def test_a_wrong_configuration_file_has_one_line(tmp_path, body, flags, message):
  path = tmp_path / "wrong.py"
  lines = ["from configs import base", "def get_config():", f"  c = base.get_config(); {body}"]
  path.write_text("\n".join([*lines, "  return c\n"]))
  with pytest.raises(ValueError) as told:
    config_file.read([f"--config={path}{flags[0]}", *flags[1:]])
  assert re.search(message, str(told.value)) and "\n" not in str(told.value), str(told.value)


@pytest.mark.parametrize(
  ("flags", "first"),
  [
    ([], "rlvr_jax trains, evaluates and exports policies, for instance by"),
    (["--workdir=x", "--mode=eval"], "error: --config is missing; add --config=NAME"),
    # An empty one would be the folder that the program happens to be started in.
    (
      ["--workdir=", "--config=quickstart"],
      "error: --workdir is missing; add --workdir=FOLDER, such as runs/mine",
    ),
  ],
  ids=["none", "eval", "empty"],
)
def test_what_is_missing_comes_first(flags, first):
  command = [sys.executable, "-m", "rlvr_jax.main", *flags]
  done = subprocess.run(command, capture_output=True, text=True, env=tiny.environment())
  lines = done.stderr.splitlines()
  assert done.returncode == 1 and lines[0].startswith(first) and not done.stdout
  assert len(lines) == (10 if not flags else 1)


# --- a disk that fills, numbers that blow up ------------------------------------------------------


@pytest.mark.slow
def test_no_disk_space_then_some(tmp_path):
  """A limit on the size of files stands for the disk; the message comes, and a rerun mends it."""
  workdir = tmp_path / "run"
  # A half-written entry of the compile cache would be met by other tests.
  output = tiny.run(workdir, file_kib=32, expect=1, JAX_ENABLE_COMPILATION_CACHE="false")
  assert_error(output, "no space for a checkpoint in .* rerun: the run starts from the beginning")
  train(build(tiny.get_config()), workdir)
  assert tiny.records(workdir)[-1]["step"] == 12


@pytest.mark.slow
def test_nonfinite_updates_are_skipped_and_too_many_end_the_run(tmp_path):
  workdir = tmp_path / "run"
  parts = build(tiny.config(learning_rate="linear(peak=1e30)", max_skipped_in_a_row=2))
  message = (
    "2 updates in a row.* not finite.*learning_rate.* the last batch, .*safetensors in the workdir"
  )
  with pytest.raises(NonFiniteError, match=message):
    train(parts, workdir)
  train_records = tiny.records(workdir, "train")
  skipped = [record["update/skipped_in_a_row"] for record in train_records]
  assert skipped[0] == 0 and skipped[-2:] == [1, 2]
  saved = read_batch(workdir / f"nonfinite_batch_{train_records[-1]['step']}.safetensors")
  assert saved.tokens.shape == (8, 4, 4) and saved.prompts.tokens.shape == (8, 8)
  assert saved.mask.sum() > 0 and saved.lags is not None


@pytest.mark.slow
def test_a_state_that_an_optimizer_made_nan_is_never_saved(tmp_path):
  """The loss and gradient of that update are finite; a rerun would begin with NaN for good."""
  parts = build(tiny.config(optimizer="optax:adamw(b1=1.0)", checkpoint__every=1))
  message = r"after update 1 the optimizer has left NaN .* such as \.?params/.*config.optimizer"
  with pytest.raises(NonFiniteError, match=message):
    train(parts, tmp_path / "run")
  assert saved_steps(tmp_path / "run" / "checkpoints") == [0]


@pytest.mark.slow
def test_a_warm_start_that_blows_up(tmp_path):
  parts = build(tiny.config(warm_start__learning_rate="constant(peak=1e30)"))
  message = r"warm start: the loss of step \d+ is nan; lower the peak of config"
  with pytest.raises(FloatingPointError, match=message):
    train(parts, tmp_path / "run")


def test_a_line_that_cannot_be_graded_ends_the_start(tmp_path):
  file = tmp_path / "lines.jsonl"
  answers = [1, 2, "10:30", 4]
  lines = [json.dumps({"prompt": f"{n}?", "answer": x}) + "\n" for n, x in enumerate(answers)]
  file.write_text("".join(lines))
  task = dict(name="jsonl", kwargs=dict(train=str(file), held_out_size=1, grader="gsm8k"))
  parts = build(tiny.config(task=task, batch__prompts=2, warm_start__num_steps=0))
  message = r"does not fit 1 of 4 problems: .*lines\.jsonl, line 3: .*'10:30' is not one number"
  with pytest.raises(GraderStartError, match=message):
    train(parts, tmp_path / "runs" / "wrong")
  assert not (tmp_path / "runs").exists()


# --- graders that misbehave -----------------------------------------------------------------------


TRIED = ("", "no answer")  # texts that a start has graded


def first_hangs_second_dies(completion, reference):
  """Marks on disk tell which item comes first, but for the one that a start tries."""
  for kind in ("hang", "die") if reference["folder"] and completion not in TRIED else ():
    with contextlib.suppress(FileExistsError):
      open(os.path.join(reference["folder"], kind), "x").close()
      time.sleep(1000) if kind == "hang" else os._exit(3)
  solved = len(completion) % 2
  return Grade(Outcome.CORRECT if solved else Outcome.WRONG, float(solved))


@pytest.mark.slow
def test_a_hanging_and_a_dying_grader_cost_one_rollout_each(tmp_path):
  config = tiny.config(num_updates=1, warm_start__num_steps=0, reference__kl_coefficient=0.0)
  config.schedule = "updates_per_refresh(epochs=2)"
  config.grading.timeout_s = 2.0
  parts = build(config)
  on_training = [
    dataclasses.replace(parts.task.train[i], reference={"folder": str(tmp_path)}) for i in range(8)
  ]
  on_held_out = [dataclasses.replace(p, reference={"folder": ""}) for p in parts.task.held_out]
  task = dataclasses.replace(
    parts.task, train=on_training, held_out=on_held_out, grader="main_test:first_hangs_second_dies"
  )
  train(build(config, task=task), tmp_path / "run")
  (record,) = tiny.records(tmp_path / "run", "train")
  assert record["outcome/timeout"] == record["outcome/crashed"] == 1 / 32
  assert record["outcome/correct"] + record["outcome/wrong"] == 30 / 32
  # The crash is masked out of the loss, all else is in it.
  masked = record["counter/tokens_generated"] - record["counter/tokens_trained"]
  assert 1 <= masked <= 4
  (timed,) = [r for r in read_metrics(tmp_path / "run") if r["phase"] == "train"]
  assert 1.5 < timed["time/grade_seconds"] < 500  # not what the hanging one would take


def crashes_on_training(completion, reference):
  """Has no grade for any response to a training prompt."""
  if reference["train"] and completion not in ("no answer", ""):  # with which a run starts
    raise RuntimeError("no grade")
  return Grade(Outcome.WRONG, 0.0)


@pytest.mark.slow
def test_updates_without_a_loss_token_leave_the_method_s_state_and_have_no_means(tmp_path):
  """Its first entropy, of which a target may be a fraction, is that of what was sampled."""
  config = tiny.config(num_updates=2, warm_start__num_steps=0, advantage="fade(smoothing=1.0)")
  parts = build(config)
  split = lambda name: [
    dataclasses.replace(p, reference={"train": name == "train"}) for p in getattr(parts.task, name)
  ]
  task = dataclasses.replace(
    parts.task,
    train=split("train")[:16],
    held_out=split("held_out"),
    grader="main_test:crashes_on_training",
  )
  train(build(config, task=task), tmp_path / "run")
  first, second = tiny.records(tmp_path / "run", "train")
  assert first["outcome/crashed"] == 1 and first["update/skipped"] == 0
  assert first["advantage/fade_target_entropy"] > 0.5
  assert second["advantage/fade_entropy"] == 2 * first["advantage/fade_target_entropy"]
  absent = "reward/mean", "policy/entropy", "behavior/ratio_max", "loss/clip_fraction"
  assert not {*absent} & first.keys()


def test_only_fields_that_change_no_number_may_change_on_resume(tmp_path):
  workdir, constant = Workdir(tmp_path), "constant(peak=3e-3)"
  first = tiny.config(learning_rate=constant)
  schedule = updates_per_refresh()
  check_config(workdir, first.to_json(), may_differ=may_differ(first, schedule))
  more = tiny.config(
    learning_rate=constant,
    checkpoint__keep=5,
    num_updates=20,
    diagnostics__every=5,
    generation_deadline_s=1.0,
    environment__processes=3,
    environment__memory_mib=512,
  )
  check_config(workdir, more.to_json(), may_differ=may_differ(more, schedule))
  assert "num_updates" not in may_differ(tiny.config(), schedule)  # its learning rate decays
  assert "num_updates" not in may_differ(more, stages(count=2, num_updates=20))
  with pytest.raises(WorkdirError, match=r"batch\.group_size: 4 in the workdir, 8 now"):
    other = tiny.config(learning_rate=constant, batch__group_size=8)
    check_config(workdir, other.to_json(), may_differ=may_differ(other, schedule))
