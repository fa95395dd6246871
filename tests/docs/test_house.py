"""The rules of the house that a program can check. CONTRIBUTING.md gives the reasons."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import penstock

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "penstock"
CORE: Final = PACKAGE / "_core"

# None of these is needed to import penstock; each is imported when it is used.
ON_USE: Final = (
    "cv2", "h5py", "IPython", "jax", "keras", "ml_dtypes", "pandas", "PIL", "psutil", "pyarrow", "ray", "scipy",
    "simplejpeg", "tensorflow", "tinygrad", "torch", "tqdm", "zstandard",
)  # fmt: skip

MODULES: Final = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def every_module() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", MODULES, ids=name_of)


def modules_on_map() -> list[str]:
    """Each module on the map in CONTRIBUTING.md, in its order, as a path below src/penstock."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = re.search(r"^## The map\n.*?^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert drawn, "CONTRIBUTING.md has no map: a text block under '## The map'"
    names, folder = [], ""
    for line in drawn[1].splitlines():
        if match := re.match(r"(?:src/penstock/(?P<folder>[\w/]*)|  (?P<file>[\w/]+\.py))(?:\s|$)", line):
            if match["file"]:
                names.append(folder + match["file"])
            else:
                folder = match["folder"]
    return names


# ---------------------------------------- what is imported when


def test_importing_penstock_imports_no_framework() -> None:
    script = "import sys, json, penstock; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert sorted(set(ON_USE) & set(json.loads(done.stdout))) == []


def place(module: str) -> int:
    """Where a file of the engine stands on the map, which lists them in the order in which data goes through."""
    on_map = (Path(name).with_suffix("").parts for name in modules_on_map())
    order = list(dict.fromkeys(parts[1] for parts in on_map if parts[0] == "_core"))  # a folder has one place
    assert module in order, f"_core/{module} has no place yet: give it one on the map in CONTRIBUTING.md"
    return order.index(module)


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each module that is imported from penstock, dotted, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.startswith("penstock"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            # `from penstock._core import arena` names a module, `from penstock._core.arena import x` a thing in one.
            packages = node.module in ("penstock", "penstock._core")
            yield from ((f"{node.module}.{a.name}" if packages else str(node.module), node.lineno) for a in node.names)


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=name_of)
def test_the_engine_imports_only_files_that_stand_before_the_importing_one(path: Path) -> None:
    own = path.relative_to(CORE).with_suffix("").parts[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if own == "__init__":
        assert list(imports_of(tree)) == [], "_core/__init__.py imports nothing: users import from penstock"
        return
    on_use = {line for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for _, line in imports_of(node)}
    wrong = []
    for module, line in imports_of(tree):
        first, *rest = module.removeprefix("penstock.").split(".")
        if first == "_core":
            if rest[0] != own and place(rest[0]) >= place(own):
                wrong.append(f"line {line}: {own} imports {rest[0]}, which stands after it")
        elif line not in on_use:
            wrong.append(f"line {line}: {own} imports {module} from outside the engine")
    assert wrong == []
    place(own)


# ---------------------------------------- names and docstrings


@every_module()
def test_a_module_is_named_after_what_it_holds(path: Path) -> None:
    empty = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers", "tools", "base"}
    assert empty.isdisjoint(path.relative_to(PACKAGE).with_suffix("").parts)


@every_module()
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name_of(path)} has no docstring"


def own_docstring(thing: Any) -> str:
    """The docstring that was written for it: not inherited, not made up by dataclass."""
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else getattr(thing, "__doc__", None)
    text = (text or "").strip()
    return "" if text.startswith(f"{getattr(thing, '__name__', '')}(") else text


@pytest.mark.parametrize("name", sorted(getattr(penstock, "__all__", ())))
def test_a_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(penstock, name)
    if not (inspect.isclass(thing) or callable(thing)):
        return  # a constant; its value says it
    silent = [] if own_docstring(thing) else [name]
    if inspect.isclass(thing) and thing.__module__.startswith("penstock"):
        for attribute, value in vars(thing).items():
            asked = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
            if asked and not attribute.startswith("_") and not own_docstring(value):
                silent.append(f"{name}.{attribute}")
    assert silent == []


# ---------------------------------------- what is in the repository


def tracked() -> list[Path]:
    """Files that are tracked, or would be by the next `git add`."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Written with classes of one character, so that this file does not match itself.
FORBIDDEN: Final = {
    "a path of somebody's machine": re.compile(
        r"(?<![\w.*}])/(?:hom[e]|User[s]|roo[t]|wor[k]|workspac[e])/\w|[A-Z]:\\User[s]",
    ),
    "a package index": re.compile(
        r"inde[x][-_]url|https?://[^\s/]+(?:/[\w.-]+)*/simpl[e]\b|artifactor[y]|devp[i]\b",
        re.IGNORECASE,
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_names(what: str) -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        for number, line in enumerate(text.splitlines(), start=1):
            if match := FORBIDDEN[what].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_the_map_in_contributing_names_every_module_and_no_other() -> None:
    on_map = set(modules_on_map())
    there = {name for path in MODULES if (name := name_of(path)) == "__init__.py" or path.name != "__init__.py"}
    assert on_map == there, f"only on the map: {sorted(on_map - there)}; missing from it: {sorted(there - on_map)}"


# ---------------------------------------- the check after each test does see what is left

LEAVES: Final = """
import mmap, os, subprocess, sys, tempfile, threading, time, pytest
kept = []

def test_child(): kept.append(subprocess.Popen(["sleep", "30"]))
def test_orphan():
    script = "import subprocess as s; print(s.Popen(['sleep', '30'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    kept.append(int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout))
def test_zombie(): kept.append(os.fork() or os._exit(0))
def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, daemon=True).start()
def test_fd(): kept.append(os.open(os.devnull, os.O_RDONLY))
def test_mapping():
    fd = os.memfd_create("left")
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)
def test_shm(): open("/dev/shm/penstock-left-%d" % os.getpid(), "w").close()
def test_temp(): kept.append(tempfile.mkdtemp(prefix="penstock-left-"))

@pytest.mark.leaves("fd", reason="to see that a mark allows it")
def test_allowed(): kept.append(os.open(os.devnull, os.O_RDONLY))
def test_in_time():
    process = subprocess.Popen(["sleep", "0.1"])
    threading.Thread(target=process.wait).start()
def test_cleans_up():
    import signal
    os.unlink("/dev/shm/penstock-left-%d" % os.getpid())
    kept[0].kill(), kept[0].wait(), os.kill(kept[1], signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is left is read from /proc")
def test_the_check_after_each_test_sees_each_kind_of_thing_left(tmp_path: Path) -> None:
    check = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    short = re.sub(r"^GRACE_S: Final = .*$", "GRACE_S: Final = 0.5", check, flags=re.MULTILINE)
    assert short != check
    (tmp_path / "conftest.py").write_text(short, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = leaves(*kinds, reason)\n", encoding="utf-8")
    (tmp_path / "test_leaves.py").write_text(LEAVES, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    left = set(re.findall(r"^ERROR \S+::test_(\w+)", done.stdout, re.MULTILINE))
    assert left == {"child", "orphan", "zombie", "thread", "fd", "mapping", "shm", "temp"}, done.stdout
    assert "11 passed, 8 errors" in done.stdout
