"""What a command line and a recipe may set, and how their mistakes are answered."""

import functools
import json
import pathlib
import re
import threading

import pytest
from absl import flags
from ml_collections import config_flags
from train import tiny

from configs import quickstart
from rlvr_jax.train.setup import config_file
from rlvr_jax.train.setup.build import build, make_task

# Of ml_collections' import of a configuration.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RECIPE = """from configs import base

def get_config():
  c = base.get_config()
  {}
  return c
"""


def parsed(*arguments, recipe="configs/quickstart.py"):
  """The configuration that a command line stands for, read as the program reads it."""
  values, argv = flags.FlagValues(), ["main", f"--config={recipe}", *arguments]
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
  flags.DEFINE_bool("trust_run", False, "", flag_values=values)
  values["config"].parser = config_file.Parser("config", argv)
  values(argv)
  return values.config


def refused(*arguments, **how):
  with pytest.raises(SystemExit) as ended:
    parsed(*arguments, **how)
  return str(ended.value)


def test_a_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for named in ("configs/full_size/base.py:x", "full_size/base:x"):
    path, _, argument = config_file.installed_recipe(named).rpartition(":")
    assert pathlib.Path(path).samefile(tiny.ROOT / "configs/full_size/base.py") and argument == "x"
  others = ("configs/no_such.py", "quickstart.py", "/configs/quickstart.py", "../configs/grpo")
  for other in (*others, "no_such", "configs/grpo"):
    assert config_file.installed_recipe(other) == other
  (tmp_path / "configs").mkdir()
  (tmp_path / "configs" / "grpo.py").touch()  # one's own goes before
  assert config_file.installed_recipe("configs/grpo.py") == "configs/grpo.py"
  (tmp_path / "quickstart").mkdir()  # a run's folder, say
  assert parsed(recipe="quickstart").task.kwargs.prompt == "{expression} = "


QUICKSTART = str(tiny.ROOT / "configs/quickstart.py")
TASK = "--config.task.name=train.setup.config_file_test:own_task"


@pytest.mark.parametrize(
  ("argument", "word"),
  [
    ("num_updates=two", "an integer, such as 2"),
    ("overlong.buffer=", "an integer, such as 2"),
    ("max_gradient_norm=high", "a number, such as 0.5"),
    ("dynamic_sampling.enabled=maybe", "True or False"),
    ("batch.promts=8", 'did you mean "prompts"'),
    ("batch.micro_batches=4", "no field 'micro_batches'"),
    ("promts=8", "no field 'promts'"),
  ],
)
def test_a_wrong_field_or_value_is_named(argument, word):
  with pytest.raises(ValueError) as told:
    config_file.read([f"--config={QUICKSTART}", f"--config.{argument}"])
  assert word in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
  ("arguments", "word"),
  [
    ([TASK, "--config.task.kwargs.names.first=3"], "no field 'first' yet; set it as a dict"),
    (["--config.task.kwargs.promt=x"], "did you mean 'prompt'?"),
    (["--config.task.name=publishd"], "did you mean 'published'"),
    (["--config.task.name=published", "--config.task.kwargs.settings=3"], "takes no 'settings'"),
    (["--config.task.name=3"], "'3' is not a component"),
    (["--config.learning_rate.peak=1e-4"], "set it as one string"),
    (["--config.grading.grader.seconds=3"], "set it as one string"),
    (["--config.model.overrides.compute_type=bfloat16"], "did you mean one of ['compute_dtype']"),
    (["--config.model.overrides.rope_scaling=3"], "is a RopeScaling | YarnScaling"),
    (["--config.model.overrides.head_dim.x=3"], "as a whole; set config.model.overrides.head_dim"),
  ],
)
def test_a_wrong_keyword_of_a_component_is_named(arguments, word):
  assert word in refused(*arguments)


# --- a run's own configuration --------------------------------------------------------------------


RUNS = {  # recipe → what is set on the command line
  "configs/quickstart.py": ("--config.loss=gspo", "--config.batch.prompts=4"),
  "configs/salt_dapo.py": ("--config.evaluation.ks=(1, 2)", "--config.model.overrides.remat=full"),
  "configs/gsm8k.py": (
    "--config.task.kwargs.data_dir=2024",
    "--config.grading.extra=(('a:b', 0.5),)",
    "--trust_run",
  ),
}


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_s_configuration_is_read_as_it_was(recipe, tmp_path):
  was = parsed(*RUNS[recipe], recipe=recipe)
  path = tmp_path / "config.json"
  path.write_text(was.to_json_best_effort())
  trusted = [argument for argument in RUNS[recipe] if argument == "--trust_run"]
  again = parsed(*trusted, recipe=path)
  assert again.to_json_best_effort() == path.read_text() and again.is_locked
  assert again.task.to_dict() == was.task.to_dict()
  assert again.grading.to_dict() == was.grading.to_dict()  # tuples within tuples too
  fields = ("--config.seed=7", "--config.model.overrides.unroll_layers=3")
  changed = parsed(*fields, *trusted, recipe=path)
  assert (changed.seed, changed.model.overrides.unroll_layers) == (7, 3)
  assert changed.loss == was.loss and changed.evaluation.ks == was.evaluation.ks


OUTSIDE = {  # field → what names code that the package does not have
  "advantage": "os:system(command='touch pwned')",
  "schedule": "a.b:c",
  "grading.extra": [["format", 0.1], ["mine:grader", 0.5]],
  "grading.grader": "weighted(parts=('gsm8k', 'mine:grader(x=1)'))",
  "grading.unsandboxed_code": "I accept that generated code runs with my rights",
  "task.kwargs": {"tasks": [{"name": "mine:task", "kwargs": {}}]},
}


@pytest.mark.parametrize("field", OUTSIDE)
def test_a_run_s_configuration_is_code_that_needs_trust(field, tmp_path):
  values = json.loads(quickstart.get_config().to_json_best_effort())
  *sections, name = field.split(".")
  functools.reduce(dict.__getitem__, sections, values)[name] = OUTSIDE[field]
  path = tmp_path / "config.json"
  path.write_text(json.dumps(values))
  with pytest.raises(SystemExit) as refused:
    parsed(recipe=path)
  assert re.search(rf"names code outside of rlvr_jax.*\n  config\.{field}.* = ", str(refused.value))
  assert refused.value.args[0].endswith("add --trust_run if you trust the author of that run")
  trusting = parsed("--trust_run", recipe=path)
  assert (
    trusting.to_json_best_effort() == parsed("--trust_run=true", recipe=path).to_json_best_effort()
  )
  with pytest.raises(SystemExit):
    parsed("--trust_run=false", recipe=path)


def test_a_run_of_the_package_s_own_components_asks_nothing(tmp_path):
  path = tmp_path / "config.json"
  for recipe in (tiny.ROOT / "configs").glob("[a-z]*.py"):
    path.write_text(parsed(recipe=recipe).to_json_best_effort())
    parsed(recipe=path)


@pytest.mark.parametrize(
  ("text", "why"), [("[1, 2]", "a JSON list"), ("null", "a JSON"), ("{", "Expecting property name")]
)
def test_what_is_no_configuration_is_told(text, why, tmp_path):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(SystemExit, match=f"cannot be read as a run's configuration: .*{why}"):
    parsed(recipe=tmp_path / "config.json")


def arguments_for(*argv):
  return config_file._with_config_of_run(["main", *argv])[1:]


@pytest.mark.parametrize("of", ["", "checkpoints", "checkpoints/3", "warm_start/40"])
def test_an_evaluation_takes_the_configuration_of_the_run(of, tmp_path):
  (tmp_path / "config.json").touch()
  (tmp_path / of).mkdir(parents=True, exist_ok=True)
  given = ["--mode=eval", "--config.seed=2", "--checkpoint", str(tmp_path / of)]
  assert arguments_for(*given) == [f"--config={tmp_path}/config.json", *given]
  for other in (["--config=mine.py", *given], ["--mode=train", *given[1:]], given[:2]):
    assert arguments_for(*other) == other


def test_a_sampler_waits_for_the_run_of_its_trainer(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(config_file, "_POLL_S", 0.02)
  given = ["--mode=sample", f"--workdir={tmp_path}"]
  trainer = threading.Timer(0.1, (tmp_path / "config.json").touch)
  trainer.start()
  assert arguments_for(*given) == [f"--config={tmp_path}/config.json", *given]
  (line,) = capsys.readouterr().out.splitlines()
  assert line.startswith(f"waits for a run: {tmp_path} has no config.json yet; is it the trainer's")
  assert arguments_for("--config=mine.py", *given) == ["--config=mine.py", *given]


def test_no_run_and_no_configuration(tmp_path):
  for checkpoint, told in (
    (tmp_path / "a/b/c", "nor the two folders above it have a run's"),
    ("s3://b/run", "bucket"),
  ):
    with pytest.raises(ValueError, match=rf"--checkpoint.*{told}"):
      arguments_for("--mode=export", f"--checkpoint={checkpoint}")


def test_a_file_that_does_not_exist_is_told_the_recipes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  told = refused(recipe="configs/quickstrt.py")
  assert "did you mean quickstart?" in told and "full_size/base, " in told
  assert "did you mean full_size/grpo_qwen35_4b?" in refused(recipe="full_size/grpo_qwen35_5b")
  assert "did you mean" not in refused(recipe="nope.py")


# --- components -----------------------------------------------------------------------------------


def test_any_hyper_parameter_can_be_set_and_another_name_leaves_nothing_behind():
  c = parsed("--config.loss=ppo_clip(dual_clip=3.0)", "--config.advantage", "fade(alpha_max=2.0)")
  assert (c.loss, c.advantage) == ("ppo_clip(dual_clip=3.0)", "fade(alpha_max=2.0)")
  assert parsed("--config.loss=cispo", recipe="configs/dapo.py").loss == "cispo"


# --- the task's keywords --------------------------------------------------------------------------


def test_keywords_of_the_task_that_the_recipe_does_not_list():
  gsm8k = ("configs/gsm8k.py", "--config.task.kwargs.data_dir", "2024")
  c = parsed(
    *gsm8k[1:],
    "--config.task.kwargs.held_out_split=train",
    "--config.task.kwargs.max_difficulty=3",
    "--config.task.kwargs.max_question_characters=90",
    recipe=gsm8k[0],
  )
  kwargs = c.task.kwargs.to_dict()
  assert kwargs["data_dir"] == "2024" and kwargs["held_out_split"] == "train"
  assert kwargs["max_difficulty"] == 3.0 and isinstance(kwargs["max_difficulty"], float)
  assert kwargs["max_question_characters"] == 90 and kwargs["warm_start_size"] == 128
  assert c.is_locked and c.task.kwargs.is_locked


def test_fields_of_the_model_that_the_recipe_does_not_list():
  recipe = "experiments/mu_grpo/config.py"  # whose overrides are a dict of its own
  fields = ("compute_dtype=bfloat16", "norm_epsilon=1e-5", "tied_head=False", "query_scale=2")
  given = [f"--config.model.overrides.{field}" for field in fields]
  found = parsed(*given, recipe=recipe).model.overrides
  assert (found.compute_dtype, found.norm_epsilon, found.tied_head) == ("bfloat16", 1e-5, False)
  assert found.query_scale == 2.0 and found.width == parsed(recipe=recipe).model.overrides.width
  full_size = "configs/full_size/p3o_qwen3_4b.py"
  found = parsed("--config.model.overrides.attention=dense", recipe=full_size).model.overrides
  assert found.attention == "dense" and found.remat == "full"


def test_under_another_task_s_name_the_recipe_s_keywords_are_dropped():
  c = parsed("--config.task.name=published", "--config.task.kwargs.dataset=gsm8k",
             "--config.task.kwargs.data_dir=7")  # fmt: skip
  assert c.task.to_dict() == {"name": "published", "kwargs": {"dataset": "gsm8k", "data_dir": "7"}}
  with pytest.raises(
    ValueError, match=r"config\.task\.kwargs\.data_dir = '7': there is no such file in /"
  ):
    make_task(c.task)
  settings = {"min_terms": 2, "max_terms": 2}
  c = parsed("--config.task.name=reasoning_gym", f"--config.task.kwargs.settings={settings}",
             "--config.task.kwargs.dataset=chain_sum", recipe="configs/gsm8k.py")  # fmt: skip
  assert c.task.kwargs.to_dict() == {"settings": settings, "dataset": "chain_sum"}
  c = parsed("--config.task.name=reasoning_gym", "--config.task.kwargs.train_size=9")
  before = quickstart.get_config().task.kwargs.to_dict()
  assert c.task.kwargs.to_dict() == before | {"train_size": 9}


def test_a_task_of_one_s_own():
  c = parsed(
    "--config.task.name=train.setup.config_file_test:own_task",
    "--config.task.kwargs.size=3",
    "--config.task.kwargs.scale=0.5",
    "--config.task.kwargs.names=('a', 'b')",
  )
  assert c.task.kwargs.to_dict() == {"size": 3, "scale": 0.5, "names": ("a", "b")}


def test_arguments_of_a_task_have_one_place():
  c = parsed("--config.task.name=train.sums:sums(size=3)")
  with pytest.raises(ValueError, match=r"has arguments.*config\.task\.kwargs\.size"):
    make_task(c.task)


def own_task(*, size: int, scale: float = 1.0, names=None):
  raise NotImplementedError


# --- recipes -------------------------------------------------------------------------------------


def test_a_recipe_that_returns_nothing(tmp_path):
  recipe = tmp_path / "recipe.py"
  recipe.write_text("def get_config():\n  c = 1\n")
  assert refused(recipe=str(recipe)).endswith("returns None; end it with: return c")


@pytest.mark.parametrize(
  ("line", "word"),
  [
    ("c.batch.promts = 8", "did you mean 'prompts'?"),
    ("c.loss.name = 'p3o'", "'str' object has no attribute 'name'"),
  ],
)
def test_a_recipe_that_invents_a_field(line, word, tmp_path):
  recipe = tmp_path / "mine.py"
  recipe.write_text(RECIPE.format(line))
  with pytest.raises(ValueError) as told:
    config_file.read([f"--config={recipe}", "--config.num_updates=2"])
  assert word in str(told.value) and str(recipe) in str(told.value)


def test_a_recipe_that_lacks_a_field(tmp_path):
  recipe = tmp_path / "mine.py"
  recipe.write_text(RECIPE.format("c.batch = dict(prompts=8)"))
  with pytest.raises((AttributeError, KeyError)) as missing:
    build(config_file.read([f"--config={recipe}"]))
  told = config_file.missing_field(missing.value)  # which main prints
  assert told.startswith("the configuration has no field 'group_size'; a recipe that sets")


def test_other_mistakes_of_a_recipe_stay_as_they_are(tmp_path):
  recipe = tmp_path / "mine.py"
  recipe.write_text("def get_config():\n  return 1 + None\n")
  with pytest.raises(flags.IllegalFlagValueError, match="unsupported operand"):
    parsed(recipe=str(recipe))


WEIGHTED, BY_REFERENCE = "weighted", "by_reference"


@pytest.mark.parametrize(
  ("place", "named"),
  [
    (lambda v: v["task"].update(kwargs={"grader": WEIGHTED}), "task.kwargs.grader"),
    (
      lambda v: v["task"].update(kwargs={"parts": {"a": {"kwargs": {"grader": BY_REFERENCE}}}}),
      "task.kwargs.parts.a.kwargs.grader",
    ),
    (lambda v: v["evaluation"].update(grader=WEIGHTED), "evaluation.grader"),
    (
      lambda v: v["grading"].update(grader=f"combined(first={BY_REFERENCE!r})"),
      "grading.grader[0]",
    ),
    (lambda v: v["grading"].update(extra=[[WEIGHTED, 0.1]]), "grading.extra[0][0]"),
  ],
)
def test_graders_that_a_run_s_data_name_need_trust(place, named, tmp_path):
  values = json.loads(quickstart.get_config().to_json_best_effort())
  place(values)
  path = tmp_path / "config.json"
  path.write_text(json.dumps(values))
  with pytest.raises(SystemExit, match=re.escape(f"config.{named} = ")):
    parsed(recipe=path)


def test_flags_of_a_flag_file_are_seen(tmp_path):
  file = tmp_path / "flags"
  file.write_text("--config=grpo\n--trust_run\n")
  argv = ["main", f"--flagfile={file}"]
  assert config_file.recipe_path(argv) == "grpo" and config_file.is_trusting(argv)
