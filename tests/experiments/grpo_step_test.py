"""The benchmark of a GRPO step: its workloads, and those of the peers."""

import string

import jax
import pytest

from experiments.benchmarks import grpo_step, peers
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import model_settings

WORKLOADS = ("w1", "w2", "w3", "w4", "w5")
# The first is counted by hand; SmolLM2-135M and Qwen2.5-0.5B have as many in their checkpoints.
PARAMETERS = dict(w1=3_279_616, w4=134_515_008, w5=494_032_768)


@pytest.mark.parametrize("workload", PARAMETERS)
def test_networks_have_the_known_number_of_parameters(workload):
  model = transformer(model_settings(grpo_step.make_config(workload).model))
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert sum(x.size for x in jax.tree.leaves(params)) == PARAMETERS[workload]


@pytest.mark.parametrize("workload", ["w1", "w4", "w5"])
def test_an_endless_tokenizer_decodes_every_id_and_cannot_sample_its_stop_token(workload):
  tokenizer = grpo_step.make_tokenizer(workload)
  size = grpo_step.make_config(workload).model.overrides.vocab_size
  assert (tokenizer.vocab_size, tokenizer.stop_ids) == (size, (size,))
  text = tokenizer.decode(range(size))
  assert len(text) == size and set(text) == set(string.ascii_lowercase)
  assert grpo_step.count_e(text, {}).score == pytest.approx(1 / 26, abs=1 / size)
  assert peers.count_e([""], [text]) == [text.count("e")]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_peers_have_the_same_network_and_batch(workload):
  config, theirs = grpo_step.make_config(workload), peers.WORKLOADS[workload]
  network = model_settings(config.model)
  assert (network.compute_dtype, network.head_dim) == ("float32", peers.HEAD_DIM)
  assert network.tied_head
  assert network.qk_norm == (theirs["architecture"] == "Qwen3")
  assert network.qkv_bias == (theirs["architecture"] == "Qwen2")
  ours = dict(
    prompts=config.batch.prompts,
    group_size=config.batch.group_size,
    new=config.max_response_length,
    vocab_size=network.vocab_size,
    width=network.width,
    layers=network.num_layers,
    heads=network.num_heads,
    kv_heads=network.num_kv_heads,
    mlp=network.mlp_width,
    rope_theta=network.rope_theta,
    epsilon=network.norm_epsilon,
  )
  assert ours == {field: theirs[field] for field in ours}


def test_calls_of_a_step_add_up():
  timer = peers.Timer()
  timer.seconds = dict(step=[9, 9, 8], rollout=[3, 3, 2], update=[9, 9, 9, 9, 1.5, 2.5])
  timer.lengths = [9.0, 9.0, 5.0]
  assert timer.per_step("update", 3) == [18, 18, 4]
  with pytest.raises(AssertionError, match="6 calls in 4 steps"):
    timer.per_step("update", 4)
  found = peers.summarize(timer, dict(prompts=2, group_size=4), steps=3)
  assert (found["step_s_median"], found["update_s_median"], found["mean_length"]) == (8, 4, 5)
  assert found["rollout_new_tokens_per_s"] == 8 * 5 / 2
  assert found["update_sequence_tokens_per_s"] == 8 * (32 + 5) / 4
  assert found["step_new_tokens_per_s"] == 8 * 5 / 8
  assert found["peak_rss_mib"] > 10


def test_memory_includes_the_largest_child(monkeypatch):
  kib = {grpo_step.resource.RUSAGE_SELF: 2**20, grpo_step.resource.RUSAGE_CHILDREN: 3 * 2**20}
  usage = lambda who: type("Usage", (), {"ru_maxrss": kib[who]})
  monkeypatch.setattr(grpo_step.resource, "getrusage", usage)
  assert grpo_step.peak_rss_mib() == 3 * 2**10
