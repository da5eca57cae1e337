"""Tiny runs whose functions are recorded: `runs.py:VARIANT` is a configuration file."""

from train.kinds import set_kind

from rlvr_jax.configs import base

LAG = "asynchronous(max_lag=2)"
# Variant → what it changes, beside what `set_kind` does.
VARIANTS = {
  "plain": {},
  "dialogue": {},
  "experts": {},
  "threads": dict(schedule=LAG, num_updates=10),
  "fleet": dict(schedule=LAG, num_updates=16, fleet__samplers=True),
}
WITH_THREADS = ("threads", "fleet")


def get_config(variant):
  c = base.get_config()
  settings = dict(
    num_updates=4,
    schedule="on_policy",
    max_prompt_length=8,
    max_response_length=4,
    warm_start__num_steps=2,
    warm_start__batch_size=4,
    batch__prompts=4,
    batch__group_size=2,
    sampling__slots=4,
    evaluation__every=100,
    evaluation__batch_prompts=4,
    grading__num_workers=1,
    checkpoint__every=100,
    logging__rollouts_every=100,
  )
  with c.unlocked():
    c.task = dict(name="train.sums:sums", kwargs={})
    c.model.overrides.update(num_layers=1, width=16, mlp_width=16, unroll_layers=1)
  changed = settings | VARIANTS[variant]
  c.update_from_flattened_dict({k.replace("__", "."): v for k, v in changed.items()})
  with c.unlocked():
    set_kind(c, variant, expert_width=8)
  return c
