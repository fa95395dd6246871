"""What this machine and this process may use: the only reader of /proc, /sys, cgroups and resource limits.

Runs in every process. Everything here is a look at one moment: nothing is cached, because limits and the
group a process is in can change while it runs. Nothing here raises for what is missing: files differ between
kernels and containers, and processes vanish between two reads, so an unreadable number is 0 or None.
It does not decide anything: what to do with these numbers is ``plan``'s business.

``root`` stands before every path that is read, so that tests can give a tree of their own.
Linux is first class; macOS and Windows get what a few lines can give (never run there so far).
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "Features",
    "Limit",
    "Machine",
    "Rlimit",
    "anon_bytes",
    "anon_gauge",
    "available_bytes",
    "data_bytes",
    "heap_gauge",
    "limit_data",
    "look",
    "oom_kills",
    "own_bytes",
    "peak_rss_bytes",
    "private_bytes",
    "pss_bytes",
    "reset_peak",
    "resident_bytes",
    "rlimits",
    "rss_bytes",
    "tree",
]

# cgroup v1 writes "no limit" as the largest multiple of a page below 2**63; 2**60 bytes is no machine's memory.
_UNLIMITED: Final = 1 << 60
_PR_GET_PDEATHSIG: Final = 2
_SMALL_OBJECT_BYTES: Final = 64  # what a block of Python's own allocator has on average; 512 is the most
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_RLIMIT_LINE: Final = re.compile(r"Max (.+?)\s{2,}(\S+)\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory limit of a container level that holds this process."""

    where: str
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int  # part of used_bytes that the kernel takes back by itself: page cache, slab

    @property
    def headroom_bytes(self) -> int:
        """What can still be allocated under this limit."""
        return max(0, min(self.limit_bytes, self.limit_bytes - self.used_bytes + self.reclaimable_bytes))


