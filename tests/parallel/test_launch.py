"""The launchers' scripts and manifests."""

import os
import shutil
import stat
import subprocess
import sys
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


def test_local_passes_signals_on(tmp_path):
    text = 'trap "exit 143" TERM; echo up; while :; do sleep 0.05; done'
    cem = command(tmp_path, "cem", text)
    with subprocess.Popen(
        [str(LAUNCH / "local.sh"), "2", "--x"],
        env={**os.environ, "CEM": str(cem), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert [running.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        running.terminate()
        assert running.wait(30) == 143


def test_tpu_vm_runs_the_command_on_all_workers(tmp_path):
    """With a gcloud that runs here what it should run there."""
    recorded = tmp_path / "arguments"
    home = tmp_path / "home"
    cem = home / "cem jax" / ".venv" / "bin"
    cem.mkdir(parents=True)
    command(cem, "cem", f'printf "%s\\n" "$@" >> {recorded}; exit 2')
    command(
        tmp_path, "gcloud", f'echo "$*" > {tmp_path}/gcloud-arguments; exec bash -c "${{@: -1:1}}"'
    )
    # The stand-in gets --command=TEXT as its last argument.
    text = (tmp_path / "gcloud").read_text().replace("${@: -1:1}", "${last#--command=}")
    (tmp_path / "gcloud").write_text(text.replace("exec bash", "last=${@: -1}; cd ~; exec bash"))
    done = subprocess.run(
        [str(LAUNCH / "tpu-vm.sh"), "pod", "zone-a", "--config", "a b.py", "--workdir", "it's"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(home),
             "TPU_DIRECTORY": "cem jax"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert recorded.read_text().splitlines() == ["train", "--config", "a b.py", "--workdir", "it's"]
    told = (tmp_path / "gcloud-arguments").read_text()
    assert told.startswith("compute tpus tpu-vm ssh pod --zone=zone-a --worker=all --command=")


def test_slurm_is_requeued_for_what_may_pass_only(tmp_path):
    """The batch script with stand-ins for srun and scontrol."""
    text = (LAUNCH / "slurm.sbatch").read_text().replace("source .venv/bin/activate", "")
    script = command(tmp_path, "job", text)
    calls = tmp_path / "calls"
    command(tmp_path, "scontrol", f'echo "scontrol $*" >> {calls}')

    def run(status, **variables):
        calls.write_text("")
        command(tmp_path, "srun", f'echo "srun $*" >> {calls}; exit {status}')
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
        assert environ == {}  # GKE tells


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
