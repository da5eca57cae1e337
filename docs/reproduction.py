"""Writes docs/reproduction.md, from docs/verdicts.py and the committed results, from the root:

python -m docs.reproduction

One comparison decides each claim, or each part of one, that of docs/deciding.py. The texts of the
evidence are written by hand, their numbers are not: they come from files of results.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from docs.deciding import DECIDED_BY, Comparison, describe, draw, holm_p, verdict
from docs.runs import OfRun, Result
from experiments import evidence, full_size
from experiments.testbed.arms import SEEDS, committed_runs
from rlvr_jax.evaluate import compare

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
FIGURES = ROOT / "docs" / "images"
COMMAND = "python -m docs.reproduction"
VERDICTS = {  # verdict → what it says
  "found": "the interval lies where the claim says",
  "excluded beyond the margin": (
    "more was claimed, and the interval lies within ± the margin, also where it is below 0"
  ),
  "reversed": "it lies on the other side: of 0, or of −margin where not less was claimed",
  "undecided": "everything else; two seeds have no interval",
  "not tested": "no run here asks what the paper claims; the evidence says what was run instead",
  "not testable": "at this scale, for the stated reason",
  "description": "the paper shows how something goes, and claims no difference",
}
MINUTES = 5  # of a run on the testbed, on two quiet cores; experiments/ORDER.md
IDS = (
  *(f"S{i}" for i in range(1, 12)),
  *(f"P{i}" for i in range(1, 8)),
  *(f"F{i}" for i in range(1, 4)),
  *(f"M{i}" for i in range(1, 6)),
)
PAPERS = {
  "S": "SALT, arXiv 2606.05800",
  "P": "P3O, arXiv 2605.12380",
  "F": "FADE, arXiv 2607.01490",
  "M": "μ-GRPO, arXiv 2605.17570",
}


class Verdict(NamedTuple):
  """What is known of a claim, besides what decides it."""

  claim: str
  evidence: str  # {} stands for a value; results have no digits here
  values: tuple[str, ...] = ()  # from `mean`, `paired`, …: read from files of results
  conditions: str = ""  # task, seeds, interval
  link: str = ""  # path from docs/
  arms: tuple[str, ...] = ()  # of the testbed, which are to say more
  also: str = ""  # of the page of the other task, where there are two
  parts: Mapping[str, str] = {}  # letter → part of the claim; none: it has one comparison
  otherwise: str = "not testable"  # what is said of parts that nothing decides

  def rows(self, name: str) -> dict[str, str]:
    """Name of a row of the page, such as S1a → what is claimed."""
    return {name + letter: part for letter, part in self.parts.items()} or {name: self.claim}


# --- values ---------------------------------------------------------------------------------------


def mean(runs: Sequence[Result], of_run: OfRun) -> str:
  """Mean over seeds with half of Student's 95 % interval."""
  return compare.mean_cell([of_run(run) for run in runs])


def paired(
  found: Mapping[str, Sequence[Result]],
  label: str,
  baseline: str,
  of_run: OfRun,
  digits: int = 3,
) -> str:
  """Mean difference by seed, with Student's 95 % interval, to so many decimal digits."""
  runs = [*found[baseline], *found[label]]
  difference = compare.differences(runs, baseline, of_run)[label]
  if difference is None:
    raise ValueError(f"{label!r} and {baseline!r} share fewer than two seeds; run more of both")
  return compare.difference_cell(difference, digits)


def number(value: float) -> str:
  return f"{value:.3g}"


# --- what is queued -------------------------------------------------------------------------------


def queued(arms: Sequence[str], done: set[tuple[str, int]]) -> int:
  """Runs of these arms that have no result yet."""
  return sum((label, seed) not in done for label in arms for seed in SEEDS)


def hours(runs: int) -> str:
  return f"{runs * MINUTES / 60:.1f}"


# --- the page -------------------------------------------------------------------------------------

