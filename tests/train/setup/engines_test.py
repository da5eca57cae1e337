"""How many slots a run's engines have."""

import dataclasses

import optax
import pytest
from train import tiny

from rlvr_jax.models import quantized
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup import engines
from rlvr_jax.train.setup.build import batch_shape, build, generates_separately
from rlvr_jax.train.setup.engines import TrainerLayout, choose_slots


@pytest.fixture(scope="module")
def parts():
  return build(tiny.config())


def test_slots_are_those_of_a_batch_or_as_many_as_are_set(parts):
  assert parts.programs.engine.settings.slots == 8 * 4
  few = build(tiny.config(sampling__slots=6, mesh__data=4)).programs.engine
  assert few.settings.slots == 8  # split evenly over devices


def test_training_and_evaluation_share_an_engine_if_they_sample_alike(parts):
  """All engines have the format of the cache."""
  alike = parts.programs
  assert alike.held_out_engine is alike.engine
  programs = build(
    tiny.config(sampling__cache_format="int8", evaluation__sampling__temperature=0.5)
  ).programs
  assert programs.held_out_engine is not programs.engine
  assert programs.engine.settings.cache_format == "int8"
  assert programs.held_out_engine.settings.cache_format == "int8"
  with pytest.raises(ValueError, match=r"cache_format='int4'; allowed: \['', 'int8'\]"):
    build(tiny.config(sampling__cache_format="int4"))


def test_an_evaluation_has_slots_for_its_own_batch(monkeypatch):
  """A refresh has two batches; an evaluation samples one at a time."""
  monkeypatch.setattr(engines, "_memory", lambda mesh: 10**12)  # as a GPU states it, a CPU does not
  programs = build(tiny.config(evaluation__sampling__temperature=0.5)).programs
  assert programs.engine.settings.slots == 2 * 8 * 4
  assert programs.held_out_engine.settings.slots == 8 * 4


def choose_for(config, model, responses, limit, batches=1, cache_format="", cache="pages"):
  """Slots of a run that is trained on another mesh of as many devices."""
  trainer = TrainerLayout(
    sharding.make_mesh(**config.mesh),
    generates_separately(config.generation_mesh),
    frozen=config.lora.rank > 0,
    bytes_per_trained=12.0,
  )
  shape = batch_shape(config)._replace(prompts=responses, group_size=1)
  kind = dict(batches=batches, cache=cache, cache_format=cache_format)
  return choose_slots(config.sampling.slots, shape, model, trainer, limit, **kind)


def test_slots_are_limited_by_the_devices_memory():
  lengths = dict(max_prompt_length=1024, max_response_length=8192)
  config = tiny.config(**lengths, mesh=dict(data=2, fsdp=1, tensor=4))
  model = transformer(
    preset("qwen2.5_7b"), sharding.make_layout(sharding.make_mesh(data=2, tensor=4))
  )
  # 0.13 GiB per slot and device: 4 key/value heads over 4 devices.
  slots = choose_for(config, model, 4096, 95 * 10**9)
  assert slots == pytest.approx(2 * (0.85 * 95e9 - 7.6e9 * (12 + 2) / 4) / 134e6, rel=0.05)
  assert choose_for(config, model, 100, 95 * 10**9) == 100
  # 8 bits and a scale per head of 128; the logits of a token stay.
  rounded = choose_for(config, model, 4096, 95 * 10**9, cache_format="int8")
  assert rounded == pytest.approx(slots * 134 / (134 - 132 * (1 - 66 / 128)), rel=0.01)
  # Half of the blocks are copied by a burst that reads no more.
  blocks = choose_for(config, model, 4096, 95 * 10**9, cache="blocks")
  assert blocks == pytest.approx(slots / 1.5, rel=0.02)
  assert choose_for(config, model, 100, None) == 100  # a CPU has no limit
  # A stream of several batches: as many as it has responses, as long as there is memory.
  assert choose_for(config, model, 100, 95 * 10**9, batches=4) == 400
  assert choose_for(config, model, 100, 95 * 10**9, batches=1000) == slots
  assert choose_for(config, model, 100, None, batches=4) == 100
  with pytest.raises(ValueError, match=r"max_response_length = 8192.*config\.mesh\.fsdp"):
    choose_for(config, model, 100, 16 * 10**9)


