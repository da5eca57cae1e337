"""Google Cloud on one machine: fakes of the programs that launch calls, on PATH.

Hosts are folders. What is run on one by ssh is run here with that folder as home; a SLURM
environment stands in for the metadata by which processes of a TPU slice find one another. The
systemd of a host restarts a service that fails.

  fake_cloud.py PROGRAM ARGUMENTS…     as gcloud, sudo, systemd-run, systemctl, …
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve()
PROGRAMS = ("gcloud", "sudo", "loginctl", "systemd-run", "systemctl")
PROGRAMS += ("journalctl", "mountpoint", "hostname")
GRACE_S = 20  # between SIGTERM and SIGKILL of a preemption


def install(folder, hosts=2):
  """Puts the fakes into folder/bin; returns the environment of a machine that has them."""
  programs = folder / "bin"
  programs.mkdir(parents=True)
  for name in PROGRAMS:
    (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" {name} "$@"\n')
    (programs / name).chmod(0o755)
  (folder / "hosts").write_text(str(hosts))
  path = f"{programs}{os.pathsep}{os.environ['PATH']}"
  return os.environ | {"PATH": path, "FAKE_CLOUD": str(folder), "HOME": str(folder)}


# --- state ----------------------------------------------------------------------------------------


def root():
  return pathlib.Path(os.environ["FAKE_CLOUD"])


def read(path, default=None):
  with contextlib.suppress(FileNotFoundError):
    return json.loads(path.read_text())
  return default


def write(path, value):
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  temporary.write_text(json.dumps(value))
  temporary.replace(path)


def flag(arguments, name, default=None):
  return next((a.split("=", 1)[1] for a in arguments if a.startswith(f"--{name}=")), default)


def free_port():
  """A port that a SLURM job's number can stand for."""
  for port in range(61440 + os.getpid() % 4000, 65536):
    with contextlib.suppress(OSError), socket.socket() as probe:
      probe.bind(("127.0.0.1", port))
      return port
  raise OSError("no port is free")


def host_environment(home, number, count, port):
  """The environment of a host, in which jax finds the other processes."""
  slurm = {"JOB_ID": port - 61440, "STEP_NODELIST": "localhost", "NTASKS": count}
  slurm |= {"PROCID": number, "LOCALID": 0}
  return os.environ | {"HOME": str(home)} | {f"SLURM_{k}": str(v) for k, v in slurm.items()}


def alive(pid):
  """Whether a process runs; one that has ended and is not waited for does not."""
  with contextlib.suppress(OSError):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  return False


def kill_group(pid, number):
  with contextlib.suppress(ProcessLookupError):
    os.killpg(pid, number)


# --- a host's systemd -----------------------------------------------------------------------------


def unit_file(name, home=None):
  return pathlib.Path(home or os.environ["HOME"]) / "units" / f"{name}.json"


def systemd_run(arguments):
  options = [a for a in arguments if a.startswith("--")]
  options = options[: next(i for i, a in enumerate(arguments) if not a.startswith("--"))]
  command, name = arguments[len(options) :], flag(options, "unit")
  if read(unit_file(name)):
    sys.exit(f"Failed to start transient service unit: Unit {name} already exists.")
  environment = dict(o.split("=", 1)[1].split("=", 1) for o in options if o.startswith("--setenv="))
  properties = dict(
    o.split("=", 1)[1].split("=", 1) for o in options if o.startswith("--property=")
  )
  unit = {"command": command, "environment": environment, "properties": properties}
  unit |= {
    "directory": flag(options, "working-directory"),
    "SubState": "running",
    "Result": "success",
  }
  write(unit_file(name), unit)
  in_background("supervise", name)


def in_background(*arguments):
  """Starts a command of this file that outlives the one that starts it."""
  subprocess.Popen(
    [sys.executable, str(HERE), *arguments],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    start_new_session=True,
  )  # fmt: skip