@dataclass(frozen=True, slots=True)
class Rlimit:
    """A resource limit of this process; None is unlimited (or a system without it)."""

    soft: int | None = None
    hard: int | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """What the kernel lets this process do, each found by trying it."""

    memfd: bool
    pidfd: bool
    seqpacket: bool
    pdeathsig: bool
    smaps_rollup: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as this process sees it, at one moment."""

    system: str
    kernel: str
    cores: int  # to plan with: affinity and quota counted, at least 1
    cores_present: int
    cores_allowed: int  # by affinity (and PYTHON_CPU_COUNT), without the quota
    cpu_quota: float | None  # in cores; None: no quota
    memory_bytes: int
    available_bytes: int
    bound_by: str  # what makes available_bytes no larger
    swap_bytes: int
    swap_free_bytes: int
    limits: tuple[Limit, ...]  # innermost first
    oom_kills: int | None
    shm_bytes: int | None  # None: there is no /dev/shm
    shm_free_bytes: int | None
    nofile: Rlimit
    address_space: Rlimit
    data: Rlimit
    nproc: Rlimit
    overcommit: int | None  # vm.overcommit_memory
    features: Features
    start_methods: tuple[str, ...]


def available_bytes(*, root: str = "/") -> int:
    """What can be allocated now without swapping, failing or being killed.

    The least of: the host's available memory; the headroom of every memory cgroup level that holds this process;
    the commit limit where the kernel enforces it; the headroom under RLIMIT_AS and RLIMIT_DATA.
    About 300 us: a dozen small files.
    """
    return min((size for _, size in _bounds(root)), default=0)


def look(root: str = "/") -> Machine:
    """Everything at once; about 1 ms."""
    import multiprocessing  # here, because a worker that only measures memory should not pay for it

    meminfo = _read(root, "/proc/meminfo")
    limits = rlimits(root=root)
    bound_by, available = min(_bounds(root), key=lambda bound: bound[1], default=("nothing known", 0))
    allowed, quota = _cores_allowed(root), _cpu_quota(root)
    shm = _filesystem(root, "/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        kernel=_read(root, "/proc/sys/kernel/osrelease").strip() or platform.release(),
        # Rounded up: a worker waits for its disk some of the time, so part of a core is worth a worker.
        cores=max(1, min(allowed, math.ceil(quota) if quota else allowed)),
        cores_present=os.cpu_count() or 1,
        cores_allowed=allowed,
        cpu_quota=quota,
        memory_bytes=_kib(meminfo, "MemTotal") or _memory_elsewhere()[0],
        available_bytes=available,
        bound_by=bound_by,
        swap_bytes=_kib(meminfo, "SwapTotal"),
        swap_free_bytes=_kib(meminfo, "SwapFree"),
        limits=tuple(_memory_limits(root)),
        oom_kills=oom_kills(root=root),
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        nofile=limits.get("open files", Rlimit()),
        address_space=limits.get("address space", Rlimit()),
        data=limits.get("data size", Rlimit()),
        nproc=limits.get("processes", Rlimit()),
        overcommit=_int(_read(root, "/proc/sys/vm/overcommit_memory")),
        features=_features(root),
        start_methods=tuple(multiprocessing.get_all_start_methods()),
    )


def oom_kills(*, root: str = "/") -> int | None:
    """How many processes of this process's own cgroup the OOM killer has taken; None where nobody counts.

    About 60 us.
    """
    for version, levels in _groups(root, "memory"):
        text = _read(root, f"{levels[0]}/{'memory.events' if version == 2 else 'memory.oom_control'}")
        counts = _table(text)
        if "oom_kill" in counts:
            return counts["oom_kill"]
    return None


# ---- one process ---------------------------------------------------------------------------------------------


def pss_bytes(pid: int, *, root: str = "/") -> int:
    """Memory of one process, each shared page divided by the number of processes that map it; 0 if it is gone.

    Swapped-out pages count. The kernel walks the page tables: about 75 us for a bare interpreter and 3 to 4.5 us more
    for each resident MiB (4 ms for 1 GiB), so not for every batch. Where smaps cannot be read (another user's process,
    a hardened kernel) shared pages are left out altogether, since nobody says who shares them.
    """
    text = _smaps(root, pid)
    return _kib(text, "Pss", "SwapPss") if text else _private_by_statm(root, pid)


def private_bytes(pid: int, *, root: str = "/") -> int:
    """Memory that only this process maps, swapped-out pages counted: what its death would give back.

    Costs what ``pss_bytes`` costs, and falls back as it does.
    """
    text = _smaps(root, pid)
    if text:
        return _kib(text, "Private_Clean", "Private_Dirty", "Private_Hugetlb", "SwapPss")
    return _private_by_statm(root, pid)


def own_bytes(pid: int, *, root: str = "/") -> int:
    """Memory of one process without shared memory segments (an arena is counted once, elsewhere); 0 if it is gone."""
    text = _smaps(root, pid)
    if "Pss_Anon" in text:
        return _kib(text, "Pss_Anon", "Pss_File", "SwapPss")
    return private_bytes(pid, root=root)


def peak_own_bytes(pid: int, *, root: str = "/") -> tuple[int, int]:
    """``own_bytes`` now, and the most it was since the last call of this, which begins to count anew."""
    own = own_bytes(pid, root=root)
    status = _read(root, f"/proc/{pid}/status")
    risen = _kib(status, "VmHWM") - _kib(status, "RssAnon", "RssFile", "RssShmem")
    reset_peak(pid, root=root)
    return own, own + max(0, risen)


def crew_bytes(pids: Sequence[int], *, forked: bool, root: str = "/") -> tuple[int, list[int]]:
    """``own_bytes`` of processes together, and by how much each had risen above that since the last call.

    ``forked``: from this process. What they still share with it is this process's, but counted with each in proportion.
    """
    both = [peak_own_bytes(pid, root=root) for pid in pids]
    own = sum(now for now, _ in both)
    if forked:
        text = _smaps(root, os.getpid())
        # Of what others have a part of, too, this is theirs. They may be others than these.
        lent = max(0, _kib(text, "Anonymous") - _kib(text, "Pss_Anon"))
        own = max(own - lent, min(own, sum(private_bytes(pid, root=root) for pid in pids)))
    return own, [most - now for now, most in both]


def anon_bytes(pid: int, *, root: str = "/") -> int:
    """Anonymous resident memory of one process, from counters that the kernel keeps; 0 if it is gone.

    About 17 us, whatever the size of the process. Copy-on-write pages that a fork still shares are counted in full.
    """
    return _kib(_read(root, f"/proc/{pid}/status"), "RssAnon")


def anon_gauge() -> Callable[[], int]:
    """A function that gives ``anon_bytes`` of this process in 2 us: the file is opened once. 0 where there is none."""
    try:
        fd = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return lambda: 0
    page = os.sysconf("SC_PAGE_SIZE")

    def anon() -> int:
        _, resident, shared, *_ = os.pread(fd, 128, 0).split()
        return (int(resident) - int(shared)) * page

    return anon


def heap_gauge() -> Callable[[], int] | None:
    """A function that gives the bytes in use on the heap of this process, freed ones not counted; None without glibc.

    A microsecond or two; milliseconds where there are hundreds of thousands of holes. Python's own small objects are
    estimated from their number.
    """
    if sys.platform != "linux":
        return None
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks) + int(info.hblkhd) + _SMALL_OBJECT_BYTES * sys.getallocatedblocks()

    return in_use


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def resident_bytes() -> int:
    """Resident memory of this process, shared pages in full: what ``peak_rss_bytes`` is the most of."""
    return _kib(_read("/", "/proc/self/status"), "VmRSS")


def data_bytes() -> int:
    """Writable private memory of this process by its size, touched or not: what ``limit_data`` limits."""
    return _kib(_read("/", "/proc/self/status"), "VmData")


def limit_data(growth_bytes: int, *, above_bytes: int | None = None) -> None:
    """Let the private memory of this process grow by so much and no more: beyond that, allocations fail.

    Counted from ``above_bytes``, an earlier ``data_bytes()``, or from what it is now. RLIMIT_DATA counts writable
    private mappings by their size, touched or not; shared memory is not counted.
    """
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    size = data_bytes() if above_bytes is None else above_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = size + growth_bytes if hard == resource.RLIM_INFINITY else min(hard, size + growth_bytes)
    if size:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def rss_bytes(pid: int, *, root: str = "/") -> int:
    """Resident memory of one process, shared pages in full; 0 if it is gone."""
    return _kib(_read(root, f"/proc/{pid}/status"), "VmRSS")


def peak_rss_bytes(pid: int, *, root: str = "/") -> int:
    """Most resident memory, shared pages in full, since the process began or since ``reset_peak``; about 17 us."""
    return _kib(_read(root, f"/proc/{pid}/status"), "VmHWM")


def reset_peak(pid: int, *, root: str = "/") -> bool:
    """Let ``peak_rss_bytes`` begin again at what is resident now; False where that is not allowed. About 2 us."""
    try:
        fd = os.open(_under(root, f"/proc/{pid}/clear_refs"), os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, b"5")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def tree(pid: int, *, root: str = "/") -> list[int]:
    """All descendants of a process, parents before children, itself not included.

    About 16 us per process (and thread) of the tree; without the kernel's list of children 5 us per process of the
    machine. A process whose parent died belongs to whoever adopted it.
    """
    if _children(root, pid) is None:
        found = _descendants_by_scan(root, pid)
    else:
        found = []
        todo = [pid]
        while todo:
            children = _children(root, todo.pop(0)) or []
            found += children
            todo += children
    return found


def _children(root: str, pid: int) -> list[int] | None:
    # One file per thread: the children that this thread forked. None: the kernel was built without it, or pid is gone.
    tasks = _under(root, f"/proc/{pid}/task")
    try:
        threads = os.listdir(tasks)
    except OSError:
        return None
    if not threads or not os.path.exists(f"{tasks}/{threads[0]}/children"):
        return None
    return [int(child) for thread in threads for child in _read(root, f"/proc/{pid}/task/{thread}/children").split()]


def _descendants_by_scan(root: str, pid: int) -> list[int]:
    try:
        entries = os.listdir(_under(root, "/proc"))
    except OSError:
        return []
    children: dict[int, list[int]] = {}
    for entry in entries:
        if entry.isdigit():
            # The second field is the command in parentheses, which may itself contain spaces and parentheses.
            fields = _read(root, f"/proc/{entry}/stat").rpartition(")")[2].split()
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    todo = [pid]
    while todo:
        born = children.get(todo.pop(0), [])
        found += born
        todo += born
    return found


def _smaps(root: str, pid: int) -> str:
    return _read(root, f"/proc/{pid}/smaps_rollup") or _read(root, f"/proc/{pid}/smaps")


def _private_by_statm(root: str, pid: int) -> int:
    fields = _read(root, f"/proc/{pid}/statm").split()
    if len(fields) > 2:
        return max(0, int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return _footprint_elsewhere(pid) if root == "/" and sys.platform != "linux" else 0


# ---- what bounds memory --------------------------------------------------------------------------------------


def _bounds(root: str) -> Iterator[tuple[str, int]]:
    meminfo = _read(root, "/proc/meminfo")
    if meminfo:
        yield "the machine's memory", _kib(meminfo, "MemAvailable") or _kib(meminfo, "MemFree")
        if _int(_read(root, "/proc/sys/vm/overcommit_memory")) == 2:
            left = _kib(meminfo, "CommitLimit") - _kib(meminfo, "Committed_AS")
            yield "the commit limit (vm.overcommit_memory=2)", max(0, left)
    elif root == "/":
        yield "the machine's memory", _memory_elsewhere()[1]
    for limit in _memory_limits(root):
        yield limit.where, limit.headroom_bytes
    status = _read(root, "/proc/self/status")
    bounds = rlimits(root=root)
    for name, title, used in (("address space", "RLIMIT_AS", "VmSize"), ("data size", "RLIMIT_DATA", "VmData")):
        soft = bounds.get(name, Rlimit()).soft
        if soft is not None:
            yield title, max(0, soft - _kib(status, used))


def _memory_limits(root: str) -> Iterator[Limit]:
    for version, levels in _groups(root, "memory"):
        yield from _limits_v2(root, levels) if version == 2 else _limits_v1(root, levels)


def _limits_v2(root: str, levels: list[str]) -> Iterator[Limit]:
    for level in levels:
        for name in ("memory.max", "memory.high"):
            limit = _int(_read(root, f"{level}/{name}"))  # "max" is no number: no limit
            if limit is not None and limit < _UNLIMITED:
                stat = _table(_read(root, f"{level}/memory.stat"))
                # Active file pages count as well: the kernel drops them as readily once the inactive ones are used up,
                # and a job that reads its files twice has most of its cache there. MemAvailable counts them too.
                reclaimable = sum(stat.get(key, 0) for key in ("inactive_file", "active_file", "slab_reclaimable"))
                used = _int(_read(root, f"{level}/memory.current")) or 0
                yield Limit(f"{level}/{name}", limit, used, min(used, reclaimable))


def _limits_v1(root: str, levels: list[str]) -> Iterator[Limit]:
    least, used, reclaimable = _UNLIMITED, 0, 0
    least_above = _UNLIMITED
    for level in levels:
        # Before use_hierarchy became the only way (5.11), a parent without it did not hold its children.
        if level != levels[0] and _int(_read(root, f"{level}/memory.use_hierarchy")) == 0:
            break
        limit = _int(_read(root, f"{level}/memory.limit_in_bytes"))
        if limit is None:
            continue
        stat = _table(_read(root, f"{level}/memory.stat"))
        used = _int(_read(root, f"{level}/memory.usage_in_bytes")) or 0
        reclaimable = min(used, sum(stat.get(key, 0) for key in ("total_inactive_file", "total_active_file")))
        least_above = min(least_above, stat.get("hierarchical_memory_limit", _UNLIMITED))
        if limit < _UNLIMITED:
            least = min(least, limit)
            yield Limit(f"{level}/memory.limit_in_bytes", limit, used, reclaimable)
    if least_above < least:
        # In a container the levels above its own cannot be read, but their smallest limit is told here. What others
        # use under it is not told, so this headroom may be too large.
        yield Limit(f"{levels[0]}/memory.stat (a level above)", least_above, used, reclaimable)


def _cpu_quota(root: str) -> float | None:
    quotas: list[float] = []
    for version, levels in _groups(root, "cpu"):
        for level in levels:
            if version == 2:
                quota, _, period = _read(root, f"{level}/cpu.max").strip().partition(" ")
            else:
                quota = _read(root, f"{level}/cpu.cfs_quota_us").strip()
                period = _read(root, f"{level}/cpu.cfs_period_us").strip()
            if quota.isdigit() and period.isdigit() and int(quota) > 0 < int(period):  # "max", "-1": none
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


# ---- where this process stands in the cgroup trees -----------------------------------------------------------


def _groups(root: str, controller: str) -> Iterator[tuple[int, list[str]]]:
    """For each mounted cgroup tree that may have ``controller``: its version, and the folders from own to topmost."""
    paths: dict[int, str] = {}
    for line in _read(root, "/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    if not paths:
        return
    mounts: dict[int, list[tuple[str, str]]] = {1: [], 2: []}
    for line in _read(root, "/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        head, tail = before.split(" "), after.split(" ")
        if len(head) < 5 or len(tail) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(tail[0])
        if version == 2 or (version == 1 and controller in tail[2].split(",")):
            mounts[version].append((_unescaped(head[3]), _unescaped(head[4])))
    for version, path in sorted(paths.items()):
        levels = _levels(path, mounts[version])
        if levels:
            yield version, levels


def _levels(path: str, mounts: list[tuple[str, str]]) -> list[str]:
    """Folders from the process's own level up to the mount point; some may not exist."""
    # A container often mounts only its own branch: the mount's root is then a prefix of the path. Of several mounts the
    # one with the shortest root shows the most levels above us.
    holding = [(len(top), point, top) for top, point in mounts if _inside(path, top)]
    if not holding:
        # The path is told from another namespace. What is mounted is still the container's own branch.
        return [mounts[-1][1]] if mounts else []
    _, point, top = min(holding)
    below = path[len(top.rstrip("/")) :].strip("/")
    parts = below.split("/") if below else []
    return ["/".join([point.rstrip("/"), *parts[:n]]) for n in range(len(parts), -1, -1)]


