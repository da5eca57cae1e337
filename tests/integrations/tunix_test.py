"""The plug-in for google-tunix, in its own learner: `make test-tunix`."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("tunix", reason="needs the extra [tunix]: make test-tunix")

import exports_test
from flax import nnx
from tunix import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig, Role
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.function_registry import get_policy_loss_fn
from tunix.rl.rollout.base_rollout import RolloutConfig

from docs import snippets
from rlvr_jax import advantages, geometry, losses, reweighting
from rlvr_jax.integrations import tunix as plugin
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.update import objective

VOCAB, G, PAD, EOS, RATE = 24, 4, 0, 1, 0.2
SIZES = dict(num_layers=1, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8, num_kv_heads=1)


class Characters:
  """A tokenizer of letters: a is 2."""

  def encode(self, text, **kwargs):
    return [ord(letter) - ord("a") + 2 for letter in text]

  def decode(self, ids, **kwargs):
    return "".join(chr(int(i) - 2 + ord("a")) for i in ids if i > 1)

  def bos_id(self):
    return VOCAB - 1

  def eos_id(self):
    return EOS

  def pad_id(self):
    return PAD


def tiny_qwen3(*, tied=False, seed=0):
  config = qwen3.ModelConfig(
    **SIZES, vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=tied
  )
  return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def cluster_for(model, *, temperature=1.0, **batch_sizes):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh)
  training = RLTrainingConfig(
    actor_optimizer=optax.sgd(RATE), eval_every_n_steps=1000, max_steps=100, **batch_sizes
  )
  rollout = RolloutConfig(
    max_tokens_to_generate=6, max_prompt_length=4, kv_cache_size=32, temperature=temperature
  )
  cluster_config = ClusterConfig(
    role_to_mesh=roles, training_config=training, rollout_config=rollout
  )
  return RLCluster(actor=model, tokenizer=Characters(), cluster_config=cluster_config)


def has_early_letter(prompts, completions, **kwargs):
  return [float(any(letter < "f" for letter in text[:2])) for text in completions]


class Update:
  """One update that Tunix made: parameters before and after it, its example and its loss."""

  def __init__(self, before, example):
    self.before, self.example = before, example


def batches_of(prompts):
  return [{"prompts": np.array(batch)} for batch in prompts]


def recorded(learner, batches):
  """Trains, and returns what each update read and wrote."""
  cluster, updates, seen = learner.rl_cluster, [], []
  inner = cluster.update_actor
  state = lambda: jax.tree.map(jnp.copy, nnx.split(cluster.actor_trainer.model)[1])

  def update_actor(examples, *args):
    (example,) = examples
    updates.append(Update(state(), example))
    inner(examples, *args)
    updates[-1].after = state()

  cluster.update_actor = update_actor
  logged = cluster.actor_trainer.rl_metrics_to_log
  cluster.actor_trainer.with_rl_metrics_to_log(
    {**logged, "pg_loss": lambda x: seen.append(x) or np.mean(x)}
  )
  learner.train(batches)
  for update, loss in zip(updates, seen, strict=True):
    update.loss = float(np.mean(loss))
  return updates


def own_logprobs(graphdef, params, example, temperature=1.0):
  """log π and entropy f32[B, T], from the model's logits, without Tunix's functions of training."""
  model = nnx.merge(graphdef, params)
  tokens = jnp.concatenate([example.prompt_ids, example.completion_ids], axis=1)
  real = tokens != PAD
  positions = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
  causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
  logits, _ = model(tokens, positions, None, causal[None] & real[:, None, :])
  start = example.prompt_ids.shape[1]
  log_p = jax.nn.log_softmax(logits[:, start - 1 : -1] / temperature)
  chosen = jnp.take_along_axis(log_p, tokens[:, start:, None], axis=-1)[..., 0]
  return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def own_loss(graphdef, example, loss, *, veto=None, coefficients=None, temperature=1.0):
  """Parameters → the token mean of the loss and its gradient, by `update.objective`."""
  method = types.SimpleNamespace(
    loss=loss, veto=veto, reference_kl=0.0, entropy_bonus=0.0, aggregation="token_mean",
    max_response_length=6, sources=("policy",), teaching=None,
  )  # fmt: skip
  A = example.advantages if coefficients is None else coefficients

  def value(params):
    logprobs, entropy = own_logprobs(graphdef, params, example, temperature)
    batch = plugin.train_batch(example, G, logprobs)
    logprobs, entropy = (x.reshape(batch.mask.shape) for x in (logprobs, entropy))
    own = A.reshape(batch.mask.shape[:2])
    statistics = jax.lax.stop_gradient(objective.loss_statistics(logprobs, batch, own, method))
    constants = objective.Constants(own, statistics, {}, objective.Estimate(own, own, {}))
    total, (weight, _) = objective.surrogate(
      objective.Scores(logprobs, entropy), batch, constants, method=method
    )
    return total / weight

  return jax.jit(jax.value_and_grad(value))


def own_salt(graphdef, params, example, method, temperature=1.0):
  """SALT's coefficients from the gradient of each rollout with respect to an untied head."""

  def loss(kernel, one):
    own = jax.tree.map(lambda x: x, params)
    own["lm_head"]["w"] = own["lm_head"]["w"].replace(kernel)
    logprobs, _ = own_logprobs(graphdef, own, one, temperature)
    return -jnp.sum(jnp.where(one.completion_mask > 0, logprobs, 0.0))

  rows = jax.tree.map(lambda x: x[:, None], example)
  kernel = params["lm_head"]["w"][...]
  features = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(kernel, rows)
  blocks = features.reshape(-1, {"batch": len(features), "group": G}[method.scope], kernel.size)
  grams = jnp.einsum("nid,njd->nij", blocks, blocks, precision="highest")
  A = example.advantages.reshape(blocks.shape[:2])
  return method.apply(A, grams, jnp.ones(A.shape, bool), jax.random.key(0))[0].reshape(-1)


