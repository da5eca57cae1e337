"""The teachers of a run, from `config.teacher`; the policy learns a teacher's distribution."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
from jax.sharding import Mesh

from rlvr_jax import distillation, specs
from rlvr_jax.data import Problem, Tokenizer
from rlvr_jax.data.batches import pad_prompts
from rlvr_jax.data.by_name import make_tokenizer
from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from rlvr_jax.losses import Loss
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.huggingface import load_params, open_tensors
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.models.presets import model_settings
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import MAX_INT32, check_between, check_integer, check_reasons
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.packing import RowLayout
from rlvr_jax.sampling import LEAST_TEMPERATURE
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.checkpointing.checkpoint_files import CheckpointError, read_params, saved_steps
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.problem_filters import describe_long_texts
from rlvr_jax.types import BatchShape, Params, Prompts
from rlvr_jax.update.teaching import Teaching

# Names that config.teacher takes in place of a checkpoint: the policy before the first update, the
# network without adapters, and the policy itself.
INITIAL, BASE, POLICY = "initial", "base", "policy"
_FIELD = "config.teacher.checkpoint"
# Values of the fields of config.teacher if there is no teacher. Its `prompt` has no effect without
# `privileged`.
_UNSET = dict(checkpoint="", checkpoints=(), by="", privileged="", max_prompt_length=0)
_UNSET |= dict(temperature=None, weight=1.0, reward_weight=1.0)
_OF_PROBLEMS = ("answer", "solution")  # fields of every problem, besides the fields of its line


class TeacherError(ValueError):
  """A teacher does not fit the policy, or a problem lacks what the teacher reads."""


class Teacher(NamedTuple):
  """One teacher, before its parameters are read.

  Attributes:
    field: the configuration field that names the teacher's checkpoint, for messages.
    name: the name of the teacher in metrics.
    model: the teacher's functions on the mesh of updates.
    checkpoint: a folder; or `INITIAL`, `BASE` or `POLICY`.
    params: shapes, dtypes and shardings of the parameters that are kept for the teacher; {} if
      none are kept.
    read: reads these parameters; None if the teacher uses the run's own parameters.
    check: raises ValueError unless the checkpoint has these parameters and the given tokenizer;
      reads no weights.
    published: the folder in Hugging Face's layout whose config.json describes the teacher's
      network; "" if there is no such folder; None if the teacher has the policy's network.
  """

  field: str
  name: str
  model: Model
  checkpoint: str
  params: Params
  read: Callable[[], Params] | None = None
  check: Callable[[Tokenizer], None] = lambda tokenizer: None
  published: str | None = None

  def policy(
    self, own: Params, initial: Params, frozen: Params, current: Params
  ) -> tuple[Params, Params]:
    """The teacher's (trained, frozen) parameters for `model.combine`.

    Args:
      own: the result of `read`.
      initial, current: the trained parameters before the first update, and at present.
      frozen: the parameters that are not trained.
    """
    of_run = {INITIAL: (initial, frozen), BASE: (frozen, {}), POLICY: (current, frozen)}
    return of_run.get(self.checkpoint, (own, {}))


class TeacherPrompts(NamedTuple):
  """The prompts of a teacher that reads more than the policy does; the responses are the same.

  Attributes:
    tokenizer: the tokenizer of the run.
    template: the template of the prompt's text, with {question} and {privileged}.
    length: the most tokens of a prompt.
    row_layout: the row layout of the rollouts with these prompts.
  """

  tokenizer: Tokenizer
  template: str
  length: int
  row_layout: RowLayout

  def encode(self, question: str, privileged: str) -> list[int]:
    """The tokens of a prompt.

    Raises:
      ValueError: the prompt has more than `length` tokens.
    """
    text = self.template.replace("{question}", question).replace("{privileged}", privileged)
    tokens = self.tokenizer.encode_prompt(text)
    if len(tokens) > self.length:
      raise ValueError(
        f"a teacher's prompt has {len(tokens)} tokens but config.teacher.max_prompt_length is"
        f" {self.length}: raise this limit, or choose a field with shorter texts for"
        f" config.teacher.privileged. The prompt begins {text[:80]!r}"
      )
    return tokens

  def of_groups(self, groups: Sequence[Group]) -> Prompts:
    """The prompts of groups, left-padded: NumPy arrays, i32[P, S'] and i32[P]."""
    samples = [group.samples[0] for group in groups]
    rows = [self.encode(sample["prompt"], sample["privileged"]) for sample in samples]
    return pad_prompts(rows, self.length, self.tokenizer.pad_id)


def make_teaching(
  name: str,
  settings: ml_collections.ConfigDict,
  *,
  policy_temperature: float,
  vocab_size: int,
  loss: tuple[str, Loss],
) -> Teaching | None:
  """The teacher's part in an update; None without a teacher.

  Args:
    name: `config.distillation`.
    settings: `config.teacher`.
    policy_temperature: `config.policy_temperature`.
    vocab_size: V.
    loss: `config.loss`, and the loss that it names.
  Raises:
    ValueError: there is a teacher without distillation or distillation without a teacher, a number
      is out of range, or fields do not go together. Or the distillation gives each token its own
      advantage, while the loss takes one coefficient per response.
  """
  made = specs.make("config.distillation", distillation, name, distillation.Distillation)
  if not made.distills:
    for field, unset in _UNSET.items():
      value = settings[field]
      if value != unset and value != []:
        raise ValueError(
          f"config.teacher.{field} = {value!r} has no effect with config.distillation = {name!r};"
          " set config.distillation to another name, such as 'opd', or leave"
          f" config.teacher.{field} out"
        )
    return None
  for field in ("weight", "reward_weight"):
    check_between("config.teacher", field, settings[field], low=0.0)
  if not settings.weight and settings.reward_weight != 1:
    raise ValueError(
      f"config.teacher.reward_weight = {settings.reward_weight} has no effect with"
      " config.teacher.weight = 0: such a teacher only adds metrics, and rewards keep the weight 1;"
      " set weight above 0, or reward_weight = 1"
    )
  temperature = settings.temperature
  if temperature is None:
    temperature = policy_temperature
  check_between("config.teacher", "temperature", temperature, low=LEAST_TEMPERATURE)
  named = dict(_pairs(settings.checkpoints))
  _check_fields(settings, named)
  if not settings.checkpoint and not named:
    raise ValueError(
      f"config.distillation = {name!r} needs a teacher; set {_FIELD} to WORKDIR/checkpoints/STEP of"
      f" a run, a folder in Hugging Face's layout, or {INITIAL!r}, or set config.distillation ="
      " 'none'"
    )
  if made.divergence is not None and made.divergence.top_k > vocab_size:
    raise ValueError(
      f"config.distillation = {name!r}: top_k = {made.divergence.top_k} is above the vocabulary of"
      f" {vocab_size} tokens; lower it, or set support = 'all' and top_k = 0"
    )
  if made.advantage is not None and loss[1].of_responses:
    raise ValueError(
      f"config.distillation = {name!r} gives each token its own advantage, but config.loss ="
      f" {loss[0]!r} works on full responses, and needs one coefficient for each; choose another"
      " loss, such as ppo_clip or gspo, or config.distillation = 'opd_score'"
    )
  if made.divergence is not None and (named or settings.privileged):
    field = "checkpoints" if named else "privileged"
    raise ValueError(
      f"config.distillation = {name!r} compares whole distributions in the update, and"
      f"{' takes only the teacher that config.teacher.checkpoint names' if named else ''}"
      f"{'' if named else ' its teacher must read the prompt of the policy'}; set"
      f" config.teacher.{field} = {() if named else ''!r}, or choose a distillation that compares"
      " only sampled tokens, such as 'opd'"
    )
  names = tuple(named) or ("teacher",)
  return Teaching(made, settings.weight, settings.reward_weight, temperature, names)


def _pairs(checkpoints: Any) -> list[tuple[str, str]]:
  """The pairs (name, checkpoint) of `config.teacher.checkpoints`.

  Raises:
    ValueError: an item is not a pair of texts.
  """
  field = "config.teacher.checkpoints"
  remedy = "write (('math', 'initial'),), with a comma after each pair (name, checkpoint)"
  if not isinstance(checkpoints, (tuple, list)):
    raise ValueError(f"{field} = {checkpoints!r} is not a tuple of pairs; {remedy}")
  for pair in checkpoints:
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not all(isinstance(text, str) and text for text in pair):
      raise ValueError(f"{field} has {pair!r}, which is not a pair of texts; {remedy}")
  return [(name, checkpoint) for name, checkpoint in checkpoints]


def _check_fields(settings: ml_collections.ConfigDict, named: Mapping[str, str]) -> None:
  """Raises ValueError if fields of `config.teacher` do not go together.

  Args:
    settings: `config.teacher`.
    named: `config.teacher.checkpoints`, as a mapping.
  """
  teachers = [settings.checkpoint, *named.values()]
  reasons = {
    "checkpoint and checkpoints are both set; leave one of them empty": named
    and settings.checkpoint,
    f"checkpoints = {settings.checkpoints} has a name twice; rename one": len(named)
    < len(settings.checkpoints),
    f"by = {settings.by!r} and checkpoints = {settings.checkpoints} are of use only together; set"
    " both or neither. by is the field of a problem's line that names the problem's teacher;"
    " checkpoints are pairs (name, checkpoint)": bool(settings.by) != bool(named),
    f"checkpoint = {POLICY!r} without privileged is the student itself; set privileged, or choose"
    " another teacher": POLICY in teachers and not settings.privileged,
    f"prompt = {settings.prompt!r} lacks {{privileged}}; put {{privileged}} where the teacher is to"
    " read the privileged text": (settings.privileged and "{privileged}" not in settings.prompt),
    f"max_prompt_length = {settings.max_prompt_length} and privileged = {settings.privileged!r} are"
    " of use only together; set both or neither. max_prompt_length is the most tokens of the"
    " teacher's prompt": bool(settings.privileged) != bool(settings.max_prompt_length),
  }
  check_reasons("config.teacher: ", reasons)


def check_recorded_texts(
  settings: ml_collections.ConfigDict, *, environment: str, recorded: float
) -> None:
  """Raises ValueError if groups of a run lack the fields that their teacher reads.

  Args:
    settings: `config.teacher`.
    environment: `config.environment.name`.
    recorded: `config.sources.recorded.fraction`.
  """
  field = "privileged" if settings.privileged else "by"
  if settings[field] and recorded:
    raise ValueError(
      f"config.teacher.{field} = {settings[field]!r} is a field of the problems that this run"
      f" draws, but the rollouts of config.sources.recorded.fraction = {recorded} lack this field;"
      " leave one of the two unset"
    )
  if settings.privileged and environment:
    raise ValueError(
      f"config.teacher.privileged = {settings.privileged!r} must be put into the prompt, but"
      f" config.environment.name = {environment!r} writes the prompt; set one of them to ''"
    )


def make_prompts(
  settings: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  make_layout: Callable[[int], RowLayout],
  *,
  longest_row: float,
) -> TeacherPrompts | None:
  """The prompts of teachers that read more than the policy; None if they read the policy's prompts.

  Args:
    settings: `config.teacher`.
    tokenizer: the tokenizer of the run.
    make_layout: the most tokens of a prompt → the row layout.
    longest_row: largest number of positions of a row; ∞ without a limit.
  Raises:
    ValueError: the teacher's prompts are too long for a row.
  """
  if not settings.privileged:
    return None
  length = settings.max_prompt_length
  check_integer("config.teacher", "max_prompt_length", length, low=1, high=MAX_INT32)
  layout = make_layout(length)
  if layout.length > longest_row:
    raise ValueError(
      f"config.teacher.max_prompt_length = {length} and config.max_response_length together need"
      f" rows of {layout.length} positions, but attention takes rows of at most {longest_row:g};"
      " lower one of these fields"
    )
  return TeacherPrompts(tokenizer, settings.prompt, length, layout)


def describe_long_teachers(
  teachers: Sequence[Teacher], prompts: TeacherPrompts | None, shape: BatchShape, checkpoint: str
) -> list[str]:
  """Warnings of `describe_long_texts` for teachers with their own network or prompts.

  Args:
    teachers, prompts: the run's teachers and their prompts.
    shape: sizes of the largest batch.
    checkpoint: `config.model.checkpoint`.
  """
  field = "config.max_prompt_length"
  if prompts is not None:
    field = "config.teacher.max_prompt_length"
    shape = shape._replace(max_prompt_length=prompts.length)
  found = {}
  for teacher in teachers:
    folder = checkpoint if teacher.published is None else teacher.published
    if teacher.published is not None or prompts is not None:
      network = f"{teacher.field} = {teacher.checkpoint!r}"
      found[folder] = describe_long_texts(folder, shape, network=network, prompts=field)
  return [text for text in found.values() if text]


def read_problem(settings: ml_collections.ConfigDict, problem: Problem) -> dict[str, str]:
  """The fields to record for the teacher of a problem, by name.

  They are "teacher", the teacher's name, if `by` is set, and "privileged", a text, if `privileged`
  is set.

  Args:
    settings: `config.teacher`.
    problem: the problem of a training batch.
  Raises:
    ValueError: the problem has no such text, or names no teacher of the run.
  """
  found = {}
  if settings.by:
    names = [name for name, _ in settings.checkpoints]
    found["teacher"] = _text_of(problem, "by", settings.by)
    if found["teacher"] not in names:
      raise ValueError(
        f"{_place(problem)}: its field {settings.by!r}, from config.teacher.by, names the teacher"
        f" {found['teacher']!r}, but config.teacher.checkpoints has only {names}"
      )
  if settings.privileged:
    if problem.messages:
      raise ValueError(
        f"{_place(problem)}: its prompt is a list of messages, but config.teacher.privileged ="
        f" {settings.privileged!r} needs a prompt of one text"
      )
    found["privileged"] = _text_of(problem, "privileged", settings.privileged)
  return found


def _text_of(problem: Problem, field: str, name: str) -> str:
  """The text of a problem that `config.teacher.FIELD` names."""
  text = problem.own_reference.get(name)
  if name in _OF_PROBLEMS and text is None:
    text = getattr(problem, name)
  if not isinstance(text, str) or not text.strip():
    known = sorted({*problem.own_reference, *_OF_PROBLEMS})
    raise ValueError(
      f"{_place(problem)}: it has no text in the field {name!r}, which config.teacher.{field}"
      f" names; give every line this field, or choose another field: {known}"
    )
  return text


def _place(problem: Problem) -> str:
  return problem.where or f"the problem {problem.question[:80]!r}"


def make_teachers(
  settings: ml_collections.ConfigDict,
  model: Model,
  mesh: Mesh,
  make_model: Callable[[TransformerConfig], Model],
  *,
  trained: Params,
  has_adapters: bool,
) -> tuple[Teacher, ...]:
  """The teachers of a run; none if `config.teacher` names none.

  Args:
    settings: `config.teacher`.
    model: the model of the policy, on `mesh`.
    mesh: the mesh of updates.
    make_model: a network → its functions on `mesh`.
    trained: shapes, dtypes and shardings of the trained parameters.
    has_adapters: whether the trained parameters are adapters.
  Raises:
    ValueError: there is no such checkpoint, or its vocabulary differs from the policy's.
  """
  named = [(_FIELD, "teacher", settings.checkpoint)] * bool(settings.checkpoint)
  for name, path in _pairs(settings.checkpoints):
    named.append((f"config.teacher.checkpoints of {name!r}", name, path))
  bases = [field for field, _, path in named if path == BASE]
  if bases and not has_adapters:
    raise ValueError(
      f"{bases[0]} = {BASE!r} is the network without its adapters, but config.lora.rank = 0 trains"
      f" the whole network; choose {INITIAL!r} (the policy before the first update) or a checkpoint"
    )
  return tuple(make_teacher(*which, model, mesh, make_model, trained) for which in named)


def make_teacher(
  field: str,
  name: str,
  checkpoint: str,
  model: Model,
  mesh: Mesh,
  make_model: Callable[[TransformerConfig], Model],
  trained: Params,
) -> Teacher:
  """Makes one teacher; see `Teacher` and `make_teachers` for arguments and errors."""
  if checkpoint in (INITIAL, POLICY):
    return Teacher(field, name, model, checkpoint, trained if checkpoint == INITIAL else {})
  if checkpoint == BASE:
    plain = transformer(model.config, sharding.make_layout(mesh))
    return Teacher(field, name, plain, checkpoint, {})
  folder = parse_path(field, checkpoint)
  is_run = folder.name.isdigit() and folder.parent.name == "checkpoints"
  if not is_run and (folder / "checkpoints").is_dir():
    raise ValueError(
      f"{field} = {checkpoint!r} is a run; name one of its checkpoints, so that a resumed run has"
      f" the same teacher: {folder}/checkpoints/STEP, where STEP is one of"
      f" {saved_steps(folder / 'checkpoints')}"
    )
  if is_run:
    network, published = _network_of_run(field, folder)
  else:
    network, published = _published_network(field, checkpoint), checkpoint
  if network.vocab_size != model.config.vocab_size:
    raise ValueError(
      f"{field} = {checkpoint!r} has a vocabulary of {network.vocab_size} tokens, but the policy"
      f" has {model.config.vocab_size}; choose a teacher of the same vocabulary and tokenizer"
    )
  own = make_model(
    dataclasses.replace(
      network,
      compute_dtype=model.config.compute_dtype,
      matmul_precision=model.config.matmul_precision,
      # A published network is not trained; a run's network keeps the dtype of its checkpoint.
      param_dtype=network.param_dtype if is_run else model.config.compute_dtype,
      attention=model.config.attention,  # rows are aligned for this implementation
      expert_products="auto",
    )
  )
  params = sharding.abstract_params(own, mesh)
  if is_run:
    read: Callable[[], Params] = functools.partial(read_params, folder, params)
    find = lambda: None
    others = functools.partial(_tokenizer_of_run, field, folder)
  else:
    read = functools.partial(load_params, checkpoint, params, network)
    find = lambda: open_tensors(checkpoint, params, network)
    others = functools.partial(HuggingFaceTokenizer, checkpoint)

  def check(tokenizer: Tokenizer) -> None:
    try:
      find()
      theirs = others()
    except (ImportError, OSError, ValueError) as error:
      raise ValueError(f"{field} = {checkpoint!r}: {error}") from error
    check_same_tokens(f"{field} = {checkpoint!r}", theirs, tokenizer)

  def read_checked() -> Params:
    try:
      return read()
    except ValueError as error:
      raise CheckpointError(f"{field} = {checkpoint!r}: {error}") from error

  return Teacher(field, name, own, checkpoint, params, read_checked, check, published)


def _published_network(field: str, checkpoint: str) -> TransformerConfig:
  """The network of a folder in Hugging Face's layout."""
  try:
    return checkpoint_config(checkpoint)
  except (OSError, ValueError) as error:
    raise ValueError(
      f"{field} = {checkpoint!r} is neither WORKDIR/checkpoints/STEP of a run, nor a folder in"
      f" Hugging Face's layout ({error}), nor {INITIAL!r}, nor {BASE!r}"
    ) from error


def _network_of_run(field: str, folder: Path) -> tuple[TransformerConfig, str]:
  """(network, `config.model.checkpoint`) of the run that has saved a checkpoint."""
  config = _config_of_run(field, folder)
  try:
    rank, network = config["lora"]["rank"], model_settings(config["model"])
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"{field} = '{folder}': the config.json of its run is wrong: {error}"
    ) from error
  if rank:
    raise ValueError(
      f"{field} = '{folder}' has only adapters; export that run with --mode=export, and name the"
      " folder of the export"
    )
  return network, config["model"]["checkpoint"]


