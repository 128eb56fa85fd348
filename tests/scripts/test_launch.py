"""Launchers: parsed, and dry-run with stand-ins of Slurm's commands and the variables that Kubernetes would set."""

import contextlib
import itertools
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import recipes.transformer
from tests.recipes.flags import flag_names
from zoo._processes import find_cluster

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch"
BATCH = LAUNCH / "slurm.sbatch"
PROGRAM = """
import os, signal, sys, time
import zoo
zoo.parallel.initialize(timeout=60)
import jax
requested = []
signal.signal(signal.SIGTERM, lambda *_: requested.append(True))
gpus = jax.config._read("jax_cuda_visible_devices")
line = " ".join(map(str, ("ready", jax.process_index(), jax.process_count(), gpus, *sys.argv[1:])))
os.write(1, f"\\n{line}\\n".encode())  # at once: both write into one pipe
while not requested:
    time.sleep(0.05)
os.write(1, b"stopped ")
sys.exit(143)
"""


def start(tmp_path, *words, program=PROGRAM, start_new_session=False, **variables):
    """Start the batch script, as `sbatch` would, with the stand-ins in its path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scancel", "scontrol"):
        text = (Path(__file__).parent / "fake_slurm.py").read_text(encoding="utf-8")
        (folder / name).write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
        (folder / name).chmod(0o755)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    job = {"SLURM_JOB_ID": str(random.randrange(4096)), "SLURM_NTASKS_PER_NODE": "1", "SLURM_CPUS_ON_NODE": "4"}
    job |= {"FAKE_LOG": str(tmp_path / "log"), "FAKE_NODES": "localhost,localhost2", "FAKE_TASKS": "2"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = ["bash", str(BATCH), str(tmp_path / "program.py"), *words]
    environment = kept | path | job | {"PYTHON": sys.executable} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=start_new_session, **pipes)


def read_log(tmp_path):
    return [line.split() for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]


@pytest.mark.ci
def test_slurm_stops_before_the_limit_and_requeues(tmp_path):
    with start(tmp_path, "--out", "runs/a b", start_new_session=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")  # until they have ended; Gloo prints lines of its own
            ready = sorted(itertools.islice((line for line in lines if line.startswith("ready")), 2))
            assert ready == [f"ready {index} 2 all --out runs/a b\n" for index in range(2)], ready
            process.send_signal(signal.SIGUSR1)
            printed, errors = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert printed.count("stopped") == 2, errors
    assert process.returncode == 143
    job = read_log(tmp_path)[1][2]
    assert "2 processes, found by Slurm\n" in errors
    srun, *others = read_log(tmp_path)
    assert srun[:3] == ["srun", "--cpus-per-task=4", "--kill-on-bad-exit=1"]
    assert others == [["scancel", "--signal=TERM", job], ["scontrol", "requeue", job]]


@pytest.mark.parametrize(
    ("words", "restarts", "expected"),
    [
        ([], "0", "[]"),
        (["--out", "a"], "1", "['--out', 'a', '--resume']"),
        (["--resume", "7"], "2", "['--resume', '7']"),
    ],
)
def test_slurm_resumes_a_job_that_starts_again(tmp_path, words, restarts, expected):
    program = "import sys\nsys.stdout.write(f'{sys.argv[1:]}\\n')\nsys.exit(3)"
    variables = {"SLURM_RESTART_COUNT": restarts, "SRUN_OPTIONS": "--container-image=a --container-mounts=b"}
    with start(tmp_path, *words, program=program, **variables) as process:
        printed, _ = process.communicate(timeout=60)
    assert printed == f"{expected}\n" * 2
    assert process.returncode == 3, "a failure is not started again"
    (srun,) = read_log(tmp_path)
    assert srun[3:5] == ["--container-image=a", "--container-mounts=b"]


def test_slurm_options_are_those_of_the_script():
    text = BATCH.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(options) == text.count("\n#SBATCH"), "every line is parsed"
    assert options["signal"] == "B:USR1@300" and "trap stop USR1" in text
    assert {"requeue", "nodes", "ntasks-per-node", "time", "open-mode"} <= options.keys()
    before, _, _ = text.partition("\nset -u")
    assert "\n#SBATCH" in before and "\n#SBATCH" not in text.removeprefix(before), (
        "Slurm reads them above commands alone"
    )
    with subprocess.Popen(["bash", str(BATCH)], stderr=subprocess.PIPE, text=True) as process:
        assert "name a program" in process.communicate()[1]
    assert process.returncode == 2


def read_jobset(name):
    jobset = yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return jobset, job, container


@pytest.mark.parametrize("name", ["jobset.yaml", "jobset-tpu.yaml"])
def test_jobset_starts_all_pods_again(name):
    jobset, job, container = read_jobset(name)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["completions"] == job["parallelism"] and job["completionMode"] == "Indexed"
    assert job["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 300
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    python, recipe, preset = container["command"]
    assert python == "python" and (ROOT / recipe).is_file() and preset in recipes.transformer.PRESETS
    flags = {word.partition("=")[0] for word in container["args"] if word.startswith("--")}
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= set(flag_names(recipes.transformer.main))
    assert "--resume" in flags
    (devices,) = (size for device, size in container["resources"]["limits"].items() if device.endswith(("gpu", "tpu")))
    words = [word for flag in container["args"] for word in flag.split("=", 1)]
    assert int(words[words.index("--fsdp") + 1]) == devices * job["completions"]


def test_jobset_environment_is_a_cluster(monkeypatch):
    jobset, job, container = read_jobset("jobset.yaml")
    coordinator, (workers,) = jobset["spec"]["coordinator"], jobset["spec"]["replicatedJobs"]
    assert coordinator == {"replicatedJob": workers["name"], "jobIndex": 0, "podIndex": 0}
    host = f"{jobset['metadata']['name']}-{workers['name']}-0-0.{jobset['metadata']['name']}"
    fields = {"metadata.annotations['jobset.sigs.k8s.io/coordinator']": host}
    environment: dict[str, str] = {}
    for entry in container["env"]:  # in this order, as Kubernetes expands them
        value = entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        environment[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], value)
    found = [find_cluster(environment | {"JOB_COMPLETION_INDEX": str(index)}) for index in range(job["completions"])]
    assert [x and x.process_id for x in found] == list(range(job["completions"]))
    assert all(x and x.coordinator == f"{host}:61440" and x.num_processes == job["completions"] for x in found)
    assert container["ports"] == [{"containerPort": 61440}]


def test_jobset_of_tpus_is_found_by_their_hosts():
    _, job, container = read_jobset("jobset-tpu.yaml")
    topology = job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = [int(size) for size in topology.split("x")]
    assert chips[0] * chips[1] * chips[2] == container["resources"]["limits"]["google.com/tpu"] * job["completions"]
    environment = {"TPU_WORKER_HOSTNAMES": "zoo-slice-0-0.zoo,zoo-slice-0-1.zoo", "TPU_WORKER_ID": "1"}
    found = find_cluster(environment | {"JOB_COMPLETION_INDEX": "1"})
    assert found is not None and found.source == "Cloud TPU"


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_runs_a_recipe_on_any_cloud(tmp_path, nodes):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
    assert [cloud["infra"] for cloud in task["resources"]["any_of"]] == ["aws", "azure", "gcp"]
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] > 0
    extras = re.search(r"\[([\w,]+)\]", task["setup"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras is not None and set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nenv | grep ^JAX_\necho "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    given = {name: f"gs://bucket/{name}" for name in task["envs"]}
    given |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": f"{nodes}"}
    given |= {"SKYPILOT_NODE_RANK": f"{nodes - 1}", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "PATH": os.environ["PATH"]}
    printed = subprocess.check_output(["bash", "-euc", task["run"]], env=given, cwd=tmp_path, text=True)
    *variables, command = printed.splitlines()
    cluster = find_cluster(dict(line.split("=") for line in variables))
    found = cluster and (cluster.coordinator, cluster.process_id, cluster.num_processes)
    assert found == (("10.0.0.1:61440", 1, 2) if nodes == 2 else None)
    recipe, preset, *words = command.split()
    assert (ROOT / recipe).is_file() and preset in recipes.transformer.PRESETS
    flags = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    assert {"resume", "checkpoint_url"} <= flags <= set(flag_names(recipes.transformer.main))
    assert words[words.index("--fsdp") + 1] == str(8 * nodes)


def test_dockerfile_names_what_is_there():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line and not line.startswith("#")]
    commands = [line.partition(" ")[::2] for line in lines]
    copied = [word for name, words in commands if name == "COPY" for word in words.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied), copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert {*wheel["wheel"]["only-include"], project["readme"], *project["license-files"]} <= set(copied)
    extras = re.findall(r"EXTRAS=([\w,-]+)", text)
    assert {extra for group in extras for extra in group.split(",")} <= project["optional-dependencies"].keys()
    (python,) = (words for name, words in commands if name == "FROM")
    assert re.fullmatch(r"python:3\.1[12]-slim", python)
    (install,) = (shlex.split(words) for name, words in commands if "pip install" in words)
    assert install[install.index("-c") + 1] in copied and ".[${EXTRAS}]" in install
    names = [name for name, _ in commands]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    (user,) = (words for name, words in commands if name == "USER")
    assert user not in ("root", "0") and any(f"useradd --create-home {user}" in words for _, words in commands)
    (command,) = (words for name, words in commands if name == "CMD")
    assert (ROOT / yaml.safe_load(command)[1]).is_file()


def test_workflow_starts_the_demo_in_the_image():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "docker.yml").read_text(encoding="utf-8"))
    triggers = workflow[True]  # YAML reads `on` as a truth value
    assert triggers["schedule"] and triggers["push"]["paths"] == triggers["pull_request"]["paths"]
    assert "Dockerfile" in triggers["push"]["paths"] and all(
        (ROOT / path).is_file() for path in triggers["push"]["paths"]
    )
    build, start = (step["run"] for step in workflow["jobs"]["demo"]["steps"] if "run" in step)
    image = shlex.split(build)[3]
    assert shlex.split(build) == ["docker", "build", "--tag", image, "."]
    *docker, commands = shlex.split(start)
    assert docker == ["docker", "run", "--rm", image, "sh", "-euc"]
    python, recipe, *words = commands.partition(" && ")[0].split()
    assert python == "python" and (ROOT / recipe).is_file() and words[:2] == ["--steps", "5"]
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= set(
        flag_names(recipes.transformer.main)
    )