def test_memory_holds_the_moments_that_the_optimizer_keeps(parts):
  state = parts.placement.state  # of adamw
  assert engines.bytes_per_trained_parameter(state) == 12
  of_sgd = dataclasses.replace(state, opt_state=optax.sgd(1e-3).init(state.params))
  assert engines.bytes_per_trained_parameter(of_sgd) == 4


@pytest.mark.parametrize(
  ("fields", "kept"),  # bytes per parameter beside the copy to decode with
  [
    (dict(), 12 / 8),
    (dict(lora__rank=8), 2 / 8),
    (dict(generation_mesh=dict(data=2, fsdp=1, tensor=4, same_devices=True)), 12 / 8),
    (dict(generation_mesh=dict(data=2, fsdp=1, tensor=4, same_devices=False)), 2 / 4),
  ],
)
def test_memory_holds_what_training_keeps_on_the_devices(fields, kept):
  """Trained with fsdp=8, sampled with data=2 and tensor=4."""
  lengths = dict(max_prompt_length=1024, max_response_length=8192)
  config = tiny.config(**lengths, mesh=dict(data=1, fsdp=8, tensor=1), **fields)
  network = preset("qwen2.5_7b", param_dtype="bfloat16")
  model = transformer(network, sharding.make_layout(sharding.make_mesh(data=2, tensor=4)))
  slots = choose_for(config, model, 4096, 95 * 10**9)
  assert slots == pytest.approx(2 * (0.85 * 95e9 - 7.6e9 * (kept + 2 / 4)) / 134e6, rel=0.02)


def test_a_rounded_copy_leaves_room_for_the_weights_that_it_is_made_from():
  """On devices of their own, which hold the synced weights in bfloat16 beside those in 8 bits."""
  pytest.importorskip("qwix", reason="the extra quantized")
  separate = dict(data=2, fsdp=1, tensor=4, same_devices=False)
  lengths = dict(max_prompt_length=1024, max_response_length=8192)
  config = tiny.config(**lengths, mesh=dict(data=1, fsdp=8, tensor=1), generation_mesh=separate)
  network = preset("qwen2.5_7b", param_dtype="bfloat16")
  model = transformer(network, sharding.make_layout(sharding.make_mesh(data=2, tensor=4)))
  rounded = quantized.adapt_to_quantized(model, "int8", decode_rounded=True)
  slots = choose_for(config, rounded, 4096, 95 * 10**9)
  assert slots == pytest.approx(2 * (0.85 * 95e9 - 7.6e9 * (2 + 1) / 4) / 134e6, rel=0.01)


def test_slots_that_do_not_fit_are_refused():
  lengths = dict(max_prompt_length=1024, max_response_length=8192)
  model = transformer(
    preset("qwen2.5_7b"), sharding.make_layout(sharding.make_mesh(data=2, tensor=4))
  )

  def choose(slots):
    mesh = dict(data=2, fsdp=1, tensor=4)
    config = tiny.config(**lengths, mesh=mesh, sampling__slots=slots)
    return choose_for(config, model, 4096, 95 * 10**9)

  # Two times (95 − 7.6 · (12 + 2) / 4) GB beside the parameters, for slots of 0.134 GB.
  assert choose(1000) == 1000  # more than the 800 that leave room for temporary buffers
  assert 700 < choose(0) < 900
  with pytest.raises(
    ValueError, match=r"sampling\.slots = 1100: only 10\d\d fit into memory\. A.*Lower"
  ):
    choose(1100)
