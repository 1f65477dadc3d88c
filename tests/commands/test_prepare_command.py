"""Defaults of `cem prepare`."""

import os

import pytest

from cem_jax.commands.prepare import usable_cpus


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/job/step", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4),
        ("0::/job", {"job/cpu.max": "1000 100000"}, 1),
        (
            "3:memory:/\n2:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("2:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
    ],
)
def test_cpu_quotas_count_for_workers(tmp_path, monkeypatch, groups, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": groups, **contents}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cpus(tmp_path) == cpus


def test_cpu_affinity_counts_for_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    assert usable_cpus(tmp_path) == 1
