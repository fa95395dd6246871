"""The command line as a user meets it: text, exit codes, and what stays quiet."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from penstock import _cli
from penstock._cli import doctor
from penstock._core import machine
from penstock._core.budget import GiB, MiB
from penstock._core.errors import BudgetError

PLAN = ["plan", "--shape", "3,224,224"]

FINE = machine.Machine(
    system="Linux x86_64",
    kernel="6.1",
    cores=8,
    cores_present=8,
    cores_allowed=8,
    cpu_quota=None,
    memory_bytes=GiB(64),
    available_bytes=GiB(48),
    bound_by="the machine's memory",
    swap_bytes=GiB(8),
    swap_free_bytes=GiB(8),
    limits=(),
    oom_kills=0,
    shm_bytes=GiB(32),
    shm_free_bytes=GiB(32),
    nofile=machine.Rlimit(65536, 1048576),
    address_space=machine.Rlimit(),
    data=machine.Rlimit(),
    nproc=machine.Rlimit(250_000, 250_000),
    overcommit=0,
    features=machine.Features(memfd=True, pidfd=True, seqpacket=True, pdeathsig=True, smaps_rollup=True),
    start_methods=("fork", "spawn", "forkserver"),
)


def penstock(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_version_and_help_are_told() -> None:
    assert penstock("--version").stdout.startswith("penstock ")
    shown = penstock("--help")
    assert shown.returncode == 0
    for command in ("demo", "plan", "doctor", "bench"):
        assert f"\n    {command} " in shown.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "COMMAND"),
        (["dctor"], "dctor"),
        (["plan"], "--shape"),
        (["plan", "--shape", "3,x"], "write it as 3,224,224"),
        ([*PLAN, "--dtype", "float31"], "'float31' is not a dtype"),
        ([*PLAN, "--memory", "lots"], "--memory='lots' cannot be read as a size"),
        ([*PLAN, "--memory", "0"], "leaves no memory"),
        ([*PLAN, "--batch-size", "0"], "at least 1"),
        ([*PLAN, "--workers", "-1"], "--workers"),
        ([*PLAN, "--dtype", "uint8", "--dtype", "int64"], "1 --shape but 2 --dtype"),
        ([*PLAN, "--shape", "label=scalar"], "give every array a name of its own"),
        ([*PLAN, "--cast", "float16", "--cast", "image=uint8"], "need a name each"),
    ],
)
def test_wrong_usage_is_told_on_stderr_and_exits_2(args: list[str], said: str) -> None:
    done = penstock(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for one command, so that its ``run`` can end in any way."""
    module = types.ModuleType("penstock._cli.demo")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock._cli.demo", module)
    return module


def test_an_error_of_penstock_is_one_line_and_exits_1(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: object) -> int:
        raise BudgetError("a batch takes 2 GiB,\n    memory= is 1 GiB", least=GiB(2))

    command.run = run  # type: ignore[attr-defined]
    assert _cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "penstock: a batch takes 2 GiB, memory= is 1 GiB\n"


def test_an_error_of_ours_is_not_hidden(command: types.ModuleType) -> None:
    def run(_: object) -> int:
        raise ZeroDivisionError

    command.run = run  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        _cli.main(["demo"])