def config_for(loss, **changes):
  return GRPOConfig(
    num_generations=G, num_iterations=2, beta=0.0, loss_agg_mode="token-mean",
    policy_loss_fn=loss, **changes,
  )  # fmt: skip


def example_for(*, seed=0, drift=1.0):
  """Two groups with recorded log-probabilities `drift` nats from uniform."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(2, 7, 2 * G)
  mask = (np.arange(6) < lengths[:, None]).astype(np.int32)
  prompts = np.repeat(np.array([[0, 2, 3, 4], [0, 0, 5, 6]]), G, axis=0)
  return common.TrainExample(
    prompt_ids=jnp.asarray(prompts),
    prompt_mask=jnp.asarray(prompts != PAD),
    completion_ids=jnp.asarray(rng.integers(2, VOCAB, mask.shape) * mask),
    completion_mask=jnp.asarray(mask),
    advantages=jnp.asarray(rng.normal(size=2 * G), jnp.float32),
    ref_per_token_logps=None,
    old_per_token_logps=jnp.asarray(-np.log(VOCAB) + drift * rng.normal(size=mask.shape)),
  )


def value_of(name, model, example, *, temperature=1.0, **changes):
  config = config_for(name, **changes)
  config.temperature = temperature
  loss_fn = get_policy_loss_fn(name)
  return loss_fn(model, example, algo_config=config, pad_id=PAD, eos_id=EOS)


METHODS = {
  "p3o": (losses.p3o(), None),
  "salt": (losses.ppo_clip(), None),
  "mu_grpo": (losses.ppo_clip(epsilon_low=1.0, epsilon_high=4.0), negative_advantage_veto()),
}
PROMPTS = [["ab", "cde"], ["fg", "h"], ["ijk", "lm"]]


@pytest.mark.parametrize("name", METHODS)
def test_updates_of_tunix_have_our_loss_and_gradient(name):
  loss, veto = METHODS[name]
  model = tiny_qwen3()
  graphdef, _ = nnx.split(model)
  updates = recorded(
    GRPOLearner(cluster_for(model), config_for(f"rlvr_jax.{name}"), has_early_letter),
    batches_of(PROMPTS),
  )
  assert len(updates) == 6
  distances = []
  for update in updates:
    example, A = update.example, None
    if name == "salt":
      A = own_salt(graphdef, update.before, example, reweighting.salt())
      assert float(jnp.max(jnp.abs(A - example.advantages))) > 0.1
    own = own_loss(graphdef, example, loss, veto=veto, coefficients=A)
    value, gradient = own(update.before)
    assert update.loss == pytest.approx(float(value), rel=1e-5, abs=1e-5)
    taken = jax.tree.map(lambda a, b: (a - b) / RATE, update.before, update.after)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(taken), strict=True):
      np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-5)
    logprobs, _ = own_logprobs(graphdef, update.before, example)
    distances.append(float(jnp.max(jnp.abs(logprobs - example.old_per_token_logps))))
  # The second update on a batch is off-policy, the first is not.
  assert max(distances[::2]) < 1e-4 and min(distances[1::2]) > 1e-3


@pytest.mark.parametrize("name", ["p3o", "mu_grpo"])
def test_losses_far_from_the_behavior_policy(name):
  """Where the veto acts and ratios are large, and at another temperature."""
  loss, veto = METHODS[name]
  model, example = tiny_qwen3(), example_for(drift=3.0)
  graphdef, params = nnx.split(model)
  value, aux = value_of(f"rlvr_jax.{name}", model, example, temperature=0.7)
  own, _ = own_loss(graphdef, example, loss, veto=veto, temperature=0.7)(params)
  assert float(value) == pytest.approx(float(own), rel=1e-5)
  _, entropy = own_logprobs(graphdef, params, example, 0.7)
  mean = jnp.sum(entropy * example.completion_mask) / jnp.sum(example.completion_mask)
  assert float(aux["entropy"]) == pytest.approx(float(mean), rel=1e-5)
  if name == "mu_grpo":
    assert float(aux["veto/token_fraction"]) > 0.02
  else:
    assert float(aux["loss/ess"]) < 0.5


def test_the_kl_to_the_reference_is_that_of_tunix():
  model = tiny_qwen3()
  example = example_for().replace(ref_per_token_logps=jnp.full((2 * G, 6), -3.0))
  plain, _ = value_of("rlvr_jax.p3o", model, example)
  config = config_for("grpo", kl_loss_mode="low_var_kl")
  config.beta, config.temperature = 0.5, 1.0
  loss = get_policy_loss_fn("rlvr_jax.p3o")
  with_kl, aux = loss(model, example, algo_config=config, pad_id=PAD, eos_id=EOS)
  _, of_tunix = get_policy_loss_fn("grpo")(model, example, config, PAD, EOS)
  assert float(with_kl - plain) == pytest.approx(0.5 * float(of_tunix["kl_loss"]), rel=1e-4)
  assert float(aux["kl"]) == pytest.approx(float(of_tunix["kl"]), rel=1e-5)


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_salt_coefficients_are_those_of_the_heads_gradients(scope):
  model, example = tiny_qwen3(), example_for()
  graphdef, params = nnx.split(model)
  method = reweighting.salt(scope=scope)
  found, metrics = plugin.salt_coefficients(
    model, example, num_generations=G, pad_id=PAD, eos_id=EOS, temperature=0.7, method=method
  )
  expected = own_salt(graphdef, params, example, method, temperature=0.7)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert "reweighting/effective_rollouts" in metrics


def families():
  rope = dict(rope_theta=10_000, norm_eps=1e-6, vocab_size=VOCAB)
  qwen3_config, qwen2_config = qwen3.ModelConfig, qwen2.ModelConfig
  return {
    "qwen3": (qwen3.Qwen3, qwen3_config(**SIZES, **rope)),
    "qwen3 tied": (qwen3.Qwen3, qwen3_config(**SIZES, **rope, use_tied_embedding=True)),
    "qwen2": (qwen2.Qwen2, qwen2_config(**SIZES, **rope, use_tied_embedding=True)),
    "llama3": (llama3.Llama3, llama3.ModelConfig(**SIZES, **rope)),
    "gemma2": (
      gemma.Gemma,
      gemma.ModelConfig(
        **SIZES,
        num_embed=VOCAB,
        final_logit_softcap=2.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(gemma.AttentionType.GLOBAL,),
      ),
    ),
    "gemma3": (
      gemma3.Gemma3,
      gemma3.ModelConfig(**SIZES, num_embed=VOCAB, sliding_window_size=8, param_dtype=jnp.float32),
    ),
  }


@pytest.mark.parametrize("family", families())
def test_hidden_states_through_the_head_are_the_models_logits(family):
  kind, config = families()[family]
  model, example = kind(config, rngs=nnx.Rngs(1)), example_for()
  ids, positions, attention, _ = common.process_ids(
    example.prompt_ids, example.completion_ids, PAD, EOS
  )
  logits, _ = model(ids, positions, None, attention)
  trunk, head = plugin.split_head(model)
  hidden, _ = trunk(ids, positions, None, attention)
  real = np.asarray(ids != PAD)
  np.testing.assert_allclose(head_logits(hidden, head)[real], logits[real], atol=1e-5)
  again, _ = model(ids, positions, None, attention)  # the model itself is as it was
  np.testing.assert_array_equal(logits, again)


def test_the_plugin_says_what_it_exports():
  exports_test.test_a_package_says_what_it_is_and_what_it_exports("rlvr_jax.integrations.tunix")


def test_what_is_not_supported_is_said():
  model, example = tiny_qwen3(), example_for()
  run = lambda name, example: value_of(name, model, example)
  with pytest.raises(ValueError, match="max_seq_token_per_tpu"):
    run("rlvr_jax.p3o", example.replace(segment_ids=example.completion_ids))
  with pytest.raises(ValueError, match="sampler_is_weights"):
    run("rlvr_jax.salt", example.replace(sampler_is_weights=example.old_per_token_logps))
  with pytest.raises(ValueError, match="7 rollouts does not consist of complete groups"):
    run("rlvr_jax.p3o", jax.tree.map(lambda x: x[:7], example))
  with pytest.raises(ValueError, match="proximal policy"):
    plugin.policy_loss(losses.decoupled_ppo())
  salt = functools.partial(
    plugin.salt_coefficients, model, example, num_generations=G, pad_id=PAD, eos_id=EOS
  )
  with pytest.raises(ValueError, match=r"geometry.streaming\(\) or geometry.sketch"):
    salt(gram=geometry.per_rollout())
  with pytest.raises(ValueError, match="scope = 3 rollouts does not divide the 8 rollouts"):
    salt(method=reweighting.salt(scope=3))
  with pytest.raises(ValueError, match="_Module is not Qwen2"):
    plugin.split_head(type("_Module", (nnx.Module,), {})())


def test_the_page_trains_with_fade():
  """docs/tunix.md as it stands; FADE's advantages replayed from rewards and entropies."""
  model = tiny_qwen3()
  graphdef, _ = nnx.split(model)
  found, rewards = snippets.page("tunix.md"), []

  def correct(prompts, completions, **kwargs):
    rewards.append(has_early_letter(prompts, completions))
    return rewards[-1]

  cluster = cluster_for(model)
  scope = {"cluster": cluster, "correct": correct, "batches": batches_of(PROMPTS * 2)}
  code = found.code.replace("learner.train(batches)", "updates = record(learner, batches)")
  scope["record"] = recorded
  exec(code, scope)
  updates, fade = scope["updates"], scope["fade"]
  assert len(updates) == 6

  own = advantages.fade(alpha_max=3.0)
  state = own.init(jnp.float32(scope["initial_entropy"]))
  entropies, solve_rate = [], None
  for number, update in enumerate(updates):
    grouped = jnp.asarray(rewards[number], jnp.float32).reshape(-1, G)
    everywhere = jnp.ones(grouped.shape, bool)
    batch = types.SimpleNamespace(rewards=grouped, correct=grouped, valid=everywhere)
    if number:
      entropy = entropies[number - 2] if number > 1 else state.entropy
      state = own.update(state, None, entropy, solve_rate)
    np.testing.assert_allclose(
      update.example.advantages, own.apply(state, batch).reshape(-1), atol=1e-6
    )
    solve_rate = jnp.mean(grouped)
    _, entropy = own_logprobs(graphdef, update.before, update.example)
    mask = update.example.completion_mask
    entropies.append(jnp.sum(entropy * mask) / jnp.sum(mask))
  assert int(fade.state.updates) == 5
  assert float(fade.state.solve_rate) == pytest.approx(float(state.solve_rate), rel=1e-6)
  assert float(fade.state.entropy) == pytest.approx(float(state.entropy), rel=1e-6)
  assert abs(float(state.entropy) - scope["initial_entropy"]) > 1e-4

  again = plugin.Fade(initial_entropy=1.0)
  again.load_state_dict(json.loads(json.dumps(fade.state_dict())))
  assert again.state_dict() == fade.state_dict()


