"""The shared base of all recipes: every field, with its unit and default.

A recipe starts from `base.get_config()` and states only what differs. `python -m rlvr_jax.main
--config=configs/base.py` alone is GRPO on two-number sums.
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from rlvr_jax.sampling import Sampling


def get_config() -> ConfigDict:
  c = ConfigDict()
  c.seed = 0  # decides first parameters, data order and sampling
  c.num_updates = 200  # updates of the policy in all

  c.task = dict(
    name="reasoning_gym",  # or your own task, "my_module:factory"; kwargs are its arguments
    kwargs=dict(
      dataset="chain_sum",
      settings=dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2),
      train_size=1_000_000,  # problems; generated on access
      warm_start_size=256,
      held_out_size=256,
      train_seed=1,
      warm_start_seed=2_000_000,
      held_out_seed=3_000_000,
      prompt="{question}",
      solution="{answer}",
    ),
  )
  c.tokenizer = "bytes"  # "checkpoint": model.checkpoint's; or a folder with tokenizer.json
  c.prompts = dict(
    format="plain",  # plain; chat: through the tokenizer's chat template
    system="",  # system message of the chat format
    template="",  # file with a Jinja chat template, in place of the tokenizer's
    tools="",  # file with the JSON schemas of tools that the template shows, or "python"
    # error; drop: leave out training problems with a longer prompt; drop_everywhere: leave out such
    # held-out problems too
    too_long="error",
  )
  c.max_prompt_length = 96  # tokens of a prompt
  c.max_response_length = 16  # tokens of a response, stop token included

  # checkpoint: folder in Hugging Face's layout, with the weights, and with the shape if preset is
  # "". The overrides replace fields of TransformerConfig; with a checkpoint only the overrides
  # listed here can be set.
  c.model = dict(
    preset="tiny",
    checkpoint="",
    routing="recomputed",  # recomputed, replayed: experts in training; docs/experts.md
    record_routes=False,  # with recomputed, keep the sampler's choices too, for metrics
    overrides=dict(
      compute_dtype=placeholder(str),  # float32, bfloat16
      # of float32 products: highest or None (exact), default (fast); docs/precision.md
      matmul_precision=placeholder(str),
      param_dtype=placeholder(str),
      # gradient checkpointing: none, dots, full; with a checkpoint None means dots
      remat=placeholder(str),
      unroll_layers=placeholder(int),
      attention=placeholder(str),  # auto, reference, whole, splash, cudnn; docs/precision.md
      expert_products=placeholder(str),  # auto, reference, blocks, megablox; docs/experts.md
    ),
  )

  c.lora = dict(  # trains low-rank adapters of a frozen network
    rank=0,  # 0: off, all parameters are trained
    alpha=32.0,  # the adapters' product is multiplied by alpha / rank
    # regular expression on kernel paths
    targets="blocks/(delta/|full/)?(query|key|value|output_gate|output|gate|up|down)$",
    adapters="",  # folder in PEFT's layout to start from
  )

  c.batch = dict(
    prompts=32,  # P, prompts per update
    group_size=8,  # G, rollouts per prompt
    # Rollouts are packed into rows of tokens, and rows into micro-batches whose gradients add up.
    # With 0 for both fields, a run chooses their values for its first batch, and keeps them.
    tokens_per_micro_batch=0,  # tokens on each device, rounded down to whole rows, at least one
    # Least tokens of a row. If only this is 0, a row has room for a prompt and 8 times as many
    # response tokens.
    tokens_per_row=0,
  )
  # Which policy samples which rollouts: on_policy, updates_per_refresh, stages, fixed_lag,
  # simulated_asynchronous, asynchronous; docs/staleness.md.
  c.schedule = "updates_per_refresh"
  # Seconds that sampling may take without progress; with asynchronous, seconds that a batch may
  # take.
  c.generation_deadline_s = 600.0
  c.proximal_every = 0  # updates until the proximal policy scores a batch again; 0: never again
  c.sources = dict(  # fractions of a batch's groups; the policy samples the remaining groups
    # The policy at another temperature. recorded: sampled, raw; docs/sources.md
    temperature=dict(fraction=0.0, temperature=1.5, recorded="sampled"),
    quantized=dict(fraction=0.0, format="int8"),  # the policy in int8 or float8_e4m3fn
    checkpoint=dict(fraction=0.0, workdir="", step=-1),  # another run's policy; −1: the last step
    recorded=dict(fraction=0.0, store=""),  # a run's WORKDIR/rollouts
  )
  c.max_behavior_gap = 0.0  # limit, sampler against trainer, nats per token; 0: by precision
  c.dynamic_sampling = dict(  # replace groups that are all right or all wrong (DAPO)
    enabled=False,
    max_batches=8,  # the most batches that are sampled to fill a batch
  )
  c.overlong = dict(  # responses at the length limit (DAPO)
    buffer=0,  # tokens before the limit over which the reward falls by up to 1; 0: off
    filter=False,  # whether truncated responses leave the loss; they stay in the baseline
  )
  # How the behavior policy samples. slots: responses sampled at a time, over all devices; 0: one
  # for each response of a refresh (on a CPU: of a batch), or as many as memory allows. cache: auto,
  # blocks or pages (a kernel for TPUs). cache_format: the format of keys and values in blocks;
  # int8, or "" for model.overrides.compute_dtype.
  c.sampling = dict(**dataclasses.asdict(Sampling()), slots=0, cache="auto", cache_format="")
  c.allow_truncated_behavior = False  # train although top-k, top-p or min-p bias the ratio
  c.policy_temperature = 1.0  # temperature of the trained policy

  # A component is a name, "fade", with hyper-parameters "fade(alpha_max=2.0)", or your own,
  # "my_module:factory(keyword=1)". All names: docs/methods/README.md.
  c.advantage = "grpo"
  c.reweighting = "none"  # none, salt
  c.gram = "streaming"  # Gram matrix by streaming, sketch, per_rollout
  c.loss = "ppo_clip"
  c.correction = "none"  # corrects for a sampler that differs: tis, mis, icepop, opsm, …
  c.aggregation = "token_mean"  # token_mean, sequence_mean, sequence_sum, constant
  c.veto = dict(  # excludes tokens of negative-advantage rollouts from the loss (μ-GRPO)
    enabled=False,
    scope="suffix",  # suffix, trigger, trigger_and_suffix, response
    threshold=0.01,  # κ, the ratio that triggers the veto
    trigger="below",  # below, above
    renormalize=False,  # whether vetoed tokens leave the aggregation's denominator too
  )
  c.reference = dict(  # KL to the policy before the first update
    kl_coefficient=0.0,
    # The gradient of the KL term. k2: of KL(π‖reference); k3: of KL(reference‖π); k1: none
    estimator="k3",
  )
  # How a teacher's distribution over the policy's own tokens enters: opd, opd_score, opd_ratio,
  # iw_opd, vopd, kl, top_k_opd, kl_estimate; docs/distillation.md.
  c.distillation = "none"
  c.teacher = dict(
    # WORKDIR/checkpoints/STEP of a run; a folder in Hugging Face's layout; initial, base, policy:
    # docs/distillation.md
    checkpoint="",
    # Several teachers: pairs (name, checkpoint as above), and the field of a problem's line that
    # has the name of its teacher.
    checkpoints=(),
    by="",
    # What the teacher reads beside the question: answer, solution, or a field of a problem's line
    privileged="",
    prompt="{question}\n{privileged}\n",  # prompt of a teacher with privileged text
    max_prompt_length=0,  # tokens of that prompt
    temperature=placeholder(float),  # None: policy_temperature
    weight=1.0,  # λ of distillation; 0, with reward_weight = 1: the teacher is only measured
    reward_weight=1.0,  # weight of the reward's advantages or loss; 0: distillation alone
  )
  c.entropy_bonus = 0.0
  c.expert_balance = 0.0  # coefficient of the balance loss of experts

  c.optimizer = "adamw"  # adamw, lion, muon, sgd, or one of optax's such as "optax:adafactor"
  # constant, linear, cosine; warmup is in updates
  c.learning_rate = "constant(peak=3e-4)"
  c.max_gradient_norm = 1.0
  c.max_skipped_in_a_row = 5  # non-finite updates in a row at which the run stops

  c.mesh = dict(data=1, fsdp=1, tensor=1)  # devices along each axis; −1: all that are left
  # Another mesh for sampling, on devices of its own, or with same_devices on those of mesh;
  # all 0: mesh itself.
  c.generation_mesh = dict(data=0, fsdp=0, tensor=0, same_devices=False)

  # Options of XLA's compiler as "name=value name=value", such as
  # "xla_tpu_enable_windowed_einsum_for_all_gather=false"; they may change rounding.
  c.compiler_options = dict(
    training="",  # options of updates, and of other programs on the same devices
    generation="",  # options of sampling
  )

  c.fleet = dict(  # the schedule asynchronous, and samplers as separate programs: docs/fleet.md
    samplers=False,  # rollouts come from programs with --mode=sample and this --workdir
    # what a response does when newer weights come: finish, switch, recompute; docs/staleness.md
    new_weights="finish",
    silent_s=30.0,  # seconds until others take over groups that are late, or of a silent sampler
  )

  c.start = dict(  # begin with another run's policy, in place of a warm start
    checkpoint="",  # WORKDIR/checkpoints/STEP of the run; WORKDIR alone: its last checkpoint
    optimizer=False,  # also take the optimizer's moments; the learning rate begins anew
  )
  c.warm_start = dict(  # supervised training on the task's demonstrations
    num_steps=200,
    batch_size=64,  # demonstrations
    optimizer="adamw",
    learning_rate="constant(peak=1e-3)",
    max_gradient_norm=1.0,
  )
  c.evaluation = dict(
    every=50,  # updates, at least 1; always before the first and after the last update
    num_samples=4,  # answers per problem
    ks=(1, 4),  # k of pass@k
    batch_prompts=64,  # problems per batch; a resumed evaluation begins with a batch
    sampling=dataclasses.asdict(Sampling()),  # temperature, top_k, top_p, min_p, as above
    seed=12345,
    grader="",  # for held-out problems, such as "mathematics"; "": the task's grader
  )
  c.grading = dict(
    num_workers=0,  # processes; 0: one for each core, at most 32
    timeout_s=5.0,  # wall-clock seconds per completion
    memory_mib=2048,  # address space of a worker
    grader="",  # for training problems, such as "mathematics"; "": the task's grader
    # Pairs (grader, weight), such as ("boxed", 0.1), whose scores add to the training rewards
    extra=(),
    unsandboxed_code="",  # permits code without a sandbox; the error about that states the text
    # The reward of each outcome: a number, "score" (the grader's), "mask" (in neither loss nor
    # baseline), or "stop" (the run ends), as text.
    outcomes=dict(
      correct="score",
      wrong="0",
      unparseable="0",
      timeout="0",
      crashed="mask",
      turn_limit="0",  # this and the outcomes below: dialogues that nobody has judged
      length_limit="0",
      environment_limit="0",  # a limit of time or memory
      environment_refused="0",
      environment_failed="mask",
    ),
  )
  # The environment that answers the policy's turns, so that a rollout is a dialogue;
  # max_response_length counts all turns. name: a component such as "python(limit_s=5.0)"; "": a
  # rollout is one turn.
  c.environment = dict(
    name="",
    max_turns=8,  # turns of the policy
    deadline_s=30.0,  # wall-clock seconds per turn
    processes=0,  # 0: one for each core, at most 32
    memory_mib=2048,  # address space of a process
    max_reply_length=0,  # tokens of a reply's text; longer replies are cut; 0: no limit
    cut="tail",  # what is cut off: tail, head, middle
    stop_strings=(),  # strings that end a turn besides the stop tokens: ("</tool_call>",)
    grade_all_turns=False,  # the grader reads the whole dialogue, not just the last turn
  )
  c.diagnostics = dict(  # measures the gradient geometry: docs/reading_geometry.md
    every=0,  # updates from one measurement to the next, the first included; 0: never
    compared="",  # parameters whose Gram matrix is also compared: last_block, all, a pattern
  )
  # every: updates between checkpoints; keep: how many of the latest stay, beside the best
  c.checkpoint = dict(every=10, keep=2)
  c.store = dict(keep_used=True)  # keep rollouts that no update will train on again
  c.logging = dict(
    print_every=1,  # updates between printed lines
    rollouts_every=10,  # updates; rollouts.jsonl gets rollouts at refreshes on multiples of this
    rollouts_per_refresh=8,
  )
  c.permute_rewards = False  # control: rewards are shuffled over the batch
  return c.lock()  # a misspelled field in a recipe is an error
