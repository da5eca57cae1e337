"""Adapters in the files of the PEFT library: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import operator
import os
import posixpath
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from rlvr_jax.models import lora, safetensors
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface_export import families_of
from rlvr_jax.models.huggingface_tensors import kernel_modules, row_tables
from rlvr_jax.models.lora import LoraSettings
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.finite import check_finite
from rlvr_jax.ops.layers import DENSE, SPARSE, layers_in, stack_of
from rlvr_jax.storage.folders import locate, new_directory, read_json, write_bytes
from rlvr_jax.types import Params

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_MATRICES = {"a": "lora_A", "b": "lora_B"}
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.([\w.]+)\.lora_[AB]\.weight")

# Fields of a configuration that do not affect W + (α/R)·A·B: about its origin and its training, or
# stated by the tensors' names as well.
_WITHOUT_EFFECT = {
  *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
  *("inference_mode", "lora_dropout", "eva_config", "loftq_config", "ensure_weight_tying"),
  *("megatron_core", "qalora_group_size", "r", "lora_alpha"),
  *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
_ALLOWED = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  # Initializations of A and B that do not change the base, unlike PiSSA and others.
  "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_UNSET: tuple[Any, ...] = (None, False, [], {})


def save_adapters(
  directory: str | os.PathLike[str],
  adapters: Params,
  settings: LoraSettings,
  config: TransformerConfig,
  *,
  base_model: str = "",
) -> None:
  """Writes adapters in the format that `peft.PeftModel.from_pretrained` reads.

  Args:
    directory: the folder to create; local or a URL.
    adapters: as `lora.init` returns them, fully on this host.
    settings: the settings that the adapters were made with.
    config: settings of the base network.
    base_model: folder or name of the base's checkpoint, for users of the adapters.
  Raises:
    ValueError: the adapters' shapes do not match `settings` and `config`.
    FileExistsError: `directory` is not empty.
  """
  check_adapters(adapters, settings, config)
  modules, blocks = _modules(config), lora.flatten(jax.tree.map(np.asarray, adapters["blocks"]))
  adapted = {
    module: pairs
    for module, parts in sorted(modules.items(), key=lambda item: min(item[1]))
    if (pairs := {name: blocks[name] for name in parts if name in blocks})
  }
  tensors: dict[str, npt.NDArray[Any]] = {}
  for module, pairs in adapted.items():
    for row, layer in enumerate(module.layers(config)):
      matrices = _join(jax.tree.map(operator.itemgetter(row), pairs), modules[module])
      for letter, matrix in matrices.items():
        tensors[_tensor_name(layer, module.name, letter)] = matrix.astype(np.float32)
  joined = {module: modules[module] for module, pairs in adapted.items() if len(pairs) > 1}
  description = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base_model or None,
    "r": settings.rank,
    "lora_alpha": settings.alpha,
    "lora_dropout": 0.0,
    "target_modules": _target_modules(adapted, config),
    **_patterns(joined, settings.rank, settings.alpha),
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
  }
  with new_directory(directory) as (system, folder):
    safetensors.write_file(system, posixpath.join(folder, WEIGHTS_FILE), tensors)
    text = json.dumps(description, indent=2).encode()
    write_bytes(system, posixpath.join(folder, CONFIG_FILE), text)


def load_adapters(
  directory: str | os.PathLike[str], config: TransformerConfig
) -> tuple[Params, LoraSettings]:
  """Loads adapters that `save_adapters` or the PEFT library wrote, and their settings.

  Args:
    directory: local or a URL.
    config: settings of the base network.
  Returns:
    Adapters as `lora.init` returns them, NumPy arrays of at least float32.
  Raises:
    ValueError: the adapters are for another model, are not of the form W + (α/R)·A·B in every
      layer, or are NaN or infinite.
    FileNotFoundError: adapters or settings are missing.
  """
  system, folder = locate(directory)
  path, weights = (posixpath.join(folder, name) for name in (CONFIG_FILE, WEIGHTS_FILE))
  for file in (path, weights):
    if not system.exists(file):
      raise FileNotFoundError(
        f"{file} is missing; a folder of adapters must have {CONFIG_FILE} and {WEIGHTS_FILE}, as"
        " PEFT's save_pretrained writes them; pickled adapters are not read"
      )
  description = read_json(system, path)
  _check_description(description, path, config)
  tensors = safetensors.open_file(system, weights)

  def stack_layers(module, letter):
    layers = [tensors[_tensor_name(i, module.name, letter)] for i in module.layers(config)]
    matrices = [tensor.rows(0, tensor.shape[0]).T for tensor in layers]
    return np.stack(matrices).astype(np.promote_types(layers[0].dtype, np.float32))

  blocks: dict[str, Any] = {}
  for module, parts in _adapted_modules(tensors, config, weights).items():
    pair = {letter: stack_layers(module, letter) for letter in _MATRICES}
    rank = description.get("r")
    if _last(module.name) in (description.get("rank_pattern") or {}) and isinstance(rank, int):
      rank *= len(parts)
    if len(parts) > 1 and pair["a"].shape[2] != rank:
      raise ValueError(
        f"{weights}: {module.name} has an adapter of rank {pair['a'].shape[2]}, but r and"
        f" rank_pattern of {CONFIG_FILE} say {rank}"
      )
    blocks |= _split(pair, parts, description.get("r"), f"{weights}: {module.name}")
  names = sorted(blocks)
  adapters = {"blocks": lora.nest({name: blocks[name] for name in names})}
  try:
    settings = LoraSettings(
      rank=description.get("r"),  # type: ignore[arg-type]  # checked by LoraSettings
      alpha=description.get("lora_alpha"),  # type: ignore[arg-type]
      targets=rf"blocks/({'|'.join(names)})$",
    )
    check_adapters(adapters, settings, config)
  except ValueError as error:
    raise ValueError(
      f"{folder}: r or lora_alpha of {CONFIG_FILE}, or a shape, is invalid: {error}"
    ) from error
  check_finite(folder, adapters)
  return adapters, settings


def check_adapters(adapters: Params, settings: LoraSettings, config: TransformerConfig) -> None:
  """Raises ValueError unless the adapters' shapes match `settings` and `config`."""
  key = jax.random.key(0)
  base = jax.eval_shape(transformer(config).init, key)
  needed = _shapes(jax.eval_shape(lambda key: lora.init(key, base, settings), key))
  actual = _shapes(adapters)
  differing = {
    name: (actual.get(name), needed.get(name))
    for name in sorted(actual | needed)
    if actual.get(name) != needed.get(name)
  }
  if differing:
    raise ValueError(
      f"adapters do not fit the model with rank = {settings.rank} and targets ="
      f" {settings.targets!r}: {differing} (shape found, shape needed; the first axis counts"
      " layers). Use the base and the settings that the adapters were trained with"
    )


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