def _inside(path: str, top: str) -> bool:
    if ".." in path.split("/") or ".." in top.split("/"):  # outside of what this namespace can name
        return False
    return path == top or path.startswith(top.rstrip("/") + "/")


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)


# ---- the rest of the snapshot --------------------------------------------------------------------------------


def _cores_allowed(root: str) -> int:
    if root == "/":
        if hasattr(os, "process_cpu_count"):  # 3.13: PYTHON_CPU_COUNT and -X cpu_count counted
            return int(os.process_cpu_count() or 1)
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    count = 0
    for line in _read(root, "/proc/self/status").splitlines():
        key, _, ranges = line.partition(":")
        if key == "Cpus_allowed_list":
            for part in ranges.strip().split(","):
                first, _, last = part.partition("-")
                count += int(last or first) - int(first) + 1
    return count or 1


def rlimits(*, root: str = "/") -> dict[str, Rlimit]:
    """The resource limits of this process, by the names that the kernel gives them."""
    text = _read(root, "/proc/self/limits")
    if text:
        matches = (_RLIMIT_LINE.match(line) for line in text.splitlines())
        return {match[1]: Rlimit(_int(match[2]), _int(match[3])) for match in matches if match}
    if root != "/" or sys.platform == "win32":
        return {}
    import resource

    names = {"open files": "NOFILE", "address space": "AS", "data size": "DATA", "processes": "NPROC"}
    pairs = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{short}"))
        for name, short in names.items()
        if hasattr(resource, f"RLIMIT_{short}")
    }
    return {
        name: Rlimit(*(None if value == resource.RLIM_INFINITY else value for value in pair))
        for name, pair in pairs.items()
    }


