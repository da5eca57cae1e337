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
  c.seed = 0  # of parameters, data order and sampling
  c.num_updates = 200  # of the policy, in all

  c.task = dict(
    name="reasoning_gym",  # or your own, "my_module:factory"; arguments here or in kwargs
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
  c.tokenizer = "bytes"  # "checkpoint": that of model.checkpoint; or a folder with tokenizer.json
  c.prompts = dict(
    format="plain",  # plain; chat: through the tokenizer's chat template
    system="",  # message of the chat format
    template="",  # file with a Jinja chat template, in place of the tokenizer's
    tools="",  # file with the JSON schemas of tools that the template shows, or "python"
    # error; drop: skip such training problems, of data sets with a fixed size; drop_everywhere:
    # held-out ones too, so that scores are those of the rest
    too_long="error",
  )
  c.max_prompt_length = 96  # tokens
  c.max_response_length = 16  # tokens, stop token included

  # checkpoint: folder in Hugging Face's layout, local or gs://, with the weights, and with the
  # shape if preset is "". The overrides replace fields of TransformerConfig; with a checkpoint
  # only the ones below may be set. None does not override.
  c.model = dict(
    preset="tiny",
    checkpoint="",
    # Of mixtures. recomputed: in training the routers choose anew; replayed: the experts that the
    # sampler chose are taken, docs/experts.md
    routing="recomputed",
    record_routes=False,  # rollouts keep the sampler's choice under recomputed too, for metrics
    overrides=dict(
      compute_dtype=placeholder(str),  # float32, bfloat16
      # Precision of float32 products on TPUs and GPUs. highest: exact; None means the same.
      # default: inputs are rounded to bfloat16 or TF32, which is several times faster. The bound of
      # max_behavior_gap is then that of bfloat16. bfloat16 networks have default only.
      matmul_precision=placeholder(str),
      param_dtype=placeholder(str),
      # gradient checkpointing: none, dots, full; of a checkpoint None means dots
      remat=placeholder(str),
      unroll_layers=placeholder(int),
      attention=placeholder(str),  # auto, reference, whole, splash, cudnn; docs/precision.md
      expert_products=placeholder(str),  # auto, reference, blocks, megablox; docs/experts.md
    ),
  )

  c.lora = dict(  # trains low-rank adapters of a frozen network
    rank=0,  # 0: off, all parameters are trained
    alpha=32.0,  # the change counts alpha / rank times
    # regular expression on kernel paths
    targets="blocks/(delta/)?(query|key|value|output_gate|output|gate|up|down)$",
    adapters="",  # folder in PEFT's layout to start from
  )

  c.batch = dict(
    prompts=32,  # P, per update
    group_size=8,  # G, rollouts per prompt
    # Rollouts are packed into rows of tokens, and rows into micro-batches whose gradients add up.
    # 0 for both: as suits the lengths of the first batch and the device; the run then keeps them.
    tokens_per_micro_batch=0,  # on each device; rounded down to whole rows, at least one
    tokens_per_row=0,  # at least; 0 beside the other: 8 times as many response as prompt tokens
  )
  # Which policy samples which rollouts: on_policy, updates_per_refresh, stages, fixed_lag,
  # simulated_asynchronous, asynchronous; docs/staleness.md.
  c.schedule = "updates_per_refresh"
  # Seconds that sampling may be without progress; with asynchronous, that a batch may take.
  c.generation_deadline_s = 600.0
  c.proximal_every = 0  # updates until the proximal policy scores a batch again; 0: only once
  c.sources = dict(  # fractions of a batch's groups; the policy samples the remaining groups
    # The policy at another temperature. recorded: which log-probabilities count as the behavior
    # policy's: sampled, exact; or raw, at temperature 1, so that the ratio does not see the heat.
    temperature=dict(fraction=0.0, temperature=1.5, recorded="sampled"),
    quantized=dict(fraction=0.0, format="int8"),  # a copy of it; int8, float8_e4m3fn
    checkpoint=dict(fraction=0.0, workdir="", step=-1),  # another run's policy; −1: the last step
    recorded=dict(fraction=0.0, store=""),  # a run's WORKDIR/rollouts
  )
  c.max_behavior_gap = 0.0  # mean nats per token, sampler against trainer; 0: by the precision
  c.dynamic_sampling = dict(  # replace groups that are all right or all wrong (DAPO)
    enabled=False,
    max_batches=8,  # sampled at most to fill one batch
  )
  c.overlong = dict(  # responses at the length limit (DAPO)
    buffer=0,  # tokens before the limit over which the reward falls by up to 1; 0: off
    filter=False,  # responses without a stop token: out of the loss, still in the baseline
  )
  # Of the behavior policy: rlvr_jax/sampling.py. slots: responses sampled at a time, over all
  # devices; 0: those of a refresh, or as many as there is memory for (on a CPU those of a batch).
  # cache: auto, blocks or pages (a kernel for TPUs); see `choose_cache` in rlvr_jax/ops/caches.py.
  # cache_format: of keys and values in blocks; int8, or "" for model.overrides.compute_dtype.
  c.sampling = dict(**dataclasses.asdict(Sampling()), slots=0, cache="auto", cache_format="")
  c.allow_truncated_behavior = False  # train although top-k, top-p or min-p bias the ratio
  c.policy_temperature = 1.0  # of the target policy

  # Components are strings, like schedule above and optimizer below: a name, "fade", or a name with
  # hyper-parameters that differ from the component's defaults, "fade(alpha_max=2.0)". Your own
  # component is "my_module:factory(keyword=1)". All names: docs/methods/README.md.
  c.advantage = "grpo"
  c.reweighting = "none"  # none, salt
  c.gram = "streaming"  # streaming, sketch, per_rollout; "streaming(feature='sampled')"
  c.loss = "ppo_clip"
  c.correction = "none"  # of the sampler's mismatch: tis, mis, icepop, geometric_rejection, opsm, …
  c.aggregation = "token_mean"  # of the loss: token_mean, sequence_mean, sequence_sum, constant
  c.veto = dict(  # excludes tokens of negative-advantage rollouts from the loss (μ-GRPO)
    enabled=False,
    scope="suffix",  # suffix, trigger, trigger_and_suffix, response
    threshold=0.01,  # κ, a bound on the ratio
    trigger="below",  # below, above
    renormalize=False,  # vetoed tokens leave the aggregation's denominator as well
  )
  c.reference = dict(  # KL to the policy before the first update
    kl_coefficient=0.0,
    # k2: in the loss, the gradient of KL(π‖reference); k3: that of KL(reference‖π); k1: none
    estimator="k3",
  )
  # A teacher's distribution over the policy's own tokens, as advantages or as a loss beside that of
  # the reward: opd, opd_score, opd_ratio, iw_opd, vopd, kl, top_k_opd, kl_estimate;
  # docs/distillation.md.
  c.distillation = "none"
  c.teacher = dict(
    # WORKDIR/checkpoints/STEP of a run; a folder in Hugging Face's layout; initial: the policy
    # before the first update; base: the network without adapters
    checkpoint="",
    # Several teachers: pairs (name, checkpoint as above), and the field of a problem's line that
    # has the name of its teacher.
    checkpoints=(),
    by="",
    # What the teacher reads beside the question, before the same response: answer, solution, or a
    # field of a problem's line; "": nothing. With it checkpoint may be policy: the current one.
    privileged="",
    prompt="{question}\n{privileged}\n",  # of such a teacher
    max_prompt_length=0,  # tokens of that
    temperature=placeholder(float),  # None: policy_temperature
    weight=1.0,  # λ of distillation; 0: the teacher is only measured
    reward_weight=1.0,  # of the reward's advantages, or of its loss; 0: distillation alone
  )
  c.entropy_bonus = 0.0
  c.expert_balance = 0.0  # coefficient of the loss that evens the load of a mixture's experts

  c.optimizer = "adamw"  # adamw, lion, muon, sgd, or one of optax's such as "optax:adafactor"
  # learning rate: constant, linear, cosine; warmup is in updates
  c.learning_rate = "constant(peak=3e-4)"
  c.max_gradient_norm = 1.0
  c.max_skipped_in_a_row = 5  # non-finite updates until the run stops

  c.mesh = dict(data=1, fsdp=1, tensor=1)  # devices along each axis; −1 once: all that are left
  # Another layout for sampling, over separate devices or over those of mesh; all 0: as mesh.
  c.generation_mesh = dict(data=0, fsdp=0, tensor=0, same_devices=False)

  # Options of XLA's compiler as "name=value name=value", such as
  # "xla_tpu_enable_windowed_einsum_for_all_gather=false"; they may change rounding.
  c.compiler_options = dict(
    training="",  # of updates, and of other programs on the same devices
    generation="",  # of sampling
  )

  c.fleet = dict(  # of real-time schedules, and samplers as programs: docs/fleet.md
    samplers=False,  # whether rollouts come from programs with --mode=sample and this --workdir
    # What a response does when newer weights come. finish: ends with those that it began with;
    # switch: goes on with the newer ones and its old cache; recompute: computes its cache anew
    new_weights="finish",
    silent_s=30.0,  # seconds after which groups of a silent sampler, and late groups, are others'
  )

  c.start = dict(  # begin with another run's policy, in place of a warm start
    checkpoint="",  # WORKDIR/checkpoints/STEP of the run; its WORKDIR: the last one
    optimizer=False,  # with the optimizer's moments too; the learning rate begins anew
  )
  c.warm_start = dict(  # supervised, on the task's demonstrations
    num_steps=200,
    batch_size=64,  # problems
    optimizer="adamw",
    learning_rate="constant(peak=1e-3)",
    max_gradient_norm=1.0,
  )
  c.evaluation = dict(
    every=50,  # updates, at least 1; always before the first and after the last update
    num_samples=4,  # per problem
    ks=(1, 4),  # of pass@k
    batch_prompts=64,  # problems per generated batch
    sampling=dataclasses.asdict(Sampling()),
    seed=12345,
    grader="",  # for held-out problems, a component such as "mathematics"; "": the task's
  )
  c.grading = dict(
    num_workers=0,  # processes; 0: one for each core, at most 32
    timeout_s=5.0,  # per completion, wall-clock
    memory_mib=2048,  # address space of a worker
    grader="",  # for training problems, likewise a component; "": the task's
    # Pairs (grader, weight), such as ("boxed", 0.1): their scores are added to the training
    # rewards. For wrong answers too, set outcomes.wrong and .unparseable to "score".
    extra=(),
    unsandboxed_code="",  # the text that permits it; the error about a missing sandbox states it
    # outcome → reward, as text: a number, "score" (the grader's), "mask" (as if not sampled: in
    # neither loss nor baseline), "stop"
    outcomes=dict(
      correct="score",
      wrong="0",
      unparseable="0",
      timeout="0",
      crashed="mask",
      # Of dialogues that nobody has judged:
      turn_limit="0",
      length_limit="0",
      environment_limit="0",  # of time or memory
      environment_refused="0",
      environment_failed="mask",
    ),
  )
  # Answers the policy's turns, so that a rollout is a dialogue; max_response_length is that of all
  # turns. name: a component such as "python(limit_s=5.0)"; "": a rollout is one turn.
  c.environment = dict(
    name="",
    max_turns=8,  # of the policy
    deadline_s=30.0,  # per turn, wall-clock
    processes=0,  # 0: one for each core, at most 32
    memory_mib=2048,  # address space of a process
    max_reply_length=0,  # tokens of a reply's text; a longer one is cut; 0: no limit
    cut="tail",  # what is cut off: tail, head, middle
    stop_strings=(),  # each ends a turn, such as ("</tool_call>",), besides the stop tokens
    grade_all_turns=False,  # the grader reads the whole dialogue, not just the last turn
  )
  c.diagnostics = dict(  # of the gradient geometry; costs: docs/methods/README.md
    every=0,  # updates, the first included; 0: never
    compared="",  # parameters whose Gram is compared with config.gram's: last_block, all, a pattern
  )
  c.checkpoint = dict(every=10, keep=2)  # updates; the latest, and the best in addition
  c.store = dict(keep_used=True)  # keep rollouts that no update will train on again
  c.logging = dict(
    print_every=1,  # updates
    rollouts_every=10,  # updates; at refreshes on a multiple of it, into rollouts.jsonl
    rollouts_per_refresh=8,
  )
  c.permute_rewards = False  # control: rewards are shuffled over the batch
  return c.lock()  # a misspelled field in a recipe is an error