def test_an_interrupt_is_quiet_and_exits_130() -> None:
    script = (
        "import sys, time, types\nfrom penstock import _cli\n"
        "demo = types.ModuleType('penstock._cli.demo')\ndemo.add_arguments = lambda parser: None\n"
        "def run(args):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "demo.run = run\nsys.modules['penstock._cli.demo'] = demo\nsys.exit(_cli.main(['demo']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize(
    ("args", "codes"),
    [
        (["doctor"], {141}),
        (["doctor", "--json"], {141}),
        (["--help"], {0, 141}),  # argparse swallows the error itself where stdout is unbuffered
    ],
)
def test_a_reader_that_goes_away_is_no_error(args: list[str], codes: set[int]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *args],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode in codes


def test_the_plan_of_a_shape_is_printed() -> None:
    done = penstock(*PLAN, "--dtype", "float32", "--memory", "2 GiB", "--batch-size", "32", "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "32" in done.stdout
    assert "GiB" in done.stdout


def test_the_plan_of_a_sample_larger_than_memory_costs_none() -> None:
    huge = "1000000,1000000"
    done = penstock("plan", "--shape", huge, "--memory", "1 GiB", "--batch-size", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "more",
    [
        ["--batch-size", "max"],
        ["--memory", "0.25"],
        ["--shape", "scalar", "--dtype", "uint8", "--dtype", "int64"],
        ["--dtype", "bfloat16"],
        ["--cast", "float16"],
        ["--workers", "0"],
    ],
)
def test_every_option_of_plan_gives_a_plan(more: list[str]) -> None:
    options = more if "--memory" in more else [*more, "--memory", "1 GiB"]
    done = penstock(*PLAN, *options)
    assert (done.returncode, done.stderr) == (0, "")


def test_named_shapes_make_a_dict_and_can_be_cast_by_name() -> None:
    args = ["--shape", "image=224,224,3", "--shape", "label=scalar", "--dtype", "uint8", "--dtype", "int64"]
    done = penstock("plan", *args, "--cast", "image=float16", "--memory", "1 GiB")
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_fits_100_columns_and_ends_with_what_would_bite() -> None:
    done = penstock("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 100
    for title in (
        "Python",
        "Cores",
        "Memory",
        "Swap",
        "Container",
        "/dev/shm",
        "Descriptors",
        "Start methods",
        "Found",
    ):
        assert any(line.startswith(f"  {title} ") for line in lines), title
    assert "What would bite" in lines
    assert lines[-1] != "What would bite"


def test_doctor_says_the_same_as_json() -> None:
    told = json.loads(penstock("doctor", "--json").stdout)
    assert told["machine"]["memory_bytes"] == machine.look().memory_bytes
    assert told["found"]["numpy"]
    assert set(told["machine"]["features"]) == {"memfd", "pidfd", "seqpacket", "pdeathsig", "smaps_rollup"}
    assert all(set(bite) == {"what", "do"} for bite in told["bites"])


def test_doctor_finds_frameworks_without_importing_them() -> None:
    script = (
        "import sys\nfrom penstock import _cli\n_cli.main(['doctor'])\n"
        "heavy = {'torch', 'jax', 'tinygrad', 'tensorflow', 'keras', 'ray', 'pyarrow', 'PIL', 'cv2'}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("imported: []\n")


def test_nothing_bites_on_a_roomy_machine() -> None:
    assert list(doctor.bites(FINE, {})) == []


def _small() -> Iterator[tuple[str, machine.Machine, dict[str, str]]]:
    limit = machine.Limit("/sys/fs/cgroup/memory.max", GiB(4), GiB(1), 0)
    without = dataclasses.replace
    yield "OOM killer", without(FINE, oom_kills=2), {}
    yield "100 MiB can be allocated", without(FINE, available_bytes=MiB(100)), {}
    yield "no swap", without(FINE, available_bytes=GiB(1), swap_bytes=0), {}
    yield "4 GiB of the machine's 64 GiB", without(FINE, limits=(limit,)), {}
    yield "vm.overcommit_memory=2", without(FINE, overcommit=2), {}
    yield "RLIMIT_AS", without(FINE, address_space=machine.Rlimit(GiB(8), None)), {}
    yield "RLIMIT_DATA", without(FINE, data=machine.Rlimit(GiB(8), None)), {}
    yield "1.5 of 8 cores", without(FINE, cpu_quota=1.5, cores=2), {}
    yield "8 workers x 16 threads = 128 on 8 cores", FINE, {"OMP_NUM_THREADS": "16"}
    yield "1,024 files", without(FINE, nofile=machine.Rlimit(1024, 4096)), {}
    yield "200 processes", without(FINE, nproc=machine.Rlimit(200, 200)), {}
    yield "/dev/shm has 64 MiB free", without(FINE, shm_bytes=MiB(64), shm_free_bytes=MiB(64)), {}
    for name in ("memfd", "pidfd", "seqpacket", "pdeathsig", "smaps_rollup"):
        yield f"No {name}", without(FINE, features=without(FINE.features, **{name: False})), {}


@pytest.mark.parametrize(
    ("said", "seen", "threads"), [pytest.param(*case, id=case[0].replace(" ", "-")) for case in _small()]
)
def test_each_shortage_is_named_once_with_what_to_do(said: str, seen: machine.Machine, threads: dict[str, str]) -> None:
    (bite,) = doctor.bites(seen, threads)
    assert said in bite.what
    assert bite.do
