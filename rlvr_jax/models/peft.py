"""Adapters in the files of the PEFT library: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from rlvr_jax.models import lora, safetensors
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface_tensors import KERNELS
from rlvr_jax.models.lora import LoraSettings
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.finite import check_finite
from rlvr_jax.ops.layers import DENSE, SPARSE, layers_in, stack_of
from rlvr_jax.storage.folders import locate, new_directory, read_json, write_bytes
from rlvr_jax.types import Params

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_NAMES = {module: name for name, module in KERNELS.items()}
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
    directory: to be created; local or a URL.
    adapters: as `lora.init` returns them, fully on this host.
    settings: the settings that the adapters were made with.
    config: settings of the base network.
    base_model: folder or name of the base's checkpoint, for users of the adapters.
  Raises:
    ValueError: the adapters' shapes do not match `settings` and `config`.
    FileExistsError: `directory` is not empty.
  """
  check_adapters(adapters, settings, config)
  tensors: dict[str, npt.NDArray[Any]] = {}
  for name, pair in adapters["blocks"].items():
    layers = layers_in(stack_of(name), config.kinds)
    for letter, stack in pair.items():
      for layer, matrix in zip(layers, np.asarray(stack), strict=True):
        # Transposed: PEFT multiplies from the left.
        tensors[_tensor_name(layer, name, letter)] = matrix.T.astype(np.float32)
  description = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base_model or None,
    "r": settings.rank,
    "lora_alpha": settings.alpha,
    "lora_dropout": 0.0,
    "target_modules": _target_modules(adapters["blocks"], config),
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
    ValueError: the adapters are for another model, or not of the form W + (α/R)·A·B in every layer,
      or NaN or infinite.
    FileNotFoundError: one of the two files is missing.
  """
  system, folder = locate(directory)
  path, weights = (posixpath.join(folder, name) for name in (CONFIG_FILE, WEIGHTS_FILE))
  for file in (path, weights):
    if not system.exists(file):
      raise FileNotFoundError(
        f"{file} is missing; adapters are read as PEFT's save_pretrained writes them, into"
        f" {CONFIG_FILE} and {WEIGHTS_FILE}, never pickled"
      )
  description = read_json(system, path)
  _check_description(description, path)
  tensors = safetensors.open_file(system, weights)
  names = _adapted_kernels(tensors, config, weights)

  def stack_layers(name, letter):
    numbers = layers_in(stack_of(name), config.kinds)
    layers = [tensors[_tensor_name(i, name, letter)] for i in numbers]
    matrices = [tensor.rows(0, tensor.shape[0]).T for tensor in layers]
    return np.stack(matrices).astype(np.promote_types(layers[0].dtype, np.float32))

  adapters = {
    "blocks": {name: {letter: stack_layers(name, letter) for letter in _MATRICES} for name in names}
  }
  try:
    settings = LoraSettings(
      rank=description.get("r"),  # type: ignore[arg-type]  # checked by LoraSettings
      alpha=description.get("lora_alpha"),  # type: ignore[arg-type]
      targets=rf"blocks/({'|'.join(names)})$",
    )
    check_adapters(adapters, settings, config)
  except ValueError as error:
    raise ValueError(f"{folder}: r and lora_alpha of {CONFIG_FILE}, or shapes: {error}") from error
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
      f" {settings.targets!r}: {differing} (found, needed; the first axis is the layer's). Use the"
      " base and the settings that they were trained with"
    )


def _shapes(tree: Params) -> dict[str, tuple[int, ...]]:
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_description(description: Mapping[str, Any], path: str) -> None:
  """Raises ValueError unless the adapters have the form W + (α/R)·A·B and nothing else."""
  if "peft_type" not in description:
    raise ValueError(f"{path} has no peft_type: it is not a configuration of the PEFT library")
  unsupported = {
    field: value
    for field, value in description.items()
    if field not in _WITHOUT_EFFECT and value not in _ALLOWED.get(field, _UNSET)
  }
  if unsupported:
    raise ValueError(
      f"{path}: {unsupported} is not supported; adapters have to be W + (α/R)·A·B with one R and"
      " one α (peft_type LORA), and nothing else may be trained. Merge these into their base with"
      " PEFT's merge_and_unload, and load that"
    )


def _target_modules(names: Iterable[str], config: TransformerConfig) -> list[str]:
  """Names of the adapted modules, which PEFT compares with the ends of all modules' names."""
  modules = []
  for name in names:
    # Without the layer's number, those of an MLP would also name the projections of experts.
    layers = layers_in(DENSE, config.kinds) if stack_of(name) == DENSE else []
    of_some = [f"layers.{i}.{KERNELS[name]}" for i in layers if layers_in(SPARSE, config.kinds)]
    modules += of_some or [KERNELS[name].split(".")[-1]]
  return modules


def _adapted_kernels(tensors: Mapping[str, Any], config: TransformerConfig, path: str) -> list[str]:
  """Names of the kernels that the file adapts, each in every layer that has it."""
  matches = {name: _TENSOR.fullmatch(name) for name in tensors}
  unknown = [name for name, match in matches.items() if not match or match[2] not in _NAMES]
  if unknown or not matches:
    raise ValueError(
      f"{path} has {unknown[:3] or 'nothing'}, not only adapters of layers' kernels; those are"
      f" base_model.model.model.layers.N.MODULE.lora_A.weight and lora_B.weight for MODULE of"
      f" {sorted(_NAMES)}"
    )
  names = sorted({_NAMES[match[2]] for match in matches.values() if match})
  needed = {
    _tensor_name(i, name, letter)
    for name in names
    for letter in _MATRICES
    for i in layers_in(stack_of(name), config.kinds)
  }
  if needed != set(tensors):
    missing, extra = sorted(needed - set(tensors)), sorted(set(tensors) - needed)
    raise ValueError(
      f"{path}: a model of {config.num_layers} layers has each of {names} adapted wherever it is;"
      f" missing are {missing[:3]}, extra are {extra[:3]}"
    )
  return names


def _tensor_name(layer: int, name: str, letter: str) -> str:
  module, matrix = KERNELS[name], _MATRICES[letter]
  return f"base_model.model.model.layers.{layer}.{module}.{matrix}.weight"
