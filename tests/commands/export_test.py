"""The command export, of a policy whose checkpoint has more than a text model."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from train import tiny

from rlvr_jax.commands.export import export
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.safetensors import SINGLE
from rlvr_jax.train.setup.build import build

HYBRID = dict(
  num_layers=2, zero_centered_norm=True, attention_gate=True, delta_layers=(True, False),
  delta_num_taps=4, delta_key_heads=2, delta_value_heads=4, delta_key_dim=8, delta_value_dim=6,
)  # fmt: skip


@pytest.mark.slow
def test_what_is_left_out_is_said(tmp_path, capsys):
  config = tiny.config(warm_start__num_steps=0)
  config.model.unlock().overrides.update(HYBRID)
  parts = build(config)
  params = parts.initial.trained()
  save_checkpoint(tmp_path / "source", params, parts.model.config, dtype="float32")
  tensors = load_file(tmp_path / "source" / SINGLE)
  outside = {"mtp.fc.weight": np.ones((2, 2)), "model.visual.pos_embed.weight": np.ones(3)}
  save_file(tensors | outside, tmp_path / "source" / SINGLE)
  again = tiny.config(
    warm_start__num_steps=0, model__preset="", model__checkpoint=str(tmp_path / "source"),
    tokenizer="bytes",
  )  # fmt: skip
  again.model.overrides = {}
  export(build(again), str(tmp_path / "out"), None)
  assert "left out: 2 tensors of vision, audio and multi-token" in capsys.readouterr().out
  found = load_file(tmp_path / "out" / SINGLE)
  assert found.keys() == tensors.keys()
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(found[name], tensor, err_msg=name)