Parts = Mapping[str, npt.NDArray[np.int64] | None]
Matrices = dict[str, npt.NDArray[Any]]


class Module(NamedTuple):
  """A published module (see `huggingface_tensors`) that the layers of one stack have."""

  name: str  # the module's name within a layer
  stack: str  # see `ops.layers`

  def layers(self, config: TransformerConfig) -> list[int]:
    """The indices of the layers that have this module."""
    return layers_in(self.stack, config.kinds)


def _modules(config: TransformerConfig) -> dict[Module, Parts]:
  """Published module → names of its kernels → each kernel's rows in the module; None: all rows."""
  stacks = {name: stack_of(name.split("/")[0]) for name in kernel_modules(config)}
  names = {Module(theirs, stacks[name]): name for name, theirs in kernel_modules(config).items()}
  modules: dict[Module, Parts] = {module: {name: None} for module, name in names.items()}
  for whole, parts in row_tables(config, families_of(config)[0]).items():
    for stack in dict.fromkeys(stacks.values()):
      of_parts = {Module(part, stack): rows for part, rows in parts.items()}
      if all(module in names for module in of_parts):
        for module in of_parts:
          del modules[module]
        joined = {names[module]: rows for module, rows in of_parts.items()}
        modules[Module(whole, stack)] = joined
  return modules


def _join(pairs: Mapping[str, Matrices], parts: Parts) -> Matrices:
  """PEFT's matrices of a module in a layer, made from its kernels' matrices.

  A module with one kernel, or with one adapted kernel, has A [R, D] and B [rows, R]. A module with
  several adapted kernels has A [k·R, D] and B [rows, k·R], with a block for each of the module's k
  kernels. The block of a kernel that is not adapted is 0.
  """
  some = next(iter(pairs.values()))
  none = np.zeros_like(some["a"]).T
  names = list(pairs if len(pairs) == 1 else parts)
  rank = some["a"].shape[1]
  a = np.concatenate([pairs[name]["a"].T if name in pairs else none for name in names])
  rows = {
    name: np.arange(some["b"].shape[1]) if rows is None else rows for name, rows in parts.items()
  }
  b = np.zeros((sum(map(len, rows.values())), len(a)), a.dtype)
  for k, name in enumerate(names):
    if name in pairs:
      b[rows[name], k * rank : (k + 1) * rank] = pairs[name]["b"].T
  return {"a": a, "b": b}


def _split(pair: Matrices, parts: Parts, rank: Any, owner: str) -> dict[str, Matrices]:
  """Kernel name → adapter in all layers, for the kernels of a module: the inverse of `_join`.

  If the module's adapter has rank R, its kernels share A. A kernel that the adapter does not change
  gets no adapter.

  Args:
    pair: A [layers, D, R or k·R] and B [layers, R or k·R, rows].
  Raises:
    ValueError: the adapter has another rank than R, and does not consist of one block per kernel.
  """
  a, b = pair["a"], pair["b"]
  of_kernels = {name: b if rows is None else b[:, :, rows] for name, rows in parts.items()}
  if len(parts) == 1 or a.shape[2] == rank or not isinstance(rank, int):
    changed = [name for name, of_kernel in of_kernels.items() if np.any(of_kernel)]
    return {name: {"a": a, "b": of_kernels[name]} for name in changed or parts}
  found = {}
  for k, (name, of_kernel) in enumerate(of_kernels.items()):
    own = slice(k * rank, (k + 1) * rank)
    if a.shape[2] != len(parts) * rank or np.any(np.delete(of_kernel, own, axis=1)):
      raise ValueError(
        f"{owner} has an adapter of rank {a.shape[2]}, not {len(parts)} adapters of rank {rank},"
        f" one for each of {list(parts)}; merge it into its base with PEFT's merge_and_unload, and"
        " load the merged model"
      )
    if np.any(a[:, :, own]):  # else it is not adapted
      found[name] = {"a": a[:, :, own], "b": of_kernel[:, own]}
  return found