# For a reader who reads nothing else.
_SUMMARY = """# Reproduction

* **Tried on** policies below a million parameters, from scratch; sums, answers of up to 90 bytes.
* **Of {parts} parts of {claims} claims**: {counts}.
* **SALT, held**: gradients are of low rank; the output head's represent those of the last block.
* **SALT, did not**: by the paper's feature nothing cancels; accuracy and large groups gain nothing.
* **P3O, held** for short answers: fp8 rollouts cost little; pass@8 is not below GRPO's clips' mean.
* **P3O, did not**: others' rollouts cost it most; at a lag of one GRPO is better, at what ran.
* **FADE, did not**: its claims on masses, at high entropy; pass@16 is best by training for pass@4.
* **μ-GRPO**: long stages with a tight clip cost accuracy, [0, 5] gains; stages are not sooner here.
* **Nobody may conclude** that a method works or fails with published models or long answers: each
  verdict is of one comparison on a small task, 3 to 16 seeds, at rates not tuned for each method.
"""
_INTRODUCTION = f"""
Recorded with an earlier sampler, whose tokens differ ([changelog](../CHANGELOG.md)): the same seed
gives another run today, from the same distribution.

What became of every claim of the four papers, by one codebase, on tasks of minutes. `{COMMAND}`
writes this page. One comparison with a control decides each claim, by its interval and a margin,
the smallest difference that would matter (`docs/deciding.py`). All numbers are read from committed
files of results. Claims that did not hold stay. What else is known is folded below each table.

| verdict | meaning |
|---|---|
"""
_RULES = """
A margin was committed before the runs, in the plan of their page, unless "set later" stands there.
Which comparison decides a claim was then chosen after the runs too.
"A minus B" is paired by seed, with Student's 95 % interval in brackets; after ± stands half of
that interval; both are left out where all seeds are equal. Intervals are not adjusted for their
number. Beside them stands Holm's p of the t-test that the difference is 0, over all comparisons
that decide here; where more is claimed and it is above 0.05, chance among so many may explain the
difference. Of "not less" it says nothing. Arms whose best learning
rates differ are to be compared each at its own. Where one rate alone has run, the claim names it.
The pages of the runs on `steps` have Holm's p, for each of their tables; those of the
quickstart have none. Where only two seeds have run, both stand there, as "A and B", without an
interval.

* Tasks: the quickstart is sums of three numbers below ten, answered in at most four bytes. In
  written steps its answers have about twenty. Sixteen large updates per refresh are sixteen of 256
  rollouts each on those of one policy, at a rate of 6e-4 or 1e-3.
  [`steps`](../experiments/premises/README.md) has longer responses; its runs have 192 updates of
  128 rollouts, G = 8, a learning rate of 3e-4, and pass@k of 64 held-out problems × 16
  samples, the mean of the evaluations after updates 128, 160 and 192. On the quickstart pass@1 is
  that of the last evaluation; where a plan was written before, the mean of the last three.
  Metrics of training "at the end" are means of the last 16 updates.
* ρ = π/β is the ratio of the policy to the one that sampled, A the advantage, G the group size, μ
  the updates per refresh of the rollouts, 4 where nothing else is said.
* [SALT](methods/salt.md): `score` is the paper's gradient of a rollout, `sampled` leaves out the
  softmax, as the authors' code appears to. n_eff is 0 where weighted gradients cancel, 1 where they
  are orthogonal, and PR counts directions. A′ = P A + α (I − P) A⁺ is the coefficient in the loss:
  P projects on the shared directions, α = 1 − n_eff or 0, A⁺ is the positive part of A.
* [P3O](methods/p3o.md): ε is GRPO's clip. Runs "with four updates per refresh" train on rollouts of
  the policy itself that are zero to three updates old; P3O's baselines are such runs, unless
  "on-policy" stands there. All take the effective sample size over the whole update; the authors'
  code has blocks of 16 rollouts, which no run here has. [FADE](methods/fade.md): masses are the
  weights of successes and failures, α and δ its controllers, H* its target entropy.
* [μ-GRPO](methods/mu_grpo.md): tight is GRPO's interval of ρ, relaxed is [0, 5]. The veto drops
  tokens behind a trigger (suffix), a token with A < 0 and ρ below κ. In written
  steps the higher learning rate is 4e-4, the lower one 3e-4.

The quickstart's experiments came before the testbed. Some of their settings were chosen with a seed
that is among the reported ones; their pages say which. Three seeds leave wide intervals.
"""


def figure(prefix: str) -> pathlib.Path:
  """Of a paper."""
  return FIGURES / f"reproduction_{prefix}.png"


def decided_by(prefix: str) -> dict[str, Comparison]:
  """The comparisons of a paper's claims."""
  return {name: found for name, found in DECIDED_BY.items() if name.startswith(prefix)}


def verdict_of(name: str, known: Verdict) -> str:
  """One of VERDICTS, of a row of a claim."""
  return verdict(DECIDED_BY[name]) if name in DECIDED_BY else known.otherwise


def _links(known: Verdict) -> str:
  if not known.link:
    return "–"
  first = f"[{'results' if known.values else 'how'}]({known.link})"
  return f"{first}, [more]({known.also})" if known.also else first