def _tokenizer_of_run(field: str, folder: Path) -> Tokenizer:
  """The tokenizer of the run that has saved a checkpoint."""
  config = _config_of_run(field, folder)
  prompts = ml_collections.ConfigDict(config["prompts"])
  return make_tokenizer(config["tokenizer"], prompts, config["model"]["checkpoint"])


def _config_of_run(field: str, folder: Path) -> Mapping[str, Any]:
  path = folder.parent.parent / "config.json"
  if not folder.is_dir() or not path.exists():
    steps = saved_steps(folder.parent) if folder.parent.is_dir() else []
    raise ValueError(
      f"{field} = '{folder}' does not exist, or its run has no config.json; the run has checkpoints"
      f" of the steps {steps}"
    )
  return read_config(path)


def check_same_tokens(owner: str, theirs: Tokenizer, ours: Tokenizer) -> None:
  """Raises ValueError unless every token of `ours` has the same id in `theirs`.

  Args:
    owner: field and value that name the teacher.
    theirs: the teacher's tokenizer.
    ours: the policy's tokenizer.
  """
  found, expected = theirs.vocabulary(), ours.vocabulary()
  differing = sum(found.get(token) != number for token, number in expected.items())
  if differing:
    token = next(token for token, number in expected.items() if found.get(token) != number)
    raise ValueError(
      f"{owner} has another tokenizer ({type(theirs).__name__}) than the policy: {differing} of"
      f" {len(expected)} tokens differ in their ids; for example, {token!r} is {expected[token]} in"
      f" the policy's tokenizer and {found.get(token)} in the teacher's. Choose a teacher of the"
      " same tokenizer"
    )
