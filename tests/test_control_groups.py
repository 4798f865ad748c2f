"""The memory that control groups leave to a process."""

import os

import pytest

from pipectl.control_groups import memory_of_machine

LINES = {
    2: ("0::/job/step", "30 1 0:9 /job /cg rw - cgroup2 cgroup2 rw"),
    1: ("4:memory:/job/step\n0::/", "30 1 0:9 / /cg rw - cgroup cgroup rw,memory"),
}
"""The mount of one is of the whole tree, that of the other of the job, as in a container."""
GROUPS = {
    2: {"step/memory.max": "max", "memory.max": "3145728"},
    1: {
        "job/step/memory.limit_in_bytes": "9223372036854771712",
        "job/memory.limit_in_bytes": "3145728",
    },
}


@pytest.mark.parametrize("version", [1, 2])
def test_the_smallest_limit_of_all_groups_counts(tmp_path, version):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_of_machine(tmp_path) == physical, "nothing is known of groups"
    group, mount = LINES[version]
    files = {
        "proc/self/cgroup": group,
        "proc/self/mountinfo": f"29 1 0:8 / /a rw - a b rw\n{mount}",
    }
    for name, text in (files | {f"cg/{k}": v for k, v in GROUPS[version].items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert memory_of_machine(tmp_path) == 3 * 2**20
    for path in (tmp_path / "cg").rglob("memory.*"):
        path.write_text("9223372036854771712\n")
    assert memory_of_machine(tmp_path) == physical
