"""What ``machine`` reads, from trees of /proc and /sys made for the purpose: each layout that containers come in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock._core import machine
from penstock._core.budget import GiB, KiB, MiB

Grow = Callable[[Mapping[str, str]], str]

PAGE_COUNTER_MAX = "9223372036854771712\n"  # how cgroup v1 writes "no limit"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:5 - cgroup cgroup rw,memory\n"
V1_CPU = "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_V2 = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
OTHERS = (
    "22 28 0:21 / /proc rw,nosuid shared:12 - proc proc rw\n"
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "37 31 0:34 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer\n"
)


def meminfo(*, available: int = GiB(6), more: str = "") -> str:
    return (
        f"MemTotal:       {GiB(8) // 1024} kB\nMemFree:          {MiB(100) // 1024} kB\n"
        f"MemAvailable:   {available // 1024} kB\nSwapTotal:      {GiB(2) // 1024} kB\n"
        f"SwapFree:       {GiB(1) // 1024} kB\n{more}"
    )


def v1_level(
    folder: str, *, limit: int | str, used: int, cache: int = 0, least: int | str | None = None
) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.use_hierarchy": "1\n",
        f"{folder}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        # The plain counters are of this level alone; those of the levels below are only in total_.
        f"{folder}/memory.stat": "inactive_file 1\nactive_file 1\n"
        f"hierarchical_memory_limit {limit if least is None else least}\n"
        f"total_inactive_file {cache}\ntotal_active_file 0\n",
    }


def v2_level(folder: str, *, limit: int | str, used: int, high: int | str = "max", cache: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n",
        f"{folder}/memory.stat": f"anon 5\nfile 6\ninactive_file {cache}\nactive_file 0\nslab_reclaimable 0\n",
    }


@pytest.fixture
def grow(tmp_path: Path) -> Grow:
    def plant(files: Mapping[str, str]) -> str:
        for name, text in {"/proc/meminfo": meminfo(), **files}.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return plant


def test_without_cgroups_the_machine_bounds_what_is_available(grow: Grow) -> None:
    seen = machine.look(grow({}))
    assert seen.available_bytes == GiB(6)
    assert seen.memory_bytes == GiB(8)
    assert (seen.swap_bytes, seen.swap_free_bytes) == (GiB(2), GiB(1))
    assert seen.bound_by == "the machine's memory"
    assert seen.limits == ()
    assert seen.oom_kills is None


def test_nothing_at_all_to_read_is_no_error(tmp_path: Path) -> None:
    assert machine.available_bytes(root=str(tmp_path)) == 0
    assert machine.look(str(tmp_path)).cores == 1
    assert machine.look(str(tmp_path)).shm_bytes is None


def test_a_v1_limit_bounds_what_is_available(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "4:memory:/job\n3:cpuset:/\n",
            "/proc/self/mountinfo": OTHERS + V1_MEMORY,
            **v1_level("/sys/fs/cgroup/memory", limit=PAGE_COUNTER_MAX, used=GiB(5)),
            **v1_level("/sys/fs/cgroup/memory/job", limit=GiB(1), used=MiB(300), cache=MiB(100)),
        }
    )
    seen = machine.look(root)
    assert seen.available_bytes == GiB(1) - MiB(200)
    assert seen.bound_by == "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    assert seen.limits == (machine.Limit(seen.bound_by, GiB(1), MiB(300), MiB(100)),)
    assert seen.oom_kills == 3


def test_a_v2_limit_bounds_what_is_available(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/job\n",
            "/proc/self/mountinfo": OTHERS + V2,
            **v2_level("/sys/fs/cgroup/job", limit=GiB(1), used=MiB(300), cache=MiB(100)),
        }
    )
    assert machine.available_bytes(root=root) == GiB(1) - MiB(200)
    assert machine.oom_kills(root=root) == 2


def test_page_cache_counts_as_available_whether_it_was_read_once_or_often(grow: Grow) -> None:
    stat = f"inactive_file {MiB(10)}\nactive_file {MiB(500)}\nslab_reclaimable {MiB(20)}\n"
    root = grow(
        {
            "/proc/self/cgroup": "0::/job\n",
            "/proc/self/mountinfo": V2,
            **v2_level("/sys/fs/cgroup/job", limit=GiB(1), used=GiB(1)),
            "/sys/fs/cgroup/job/memory.stat": stat,
        }
    )
    assert machine.available_bytes(root=root) == MiB(530)


def test_counters_that_disagree_never_give_more_than_the_limit(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/job\n",
            "/proc/self/mountinfo": V2,
            **v2_level("/sys/fs/cgroup/job", limit=MiB(100), used=MiB(1), cache=GiB(3)),
        }
    )
    assert machine.available_bytes(root=root) == MiB(100)


def test_a_group_above_its_limit_has_nothing_left(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/job\n",
            "/proc/self/mountinfo": V2,
            **v2_level("/sys/fs/cgroup/job", limit=MiB(100), used=MiB(130)),
        }
    )
    assert machine.available_bytes(root=root) == 0


def test_memory_high_throttles_and_so_counts_as_a_limit(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/job\n",
            "/proc/self/mountinfo": V2,
            **v2_level("/sys/fs/cgroup/job", limit=GiB(2), high=GiB(1), used=MiB(24)),
        }
    )
    seen = machine.look(root)
    assert seen.available_bytes == MiB(1000)
    assert seen.bound_by.endswith("/job/memory.high")
    assert [limit.limit_bytes for limit in seen.limits] == [GiB(2), GiB(1)]


@pytest.mark.parametrize("tightest", ["outer", "middle", "inner"])
@pytest.mark.parametrize("version", [1, 2])
def test_every_level_above_the_process_counts(grow: Grow, version: int, tightest: str) -> None:
    limits = {name: MiB(200) if name == tightest else GiB(3) for name in ("outer", "middle", "inner")}
    top = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    level = v1_level if version == 1 else v2_level
    files: dict[str, str] = {}
    folder = top
    for name, limit in limits.items():
        folder = f"{folder}/{name}"
        files |= level(folder, limit=limit, used=MiB(50))
    root = grow(
        {
            "/proc/self/cgroup": "4:memory:/outer/middle/inner\n" if version == 1 else "0::/outer/middle/inner\n",
            "/proc/self/mountinfo": V1_MEMORY if version == 1 else V2,
            **files,
        }
    )
    assert machine.available_bytes(root=root) == MiB(150)
    assert len(machine.look(root).limits) == 3


def test_a_v1_parent_without_hierarchy_does_not_hold_its_children(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "4:memory:/outer/inner\n",
            "/proc/self/mountinfo": V1_MEMORY,
            **v1_level("/sys/fs/cgroup/memory/outer", limit=MiB(100), used=MiB(90)),
            **v1_level("/sys/fs/cgroup/memory/outer/inner", limit=GiB(1), used=0),
            "/sys/fs/cgroup/memory/outer/memory.use_hierarchy": "0\n",
        }
    )
    assert machine.available_bytes(root=root) == GiB(1)


def test_in_a_hybrid_layout_memory_is_read_from_the_tree_that_has_it(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "9:name=systemd:/job\n4:memory:/job\n1:cpu,cpuacct:/job\n0::/job\n",
            "/proc/self/mountinfo": OTHERS + V1_MEMORY + V1_CPU + HYBRID_V2,
            "/sys/fs/cgroup/unified/job/cgroup.procs": "",
            **v1_level("/sys/fs/cgroup/memory/job", limit=MiB(700), used=0),
            "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
            "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "/proc/self/status": "Cpus_allowed_list:\t0-3,8\n",
        }
    )
    seen = machine.look(root)
    assert seen.available_bytes == MiB(700)
    assert seen.cpu_quota == 1.5
    assert (seen.cores, seen.cores_allowed) == (2, 5)


def test_in_a_container_the_mount_shows_only_its_own_branch(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "4:memory:/docker/abc/step\n",
            "/proc/self/mountinfo": (
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,relatime master:9 - cgroup cgroup rw,memory\n"
            ),
            **v1_level("/sys/fs/cgroup/memory", limit=MiB(600), used=MiB(100)),
            **v1_level("/sys/fs/cgroup/memory/step", limit=PAGE_COUNTER_MAX, used=MiB(50), least=MiB(600)),
        }
    )
    seen = machine.look(root)
    assert seen.available_bytes == MiB(500)
    assert [limit.where for limit in seen.limits] == ["/sys/fs/cgroup/memory/memory.limit_in_bytes"]


def test_a_v1_limit_above_what_the_container_sees_is_still_counted(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "4:memory:/kubepods/pod1/c1\n",
            "/proc/self/mountinfo": "35 31 0:32 /kubepods/pod1/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            **v1_level("/sys/fs/cgroup/memory", limit=PAGE_COUNTER_MAX, used=MiB(100), least=MiB(400)),
        }
    )
    seen = machine.look(root)
    assert seen.available_bytes == MiB(300)
    assert "a level above" in seen.bound_by


@pytest.mark.parametrize(
    ("path", "top"),
    [
        pytest.param("/", "/", id="cgroup namespace"),
        pytest.param("/docker/abc", "/", id="host's path, own mount"),
        pytest.param("/docker/abc", "/docker/other", id="path not below the mount's root"),
        pytest.param("/../other", "/", id="process outside of its namespace"),
        pytest.param("/", "/../..", id="mount from outside of the namespace"),
        pytest.param("/docker/abc (deleted)", "/docker", id="group removed under the process"),
    ],
)
def test_a_path_that_cannot_be_followed_falls_back_to_the_mount(grow: Grow, path: str, top: str) -> None:
    root = grow(
        {
            "/proc/self/cgroup": f"0::{path}\n",
            "/proc/self/mountinfo": f"30 23 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            **v2_level("/sys/fs/cgroup", limit=MiB(500), used=MiB(100)),
        }
    )
    assert machine.available_bytes(root=root) == MiB(400)


def test_of_two_mounts_the_one_that_shows_more_levels_is_read(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/pod/c1\n",
            "/proc/self/mountinfo": "51 23 0:26 /pod/c1 /mnt/own rw - cgroup2 cgroup2 rw\n" + V2,
            **v2_level("/mnt/own", limit=GiB(1), used=0),
            **v2_level("/sys/fs/cgroup/pod/c1", limit=GiB(1), used=0),
            **v2_level("/sys/fs/cgroup/pod", limit=MiB(300), used=0),
        }
    )
    assert machine.available_bytes(root=root) == MiB(300)


def test_mount_points_with_spaces_are_read(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/a b\n",
            "/proc/self/mountinfo": r"30 23 0:26 / /sys/my\040groups rw - cgroup2 cgroup2 rw" + "\n",
            **v2_level("/sys/my groups/a b", limit=MiB(500), used=0),
        }
    )
    assert machine.available_bytes(root=root) == MiB(500)


@pytest.mark.parametrize(
    ("text", "quota", "cores"),
    [("max 100000\n", None, 4), ("200000 100000\n", 2.0, 2), ("50000 100000\n", 0.5, 1), ("900000 100000\n", 9.0, 4)],
)
def test_cores_are_the_least_of_affinity_and_v2_quota(grow: Grow, text: str, quota: float | None, cores: int) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "0::/job\n",
            "/proc/self/mountinfo": V2,
            "/proc/self/status": "Cpus_allowed_list:\t0-3\n",
            "/sys/fs/cgroup/cpu.max": "max 100000\n",
            "/sys/fs/cgroup/job/cpu.max": text,
        }
    )
    seen = machine.look(root)
    assert (seen.cpu_quota, seen.cores) == (quota, cores)


def test_the_quota_of_a_level_above_counts(grow: Grow) -> None:
    root = grow(
        {
            "/proc/self/cgroup": "1:cpu,cpuacct:/a/b\n",
            "/proc/self/mountinfo": V1_CPU,
            "/proc/self/status": "Cpus_allowed_list:\t0-7\n",
            "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
            "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            "/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
            "/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
        }
    )
    assert machine.look(root).cores == 3


def test_an_enforced_commit_limit_bounds_what_is_available(grow: Grow) -> None:
    commit = f"CommitLimit:    {GiB(4) // 1024} kB\nCommitted_AS:   {GiB(3) // 1024} kB\n"
    loose = grow({"/proc/meminfo": meminfo(more=commit), "/proc/sys/vm/overcommit_memory": "0\n"})
    assert machine.available_bytes(root=loose) == GiB(6)
    strict = grow({"/proc/meminfo": meminfo(more=commit), "/proc/sys/vm/overcommit_memory": "2\n"})
    assert machine.available_bytes(root=strict) == GiB(1)


def test_resource_limits_bound_what_is_available(grow: Grow) -> None:
    limits = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {GiB(2)}           unlimited            bytes     \n"
        "Max processes             31234                31234                processes \n"
        "Max open files            1024                 1048576              files     \n"
        f"Max address space         {GiB(3)}           {GiB(4)}           bytes     \n"
    )
    root = grow(
        {
            "/proc/self/limits": limits,
            "/proc/self/status": f"VmSize:\t {GiB(1) // 1024} kB\nVmData:\t {MiB(24) // 1024} kB\n",
        }
    )
    seen = machine.look(root)
    assert (seen.available_bytes, seen.bound_by) == (GiB(2) - MiB(24), "RLIMIT_DATA")
    assert seen.data == machine.Rlimit(GiB(2), None)
    assert seen.address_space == machine.Rlimit(GiB(3), GiB(4))
    assert seen.nofile == machine.Rlimit(1024, 1048576)
    assert seen.nproc == machine.Rlimit(31234, 31234)


SMAPS = (
    "55d0-55d4 r--p 00000000 fd:01 1234      /usr/bin/x\nRss: 100 kB\nPss: 40 kB\nPrivate_Clean: 4 kB\n"
    "Private_Dirty: 8 kB\nSwapPss: 1 kB\n"
    "7f00-7f04 rw-p 00000000 00:00 0\nRss: 60 kB\nPss: 60 kB\nPrivate_Clean: 0 kB\n"
    "Private_Dirty: 60 kB\nSwapPss: 0 kB\n"
)


def test_shared_memory_is_divided_where_the_kernel_tells_how(grow: Grow) -> None:
    root = grow(
        {
            "/proc/7/smaps_rollup": "5-7 ---p 0 0 0 [rollup]\nRss: 900 kB\nPss: 300 kB\nPss_Anon: 200 kB\n"
            "Shared_Clean: 1 kB\nPrivate_Clean: 50 kB\nPrivate_Dirty: 150 kB\nSwap: 20 kB\nSwapPss: 10 kB\n",
            "/proc/8/smaps": SMAPS,
        }
    )
    assert machine.pss_bytes(7, root=root) == KiB(310)
    assert machine.private_bytes(7, root=root) == KiB(210)
    assert machine.pss_bytes(8, root=root) == KiB(101)
    assert machine.private_bytes(8, root=root) == KiB(73)


def test_without_smaps_shared_pages_are_left_out(grow: Grow) -> None:
    root = grow({"/proc/9/statm": "5000 900 300 10 0 700 0\n"})
    page = 600 * os.sysconf("SC_PAGE_SIZE")
    assert machine.pss_bytes(9, root=root) == machine.private_bytes(9, root=root) == page


def test_descendants_are_found_with_and_without_the_list_of_children(grow: Grow) -> None:
    parents = {2: 1, 3: 2, 4: 2, 5: 3, 6: 1}
    scan = grow({f"/proc/{pid}/stat": f"{pid} (a ) (b) S {parent} 1 1 0\n" for pid, parent in parents.items()})
    assert sorted(machine.tree(2, root=scan)) == [3, 4, 5]
    listed = grow({f"/proc/{pid}/task/{pid}/children": "" for pid in (1, 2, 3, 4, 5, 6)} | {
        "/proc/2/task/2/children": "3 ",
        "/proc/2/task/22/children": "4 ",
        "/proc/3/task/3/children": "5 ",
    })  # fmt: skip
    assert sorted(machine.tree(2, root=listed)) == [3, 4, 5]
    assert machine.tree(99, root=listed) == []