def _patterns(kernels: Mapping[Module, Collection[str]], rank: Any, alpha: Any) -> dict[str, Any]:
  """PEFT's rank_pattern and alpha_pattern: k·R and k·α for modules whose adapter joins k kernels.

  Args:
    kernels: modules → the names of their kernels.
  """
  counts = {_last(module.name): len(names) for module, names in kernels.items() if len(names) > 1}
  if not counts:
    return {}
  times = lambda number: {module: number * count for module, count in counts.items()}
  return {"rank_pattern": times(rank), "alpha_pattern": times(alpha)}


def _last(module: str) -> str:
  return module.split(".")[-1]


def _check_description(
  description: Mapping[str, Any], path: str, config: TransformerConfig
) -> None:
  """Raises ValueError unless the adapters have the form W + (α/R)·A·B and nothing else."""
  if "peft_type" not in description:
    raise ValueError(f"{path} has no peft_type: it is not a configuration of the PEFT library")
  numbers = description.get("r"), description.get("lora_alpha")
  are_numbers = all(isinstance(number, (int, float)) for number in numbers)
  of_joined = _patterns(_modules(config), *numbers) if are_numbers else {}
  is_joined = lambda field, value: (
    isinstance(value, dict) and value.items() <= of_joined.get(field, {}).items()
  )
  unsupported = {
    field: value
    for field, value in description.items()
    if field not in _WITHOUT_EFFECT
    and value not in _ALLOWED.get(field, _UNSET)
    and not is_joined(field, value)
  }
  patterns = [description.get(field) or {} for field in ("rank_pattern", "alpha_pattern")]
  if not unsupported and patterns[0].keys() != patterns[1].keys():
    unsupported = {"rank_pattern": patterns[0], "alpha_pattern": patterns[1]}
  if unsupported:
    raise ValueError(
      f"{path}: {unsupported} is not supported; each adapted kernel must be W + (α/R)·A·B, all with"
      " the same R and α (peft_type LORA), and nothing else may be trained. Merge the adapters into"
      " their base with PEFT's merge_and_unload, and load the merged model"
    )


def _target_modules(adapted: Collection[Module], config: TransformerConfig) -> list[str]:
  """Names of the adapted modules, which PEFT compares with the ends of all modules' names."""
  others = {module.name for module in _modules(config) if module not in adapted}
  has_experts = bool(layers_in(SPARSE, config.kinds))
  targets: list[str] = []
  for module in adapted:
    # The names of an MLP's modules without layer numbers would also match the experts' modules.
    if module.name in others or (module.stack == DENSE and has_experts):
      targets += [f"layers.{i}.{module.name}" for i in module.layers(config)]
    else:
      targets.append(_last(module.name))
  return list(dict.fromkeys(targets))


def _adapted_modules(
  tensors: Mapping[str, Any], config: TransformerConfig, path: str
) -> dict[Module, Parts]:
  """The modules that a file adapts; raises ValueError if a module lacks adapters in some layers."""
  modules = _modules(config)
  names = {module.name for module in modules}
  matches = {name: _TENSOR.fullmatch(name) for name in tensors}
  unknown = [name for name, match in matches.items() if not match or match[2] not in names]
  if unknown or not matches:
    raise ValueError(
      f"{path} has {unknown[:3] or 'no tensors'}; it must have adapters of layers' kernels and"
      " no other tensors. The tensors of an adapter are named"
      " base_model.model.model.layers.N.MODULE.lora_A.weight and lora_B.weight; MODULE is one of"
      f" {sorted(names)}"
    )
  found = {(match[2], int(match[1])) for match in matches.values() if match}
  is_adapted = lambda module: any((module.name, i) in found for i in module.layers(config))
  adapted = {module: parts for module, parts in modules.items() if is_adapted(module)}
  needed = {
    _tensor_name(i, module.name, letter)
    for module in adapted
    for letter in _MATRICES
    for i in module.layers(config)
  }
  if needed != set(tensors):
    missing, extra = sorted(needed - set(tensors)), sorted(set(tensors) - needed)
    raise ValueError(
      f"{path}: adapters of {sorted({module.name for module in adapted})} must be given for every"
      f" one of the model's {config.num_layers} layers that has the module; missing"
      f" are {missing[:3]}, extra are {extra[:3]}"
    )
  return adapted


def _tensor_name(layer: int, module: str, letter: str) -> str:
  return f"base_model.model.model.layers.{layer}.{module}.{_MATRICES[letter]}.weight"