def _verdict_table(verdicts: Mapping[str, Verdict]) -> str:
  rows, adjusted = {}, holm_p(DECIDED_BY)
  for claim, known in verdicts.items():
    for name, part in known.rows(claim).items():
      cells = 5 * ["–"]
      if name in DECIDED_BY:
        compared, difference, margin, regime = describe(DECIDED_BY[name])
        p = f"{adjusted[name]:.2g}" if name in adjusted else "–"
        cells = [compared, difference, p, margin, regime]
      rows[name] = [part, f"**{verdict_of(name, known)}**", *cells]
  header = ["claim", "verdict", "compared", "difference, 95 %", "p, Holm", "margin", "task"]
  return compare.markdown_table(header, rows, "id")


def _evidence_table(verdicts: Mapping[str, Verdict], done: set[tuple[str, int]]) -> str:
  rows = {}
  for name, known in verdicts.items():
    runs = queued(known.arms, done)
    rows[name] = [
      known.evidence.format(*known.values),
      known.conditions or "–",
      _links(known),
      f"{runs} runs, {hours(runs)} h" if runs else "–",
    ]
  return compare.markdown_table(["evidence", "conditions", "link", "queued"], rows, "id")


def _section(
  prefix: str, summary: str, verdicts: Mapping[str, Verdict], done: set[tuple[str, int]]
) -> str:
  path = figure(prefix).relative_to(PAGE.parent)
  return f"""## {PAPERS[prefix]}

{summary}

{_verdict_table(verdicts)}

![The differences of the table with their intervals, in units of their margins]({path})

<details markdown>
<summary>All evidence, with its conditions</summary>

{_evidence_table(verdicts, done)}

</details>"""


def _queue(done: set[tuple[str, int]]) -> str:
  left = queued(list(evidence.FIRST) + list(evidence.REST), done)
  return f"""## Queued

    python -m rlvr_jax.main --mode=sweep --config=experiments/testbed/config.py \\
        --sweep=experiments/evidence.py --workdir=runs/evidence --minutes=100

This one command, with `JAX_PLATFORMS=cpu`, runs what the column "queued" counts, in sittings, seed
by seed, in [this order](../experiments/ORDER.md): {left} runs, {hours(left)} hours on two quiet
cores. They would say more, but decide no claim. Claims share runs, so that the column adds up to
more."""


_HARDWARE = f"""## On hardware, with a published checkpoint

    python -m rlvr_jax.main --mode=sweep --config=configs/full_size/gsm8k_qwen25_05b.py \\
        --sweep=experiments/full_size.py --workdir=runs/evidence_05b \\
        --config.model.checkpoint=Qwen2.5-0.5B-Instruct --config.task.kwargs.data_dir=GSM8K

The same arms on GSM8K, by the recipe that the command line names;
`configs/full_size/gsm8k_qwen25_15b_lora.py` is the other one. Hours are computed, not measured.
They are the seconds of the [compiled programs](../experiments/benchmarks/README.md) at the chips'
published peaks, of {full_size.UPDATES} updates and their generation at full length, over a third of
the peaks, which is an assumption. Evaluations come on top.

"""


def _summary() -> str:
  """What comes first: ten lines."""
  from docs.verdicts import VERDICTS_BY_ID

  said = collections.Counter(
    verdict_of(name, known) for claim, known in VERDICTS_BY_ID.items() for name in known.rows(claim)
  )
  counts = ", ".join(f"{said[verdict]} {verdict}" for verdict in VERDICTS if said[verdict])
  return _SUMMARY.format(parts=said.total(), claims=len(IDS), counts=counts).strip()


def page() -> str:
  from docs.verdicts import IN_SHORT, VERDICTS_BY_ID  # which imports this module

  done = committed_runs()
  meanings = "\n".join(f"| {name} | {meaning} |" for name, meaning in VERDICTS.items())
  parts = [_summary(), _INTRODUCTION.strip() + "\n" + meanings, _RULES.strip()]
  for prefix in PAPERS:
    own = {name: known for name, known in VERDICTS_BY_ID.items() if name.startswith(prefix)}
    parts.append(_section(prefix, IN_SHORT[prefix], own, done))
  parts += [_queue(done), _HARDWARE + full_size.table()]
  return "\n\n".join(parts) + "\n"


def main() -> None:
  PAGE.write_text(page(), encoding="utf-8")
  for prefix in PAPERS:
    draw(figure(prefix), decided_by(prefix))


if __name__ == "__main__":
  main()