def _features(root: str) -> Features:
    return Features(
        memfd=_has_memfd(),
        pidfd=_has_pidfd(),
        seqpacket=_has_seqpacket(),
        pdeathsig=_has_pdeathsig(),
        smaps_rollup=bool(_read(root, "/proc/self/smaps_rollup")),
    )


def _has_memfd() -> bool:
    try:
        os.close(os.memfd_create("penstock-look"))
    except (AttributeError, OSError) as error:  # OSError: a sandbox's filter
        return _only_full(error)
    return True


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return _only_full(error)
    return True


def _has_seqpacket() -> bool:
    try:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (AttributeError, OSError, ValueError) as error:
        return _only_full(error)
    for end in pair:
        end.close()
    return True


def _only_full(error: Exception) -> bool:
    """Whether it is there, and only all descriptors are in use at this moment."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _has_pdeathsig() -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(ctypes.c_int())) == 0)
    except (AttributeError, OSError, TypeError):
        return False


def _filesystem(root: str, path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(_under(root, path))
    except (AttributeError, OSError):
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


# ---- macOS and Windows ---------------------------------------------------------------------------------------


def _memory_elsewhere() -> tuple[int, int]:
    """Total and available memory without /proc; half of the total where the system does not say what is available."""
    if sys.platform == "win32":

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("sizes", ctypes.c_ulonglong * 7)]

        status = Status(length=ctypes.sizeof(Status))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        # sizes: total and available memory, total and available commit, ...: an allocation needs both.
        return int(status.sizes[0]), int(min(status.sizes[1], status.sizes[3]))
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
    except (OSError, ValueError):
        return 0, 0
    if sys.platform == "darwin":
        libc = ctypes.CDLL(None)
        pages = 0
        for name in (b"vm.page_free_count", b"vm.page_pageable_external_count"):  # free; file-backed, reclaimable
            value, size = ctypes.c_uint64(), ctypes.c_size_t(8)
            if libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)) == 0:
                pages += value.value
        return total, min(total, pages * page) or total // 2
    return total, total // 2


def _footprint_elsewhere(pid: int) -> int:
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 64)()
        # rusage_info_v2: a uuid of 16 bytes, then counters; the eighth is the physical footprint.
        failed = ctypes.CDLL("libproc.dylib").proc_pid_rusage(pid, 2, ctypes.byref(usage))
        return 0 if failed else int(usage[9])
    if sys.platform == "win32":

        class Counters(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("faults", ctypes.c_ulong), ("sizes", ctypes.c_size_t * 9)]

        kernel = ctypes.windll.kernel32
        kernel.OpenProcess.restype = ctypes.c_void_p
        handle = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return 0
        counters = Counters(length=ctypes.sizeof(Counters))
        done = kernel.K32GetProcessMemoryInfo(ctypes.c_void_p(handle), ctypes.byref(counters), counters.length)
        kernel.CloseHandle(ctypes.c_void_p(handle))
        return int(counters.sizes[8]) if done else 0  # PrivateUsage
    return 0


# ---- reading -------------------------------------------------------------------------------------------------


def _under(root: str, path: str) -> str:
    return root.rstrip("/") + path


def _read(root: str, path: str) -> str:
    """The file's text; empty where it is missing, forbidden, or its process vanished while being read."""
    try:
        fd = os.open(_under(root, path), os.O_RDONLY)
    except OSError:
        return ""
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 16):  # /proc gives at most a few pages at a time
            chunks.append(chunk)
    except OSError:
        return ""
    finally:
        os.close(fd)
    return b"".join(chunks).decode("utf-8", "replace")


def _int(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.removeprefix("-").isdigit() else None


def _table(text: str) -> dict[str, int]:
    """``name value`` lines, as in memory.stat."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _kib(text: str, *names: str) -> int:
    """Bytes of all ``Name:   123 kB`` lines with these names, added up."""
    total = 0
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        if key in names:
            total += int(rest.split()[0]) * 1024
    return total
