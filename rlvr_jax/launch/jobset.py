"""A JobSet on a GKE cluster with TPU node pools: one Job per slice, one pod per host.

Each sampler of a fleet is a JobSet of its own. In one JobSet with the trainer, a sampler that fails
would restart all, the number of samplers could not change, and the cluster would make one program
of them over several slices.
"""

from __future__ import annotations

import argparse
import json

from rlvr_jax.launch import fleet, image, kubernetes
from rlvr_jax.launch.run import SHARED, Run, check_shared
from rlvr_jax.launch.shell import LaunchError, Shell, say
from rlvr_jax.launch.slices import find_slice

ON_HOSTS = True

_YAML = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}{labels}
  annotations:
    # A slice's Job has a node pool to itself.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: {retries}
  replicatedJobs:
  - name: slice
    replicas: {num_slices}
    template:
      spec:
        parallelism: {hosts}
        completions: {hosts}
        backoffLimit: 0  # one pod that fails restarts all
        template:
          spec:
            restartPolicy: Never
            hostNetwork: true
            dnsPolicy: ClusterFirstWithHostNet
            terminationGracePeriodSeconds: 300  # to save; a preempted spot node gives about 30
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: {accelerator}
              cloud.google.com/gke-tpu-topology: {topology}{spot}
            containers:
            - name: rlvr-jax
              image: {image}
              command: {command}
              env: {environment}
              securityContext:
                privileged: true  # the sandbox of generated programs makes namespaces and groups
              resources:
                limits:
                  google.com/tpu: {chips}
              volumeMounts:{mount}
              - name: memory
                mountPath: /dev/shm
            volumes:{volume}
            - name: memory
              emptyDir:
                medium: Memory
"""
_MOUNT = f"""
              - name: shared
                mountPath: {SHARED}"""
_VOLUME = """
            - name: shared  # every host reads and writes the workdir
              persistentVolumeClaim:
                claimName: {claim}"""
_LABELS = """
  labels:
    {label}: {run}"""
_LABEL = "rlvr-jax/samplers-of"  # of the JobSets of samplers
_TEMPLATE = "sampler.yaml"  # note of a sampler's manifest, in which this stands for its number:
_NUMBER = "@NUMBER@"
_SPOT = '\n              cloud.google.com/gke-spot: "true"'


def add_flags(parser: argparse.ArgumentParser) -> None:
  kubernetes.add_flags(parser)
  image.add_flags(parser)
  text = f"PersistentVolumeClaim, ReadWriteMany, mounted at {SHARED}: for a workdir below it"
  parser.add_argument("--claim", default="", help=text)
  fleet.add_flags(parser)
  fleet.add_slice_flags(parser)


def manifest(run: Run, args: argparse.Namespace, trainer: str = "") -> str:
  """The JobSet as YAML; `trainer`: of a sampler, the name of its trainer's run."""
  tpu_slice = find_slice(args.type)
  return _YAML.format(
    name=run.name,
    labels=_LABELS.format(label=_LABEL, run=trainer) if trainer else "",
    retries=run.retries,
    num_slices=args.num_slices,
    hosts=tpu_slice.hosts,
    accelerator=tpu_slice.accelerator,
    topology=tpu_slice.topology,
    spot=_SPOT if args.spot == "all" else "",
    image=json.dumps(image.image_name(run, args)),
    command=json.dumps(run.program_command("python")),
    environment=json.dumps([{"name": k, "value": v} for k, v in run.environment.items()]),
    chips=tpu_slice.chips_per_host,
    mount=_MOUNT if args.claim else "",
    volume=_VOLUME.format(claim=json.dumps(args.claim)) if args.claim else "",
  )


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Builds the image, applies the JobSets and follows the run; Ctrl-C only stops following."""
  if not args.image:
    raise LaunchError("--image is needed to start; see docs/tpu.md")
  check_shared(run, "--claim", args.claim)
  text = manifest(run, args)
  image.build(run, args, shell)
  _apply(text, shell)
  if args.samplers is not None:
    own = fleet.with_slice_of_sampler(args)
    sampler = manifest(fleet.sampler_of(run, _NUMBER, own), own, trainer=run.name)
    if not shell.dry_run:
      fleet.write_note(run, _TEMPLATE, sampler)
    _set_samplers(run, sampler, args.samplers, shell)
  kubernetes.watch(run, args, shell)
  if args.samplers is not None:
    _delete_samplers(run, shell)


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the JobSet and its pods, then those of the samplers."""
  kubernetes.status(run, args, shell)
  for name in _sampler_names(run, shell):
    kubernetes.status(run._replace(name=name), args, shell)


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0, of the run or of a sampler, until its pod ends."""
  program = run if args.sampler is None else fleet.chosen(run, args.sampler)
  kubernetes.logs(program, args, shell)


def scale(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Applies the JobSets of further samplers, or deletes the last ones."""
  _set_samplers(run, fleet.read_note(run, _TEMPLATE), args.samplers, shell)
  say(f"{run.name}: {args.samplers} samplers")


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Deletes the JobSets; their processes save before they end."""
  del args
  shell.run(["kubectl", "delete", "jobset", run.name])
  _delete_samplers(run, shell)


def _apply(text: str, shell: Shell) -> None:
  shell.run(["kubectl", "apply", "--filename=-"], text=text)


def _set_samplers(run: Run, template: str, wanted: int, shell: Shell) -> None:
  present = {int(name.rpartition("-")[2]) for name in _sampler_names(run, shell)}
  for number in sorted(set(range(wanted)) - present):
    _apply(template.replace(_NUMBER, str(number)), shell)
  for number in sorted(number for number in present if number >= wanted):
    shell.run(["kubectl", "delete", "jobset", fleet.sampler_name(run, number)])


def _sampler_names(run: Run, shell: Shell) -> list[str]:
  """Names of the JobSets of a run's samplers."""
  command = ["kubectl", "get", "jobset", f"--selector={_LABEL}={run.name}", "--output=name"]
  return sorted(line.rpartition("/")[2] for line in shell.capture(command).split())


def _delete_samplers(run: Run, shell: Shell) -> None:
  command = ["kubectl", "delete", "jobset", f"--selector={_LABEL}={run.name}"]
  shell.run([*command, "--ignore-not-found"])