def supervise(arguments):
  """Runs a service as its properties say."""
  (name,) = arguments
  unit = read(unit_file(name))
  starts = int(unit["properties"]["StartLimitBurst"])
  for start in range(starts):
    with open(unit_file(name).with_suffix(".log"), "ab") as log:
      child = subprocess.Popen(
        unit["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        cwd=unit["directory"], env=os.environ | unit["environment"], start_new_session=True,
      )  # fmt: skip
    write(
      unit_file(name), unit | {"supervisor": os.getpid(), "child": child.pid, "starts": start + 1}
    )
    status = child.wait()
    now = read(unit_file(name))
    if now is None or now.get("stopping"):
      return
    if status == 0:
      write(unit_file(name), now | {"SubState": "exited"})
      return
    time.sleep(0.5)
  write(unit_file(name), now | {"SubState": "failed", "Result": "exit-code"})


def systemctl(arguments):
  arguments = [a for a in arguments if a not in ("--user",)]
  verb, name = arguments[0], arguments[1]
  unit = read(unit_file(name))
  if verb == "show":
    wanted = flag(arguments, "property").split(",")
    unit = unit or {"SubState": "dead", "Result": "success"}
    print("\n".join(unit[key] for key in ("Result", "SubState") if key in wanted))
  elif verb == "stop" and unit:
    write(unit_file(name), unit | {"stopping": True})
    with contextlib.suppress(ProcessLookupError):
      os.kill(unit["child"], signal.SIGTERM)  # KillMode=mixed
    while alive(unit["child"]):
      time.sleep(0.1)
    unit_file(name).unlink()
  elif verb == "reset-failed" and unit and unit["SubState"] == "failed":
    unit_file(name).unlink()


def journalctl(arguments):
  name, follow = flag(arguments, "unit"), "--follow" in arguments
  path = unit_file(name).with_suffix(".log")
  with open(path, encoding="utf-8", errors="replace") as log:
    lines = flag(arguments, "lines")
    text = log.read().splitlines(keepends=True)
    print("".join(text if lines == "all" else text[-int(lines) :]), end="", flush=True)
    while follow:
      print(log.read(), end="", flush=True)
      time.sleep(0.2)


# --- gcloud ---------------------------------------------------------------------------------------


def gcloud(arguments):
  with open(root() / "calls.log", "a") as log:
    log.write(" ".join(arguments[:5]) + "\n")
  group = " ".join(arguments[:3])
  if group == "compute tpus queued-resources":
    queued_resources(arguments[3], arguments[4:])
  elif group == "compute tpus tpu-vm":
    {"ssh": ssh, "scp": scp}[arguments[3]](arguments[4:])
  else:
    sys.exit(f"unknown: {arguments}")


def state_file(kind, name):
  """Where the state of a program's machines is."""
  return root() / f"{kind}-{name}.json"


def num_hosts(name):
  """The hosts of a program's slice; samplers have one."""
  return 1 if "-sampler-" in name else int((root() / "hosts").read_text())


def queued_resources(verb, arguments):
  if verb == "list":
    return list_resources(flag(arguments, "filter"), flag(arguments, "format"))
  path = state_file("resource", arguments[0])
  resource = read(path)
  if verb == "create":
    if resource:
      sys.exit("already exists")
    homes = [root() / f"machine-{time.time_ns()}-{i}" for i in range(num_hosts(arguments[0]))]
    for home in homes:
      home.mkdir()
    port = free_port()
    resource = {"name": arguments[0], "state": "ACTIVE", "homes": [*map(str, homes)], "port": port}
    write(path, resource | {"label": flag(arguments, "labels", "")})
  elif verb == "describe":
    print("Quota limit exceeded")
  elif verb == "delete":
    kill_hosts(resource, signal.SIGKILL)
    path.unlink()


def list_resources(condition, shown):
  pattern = (condition or "").removeprefix("name~")
  for resource in map(read, sorted(root().glob("resource-*.json"))):
    if "labels" in shown:
      key, _, value = resource.get("label", "").partition("=")
      value = value if shown.endswith(f".labels.{key})") else ""
      print(resource["name"], resource["state"], value, sep="\t")
    elif re.search(pattern, f"queuedResources/{resource['name']}"):
      print(resource["name" if "name" in shown else "state"])


def ssh(arguments):
  resource = read(state_file("resource", arguments[0]))
  if not resource or resource["state"] != "ACTIVE":
    sys.exit(f"{arguments[0]} cannot be reached")
  worker = flag(arguments, "worker")
  chosen = (
    enumerate(resource["homes"]) if worker == "all" else [(0, resource["homes"][int(worker)])]
  )
  processes = []
  for number, home in chosen:
    environment = host_environment(home, number, len(resource["homes"]), resource["port"])
    install_python(pathlib.Path(home))
    processes.append(
      subprocess.Popen(["bash", "-c", flag(arguments, "command")], cwd=home, env=environment)
    )
  # As the connection's end ends what it started, but for services.
  signal.signal(signal.SIGTERM, lambda *_: [p.terminate() for p in processes] and sys.exit(143))
  sys.exit(max(process.wait() for process in processes))


def install_python(home):
  """What a host has once the extra is installed: a virtualenv for this setup.py, marked ready."""
  for setup in home.glob("rlvr_jax/*/setup.py"):
    digest = subprocess.run(["sha256sum"], stdin=open(setup), capture_output=True, text=True).stdout
    binary = home / "rlvr_jax" / f"venv-{digest[:12]}" / "bin"
    binary.mkdir(parents=True, exist_ok=True)
    (binary.parent / "ready").touch()
    (binary / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (binary / "python").chmod(0o755)


def scp(arguments):
  resource = read(state_file("resource", arguments[1].rstrip(":")))
  for home in resource["homes"]:
    subprocess.run(["cp", arguments[0], home], check=True)
    # Unpacked as the host would, to know which setup.py the virtualenv is for.
    code = pathlib.Path(home) / "rlvr_jax" / pathlib.Path(arguments[0]).name.removesuffix(".tar.gz")
    code.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xzf", arguments[0], "-C", str(code), "setup.py"], check=True)


def kill_hosts(resource, number):
  for home in resource["homes"]:
    for path in pathlib.Path(home, "units").glob("*.json"):
      unit = read(path)
      with contextlib.suppress(ProcessLookupError, KeyError):
        os.kill(unit["supervisor"], signal.SIGKILL)
      kill_group(unit["child"], number)


def preempt(folder, name):
  """Takes the machines away as Cloud does: SIGTERM to services, SIGKILL after 20 s; suspended."""
  path = folder / f"resource-{name}.json"
  resource = read(path)
  units = [
    read(p) for home in resource["homes"] for p in pathlib.Path(home, "units").glob("*.json")
  ]
  for unit in units:  # first, so that nothing is started again
    os.kill(unit["supervisor"], signal.SIGKILL)
  for unit in units:
    os.kill(unit["child"], signal.SIGTERM)
  ended = wait_all([unit["child"] for unit in units], GRACE_S)
  kill_hosts(resource, signal.SIGKILL)
  write(path, resource | {"state": "SUSPENDED"})
  return ended


def wait_all(pids, seconds):
  """Whether all have ended within the time."""
  deadline = time.monotonic() + seconds
  while any(map(alive, pids)) and time.monotonic() < deadline:
    time.sleep(0.1)
  return not any(map(alive, pids))


if __name__ == "__main__":
  program, given = sys.argv[1], sys.argv[2:]
  if program == "sudo":
    os.execvp(given[0], given)
  elif program == "hostname":
    print(re.sub(r"\W", "-", os.environ["HOME"])[-20:])
  elif program in ("loginctl", "mountpoint"):
    sys.exit(0)
  else:
    {
      "gcloud": gcloud,
      "systemd-run": systemd_run,
      "systemctl": systemctl,
      "journalctl": journalctl,
      "supervise": supervise,
    }[program](given)
