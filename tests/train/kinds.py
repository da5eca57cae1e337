"""Kinds of runs that tests try: what a dialogue and a mixture change in a tiny configuration."""

KINDS = ("dialogue", "experts")


def set_kind(c, kind, *, expert_width):
  """Makes a configuration one of a kind of `KINDS`; its network is set already."""
  if kind == "dialogue":
    c.task = dict(name="guess", kwargs=dict(low=1, high=7, turns=3, held_out_size=4))
    c.max_prompt_length, c.max_response_length = 4, 9
    c.environment.name = "guess(low=1, high=7)"
    c.environment.max_turns, c.environment.processes = 3, 1
  elif kind == "experts":
    c.model.overrides.update(num_experts=2, experts_per_token=1, expert_width=expert_width)
    c.model.routing = "replayed"
