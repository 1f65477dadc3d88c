"""The launchers' scripts and manifests."""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [LAUNCH / "local.sh", LAUNCH / "slurm.sbatch", LAUNCH / "tpu-vm.sh"]
MANIFESTS = sorted((LAUNCH / "kubernetes").glob("*.yaml"))


def shellcheck():
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shellcheck() is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck(), str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def command(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def local(folder, text, *arguments, **variables):
    cem = command(folder, "cem", text)
    return subprocess.run(
        [str(LAUNCH / "local.sh"), *arguments],
        env={**os.environ, "CEM": str(cem), "JAX_PLATFORMS": "", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_local_numbers_its_processes_and_divides_the_gpus(tmp_path):
    text = 'echo "$CEM_PROCESS/$CEM_PROCESSES $CUDA_VISIBLE_DEVICES $CEM_COORDINATOR $*"'
    done = local(tmp_path, text, "2", "--x", "a b", CUDA_VISIBLE_DEVICES="4,5,6,7", CEM_PORT="77")
    assert sorted(done.stdout.splitlines()) == [
        "0/2 4,5 127.0.0.1:77 train --x a b",
        "1/2 6,7 127.0.0.1:77 train --x a b",
    ]
    done = local(tmp_path, text, "3", "--x", CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert done.returncode == 2 and "4 GPUs do not divide over 3" in done.stderr
    assert local(tmp_path, text, "0", "--x").returncode == 2


def test_local_ends_with_the_status_of_what_failed(tmp_path):
    assert local(tmp_path, "exit $((CEM_PROCESS * 2))", "2", "--x").returncode == 2
    assert local(tmp_path, "true", "2", "--x").returncode == 0


def test_local_takes_no_gpus_if_none_are_visible(tmp_path):
    command(tmp_path, "nvidia-smi", "printf '0\\n1\\n'")
    path = f"{tmp_path}:{os.environ['PATH']}"
    for visible in ("", "-1"):
        done = local(tmp_path, 'echo "<$CUDA_VISIBLE_DEVICES>"', "2", "--x",
                     PATH=path, CUDA_VISIBLE_DEVICES=visible)  # fmt: skip
        assert done.stdout.splitlines() == [f"<{visible}>"] * 2, done.stderr


UNTIL_TERM = 'trap "exit 143" TERM; echo up; while :; do sleep 0.05; done'


@contextlib.contextmanager
def started(arguments, **variables):
    """Start a launcher in its own session, to receive signals."""
    with subprocess.Popen(
        [str(argument) for argument in arguments],
        env={**os.environ, **{name: str(value) for name, value in variables.items()}},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):  # normally nothing is left
                os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize("processes", [2, 64])
def test_local_passes_signals_on(processes, tmp_path):
    """Also while many processes are starting."""
    cem = command(tmp_path, "cem", UNTIL_TERM)
    arguments = [LAUNCH / "local.sh", processes, "--x"]
    with started(arguments, CEM=cem, JAX_PLATFORMS="cpu") as running:
        assert [running.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        running.terminate()
        running.communicate(timeout=60)  # ends when all who could write there have ended
        assert running.returncode == 143


def ending(statuses, tries):
    """Return a cem script whose attempts, counted in a file, end with these statuses in turn."""
    all_ = " ".join(map(str, statuses))
    return f"echo >> {tries}; all=({all_}); exit ${{all[$(wc -l < {tries}) - 1]}}"


def test_the_loop_of_the_readme_ends_when_it_should(tmp_path):
    (loop,) = re.findall(r"^    (until .*)$", (LAUNCH / "README.md").read_text(), re.MULTILINE)
    command(tmp_path, "sleep", "true")
    path = f"{tmp_path}:{os.environ['PATH']}"
    for last in (0, 2, 130, 143):
        statuses = [1, 134, 137, 139, last]
        command(tmp_path, "cem", ending(statuses, tmp_path / f"{last}"))
        subprocess.run(["bash", "-c", loop], env={**os.environ, "PATH": path}, timeout=60)
        assert (tmp_path / f"{last}").read_text() == "\n" * len(statuses)


@pytest.fixture
def pod(tmp_path):
    """A gcloud that runs its commands locally; `pod(text)` installs `text` as cem."""
    home = tmp_path / "home"
    folder = home / "cem jax" / ".venv" / "bin"
    folder.mkdir(parents=True)
    command(
        tmp_path,
        "gcloud",
        f'echo "$*" >> {tmp_path}/gcloud-arguments; last=${{@: -1}}\n'
        'cd ~; exec bash -c "${last#--command=}"',
    )

    def start(text, *arguments):
        command(folder, "cem", text)
        script = [LAUNCH / "tpu-vm.sh", "pod", "zone-a", *arguments]
        path = f"{tmp_path}:{os.environ['PATH']}"
        return started(script, PATH=path, HOME=home, TPU_DIRECTORY="cem jax")

    return start


def test_tpu_vm_runs_the_command_on_all_workers(pod, tmp_path):
    with pod('printf "%s\n" "$@"; exit 2', "--config", "a b.py", "--workdir", "it's") as running:
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 2
    assert out.splitlines() == ["train", "--config", "a b.py", "--workdir", "it's"]
    told = (tmp_path / "gcloud-arguments").read_text()
    assert told.startswith("compute tpus tpu-vm ssh pod --zone=zone-a --worker=all --command=")


def test_tpu_vm_retries_unless_finished_or_the_input_is_wrong(pod, tmp_path):
    command(tmp_path, "sleep", "true")  # between two attempts
    statuses = [1, 134, 137, 139, 143, 2]
    with pod(ending(statuses, "~/tries"), "--x") as running:
        assert running.wait(60) == 2
    assert (tmp_path / "home" / "tries").read_text() == "\n" * len(statuses)


def twice(running, number):
    """Signal the launcher twice: TERM as `kill` sends it, INT to all as Ctrl-C does."""
    for _ in range(2):
        if number == signal.SIGINT:
            os.killpg(running.pid, number)
        else:
            running.send_signal(number)
        time.sleep(0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_tpu_vm_waits_for_the_checkpoint(number, pod, tmp_path):
    text = 'trap "sleep 2; echo saved; exit 143" TERM; echo up; while :; do sleep 0.05; done'
    with pod(text, "--x") as running:
        assert running.stdout.readline() == "up\n"
        twice(running, number)
        assert running.wait(60) == 143
        assert running.stdout.read() == "saved\n"
    assert not list((tmp_path / "home").glob(".cem_train*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_tpu_vm_starts_no_attempt_after_a_signal_between_two(number, pod, tmp_path):
    with pod("echo up; exit 1", "--x") as running:
        assert running.stdout.readline() == "up\n"
        time.sleep(0.5)
        twice(running, number)
        assert running.wait(60) == 143
        assert running.stdout.read() == ""
    assert not list((tmp_path / "home").glob(".cem_train*.pid"))


def test_slurm_is_requeued_only_for_what_may_pass(tmp_path):
    """The batch script with stand-ins for srun and scontrol."""
    text = (LAUNCH / "slurm.sbatch").read_text().replace("source .venv/bin/activate", "")
    script = command(tmp_path, "job", text)
    calls = tmp_path / "calls"
    command(tmp_path, "scontrol", f'echo "scontrol $*" >> {calls}')

    def run(status, **variables):
        calls.write_text("")
        command(tmp_path, "srun", f'echo "$SRUN_CPUS_PER_TASK srun $*" >> {calls}; exit {status}')
        done = subprocess.run(
            ["bash", str(script)],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "9",
                 **variables},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return calls.read_text().splitlines()

    assert run(143)[1:] == run(1)[1:] == ["scontrol requeue 9"]
    assert run(0)[1:] == run(2)[1:] == run(1, SLURM_RESTART_COUNT="50")[1:] == []
    assert run(0)[0].endswith("--workdir /path/to/runs/cem_162m")
    assert run(0)[0].startswith(" srun")
    assert run(0, SLURM_CPUS_PER_TASK="32")[0].startswith("32 srun")  # srun asks for them again
    array = run(0, SLURM_ARRAY_TASK_ID="3")[0]
    assert array.endswith("--config.seed=3 --workdir /path/to/runs/cem_162m/seed-3")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_structure_of_a_jobset(path):
    yaml = pytest.importorskip("yaml")
    (manifest,) = yaml.safe_load_all(path.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(manifest["spec"]) == {"failurePolicy", "replicatedJobs"}
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
    assert job["parallelism"] == job["completions"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert all(type(value) is int for value in container["resources"]["limits"].values())
    environ = {entry["name"]: entry["value"] for entry in container.get("env", [])}
    if "nvidia.com/gpu" in container["resources"]["limits"]:
        assert environ["CEM_PROCESSES"] == str(job["parallelism"])
        name, host = manifest["metadata"]["name"], environ["CEM_COORDINATOR"].split(":")[0]
        assert host == f"{name}-{replicated['name']}-0-0.{name}"
    else:
        assert environ == {}  # GKE sets them


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_give_flags_that_exist(path):
    yaml = pytest.importorskip("yaml")
    from cem_jax.cli import parse_arguments
    from cem_jax.config import load_config

    manifest = yaml.safe_load(path.read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    arguments = parse_arguments(container["command"][1:])
    config = load_config(str(ROOT / arguments.config), arguments.overrides)
    per_host = next(iter(container["resources"]["limits"].values()))
    assert config.train.global_batch % (per_host * job["parallelism"]) == 0