def test_fade_says_what_is_missing():
  model = tiny_qwen3()
  fade = plugin.Fade(initial_entropy=1.0)
  fade.register("fade_of_this_test")
  with pytest.raises(ValueError, match=r"attach\(learner\)"):
    fade(np.ones(8), num_generations=G)
  config = config_for("rlvr_jax.p3o", advantage_estimator="fade_of_this_test")
  with pytest.raises(ValueError, match="reward_manager='sequence-level'; set reward_manager"):
    fade.attach(GRPOLearner(cluster_for(model), config, has_early_letter))
  config = config_for(
    "rlvr_jax.p3o",
    advantage_estimator="fade_of_this_test",
    reward_manager="fade_of_this_test",
  )
  halves = GRPOLearner(
    cluster_for(model, mini_batch_size=2, train_micro_batch_size=1), config, has_early_letter
  )
  with pytest.raises(ValueError, match="train_micro_batch_size=1 would change FADE's state"):
    fade.attach(halves)
  manager = halves.reward_manager
  with pytest.raises(ValueError, match=r"FADE cannot be used in an evaluation.* without eval_ds"):
    manager(["a"], ["b"], mode="eval")
  manager.reward_fns = [lambda prompts, completions, **kwargs: [0.5]]
  told = r"each reward must be 0 or 1, but rewards \[0.5\] were given"
  with pytest.raises(ValueError, match=told):
    manager(["a"], ["b"], mode="train")
