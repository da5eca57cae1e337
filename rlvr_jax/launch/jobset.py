"""A JobSet on a GKE cluster with TPU node pools: one Job per slice, one pod per host."""

from __future__ import annotations

import argparse
import json

from rlvr_jax.launch import image, kubernetes
from rlvr_jax.launch.kubernetes import logs, status  # noqa: F401  (verbs of this target)
from rlvr_jax.launch.run import SHARED, Run, check_shared
from rlvr_jax.launch.shell import LaunchError, Shell
from rlvr_jax.launch.slices import find_slice

ON_HOSTS = True

_YAML = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
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
_SPOT = '\n              cloud.google.com/gke-spot: "true"'


def add_flags(parser: argparse.ArgumentParser) -> None:
  kubernetes.add_flags(parser)
  image.add_flags(parser)
  text = f"PersistentVolumeClaim, ReadWriteMany, mounted at {SHARED}: for a workdir below it"
  parser.add_argument("--claim", default="", help=text)
  parser.add_argument("--spot", action="store_true", help="on spot nodes, preempted at any time")


def manifest(run: Run, args: argparse.Namespace) -> str:
  """The JobSet as YAML."""
  tpu_slice = find_slice(args.type)
  return _YAML.format(
    name=run.name,
    retries=run.retries,
    num_slices=args.num_slices,
    hosts=tpu_slice.hosts,
    accelerator=tpu_slice.accelerator,
    topology=tpu_slice.topology,
    spot=_SPOT if args.spot else "",
    image=json.dumps(image.image_name(run, args)),
    command=json.dumps(run.program_command("python")),
    environment=json.dumps([{"name": k, "value": v} for k, v in run.environment.items()]),
    chips=tpu_slice.chips_per_host,
    mount=_MOUNT if args.claim else "",
    volume=_VOLUME.format(claim=json.dumps(args.claim)) if args.claim else "",
  )


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Builds the image, applies the JobSet and follows the run; Ctrl-C only stops following."""
  if not args.image:
    raise LaunchError("--image is needed to start; see docs/tpu.md")
  check_shared(run, "--claim", args.claim)
  text = manifest(run, args)
  image.build(run, args, shell)
  shell.run(["kubectl", "apply", "--filename=-"], text=text)
  kubernetes.watch(run, args, shell)


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Deletes the JobSet; its processes save before they end."""
  del args
  shell.run(["kubectl", "delete", "jobset", run.name])
