"""Every fenced block of the README and of docs/ is run, or says why not.

The ``python`` blocks of a page are one script, run as a user would run it: a real file, in an empty folder, in a fresh
process. The script is the page with everything else blanked out, so its line numbers are the page's. What an author can
say in an HTML comment on the line above a block:

- ``<!-- not run: reason -->`` above a ``python`` block leaves it out;
- ``<!-- run -->`` above a ``console`` block runs its lines that begin with ``$ penstock`` or ``$ python``;
- ``<!-- output -->`` above the ``text`` block after a ``python`` block: what that block printed, exactly;
- ``<!-- needs: keras, clang -->`` anywhere: modules and programs without which the page is skipped.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if path.exists())

# Below the limit of a test, so that the page's own stacks are shown rather than those of this file.
PAGE_S: Final = 100

_FENCE: Final = re.compile(r"(?P<indent> *)(?P<mark>`{3,}|~{3,}) *(?P<language>[\w+-]*)(?P<rest>.*)")
_COMMENT: Final = re.compile(r"\s*<!--\s*(?P<words>.*?)\s*-->\s*")
_NEEDS: Final = re.compile(r"^<!-- needs: (.*?) -->$", re.MULTILINE)
_END_OF_BLOCK: Final = "\x1e"  # record separator: no page prints it


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: the line of its opening fence (from 1), what stands in it, and the comment above it."""

    language: str
    line: int
    code: tuple[str, ...]
    comment: str

    @property
    def skipped(self) -> bool:
        return self.comment.startswith("not run")


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.splitlines()
    comment, at = "", 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is None:
            said = _COMMENT.fullmatch(lines[at])
            comment = said["words"] if said else comment if not lines[at].strip() else ""
            at += 1
            continue
        closing = re.compile(rf" *{re.escape(fence['mark'][0])}{{{len(fence['mark'])},}} *")
        end = next((i for i in range(at + 1, len(lines)) if closing.fullmatch(lines[i])), None)
        if end is None:
            raise ValueError(f"the block that opens on line {at + 1} is never closed")
        indent = len(fence["indent"])
        code = tuple(line[indent:] if not line[:indent].strip() else line for line in lines[at + 1 : end])
        found.append(Block(fence["language"], at + 1, code, comment))
        comment, at = "", end + 1
    return found


def script_of(blocks: Sequence[Block]) -> str:
    """The page as a script: code on the lines where it stands, and a mark on the line of each closing fence."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - len(lines))
        lines += block.code
        # Spawned children import this file again: the mark is only for the first one.
        lines.append(f'if __name__ == "__main__": print("\\x{ord(_END_OF_BLOCK):x}", end="", flush=True)')
    return "\n".join(lines) + "\n"


def run(command: Sequence[str], folder: Path) -> tuple[int | None, str, str]:
    """Run in a session of its own; (exit code or None after a hang, stdout, stderr with stacks)."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONIOENCODING": "utf-8", "COLUMNS": "120"},
    ) as process:
        try:
            out, err = process.communicate(timeout=PAGE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler answers with the stacks of all threads
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            return None, out, err
    assert gone(process.pid), f"{shlex.join(command)} ended, but 2 s later processes that it started are still there"
    return process.returncode, out, err


def gone(group: int) -> bool:
    """Whether all of this group end within two seconds; the check after each test sees only the group of the tests."""
    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    os.killpg(group, signal.SIGKILL)
    return False


def quoted(block: Block, page: Path) -> str:
    numbered = (f"{block.line + 1 + i:5d}  {line}" for i, line in enumerate(block.code))
    return f"{page.relative_to(ROOT)}, block of line {block.line}:\n" + "\n".join(numbered)


def ending(code: int | None) -> str:
    return f"did not end within {PAGE_S} s" if code is None else f"ended with exit code {code}"


def run_python(page: Path, blocks: Sequence[Block], folder: Path) -> dict[int, str]:
    """Run the blocks as one script; what each printed, by the line of the block."""
    script = folder / f"{page.stem.lower().replace('-', '_')}_page.py"
    script.write_text(script_of(blocks), encoding="utf-8")
    code, out, err = run([sys.executable, str(script)], folder)
    printed = out.split(_END_OF_BLOCK)
    if code != 0:
        last = blocks[min(len(printed), len(blocks)) - 1]
        pytest.fail(f"{quoted(last, page)}\n{ending(code)}\n--- stdout\n{out}\n--- stderr\n{err}", pytrace=False)
    return {block.line: text for block, text in zip(blocks, printed, strict=False)}


def commands_of(block: Block) -> list[list[str]]:
    text = "\n".join(block.code).replace("\\\n", " ")
    programs = {"python": [sys.executable], "penstock": [sys.executable, "-m", "penstock"]}
    commands = []
    for line in text.splitlines():
        if line.startswith("$ "):
            program, *words = shlex.split(line[2:], comments=True)
            if program not in programs:
                raise ValueError(f"line {line!r}: only python and penstock are run")
            commands.append([*programs[program], *words])
    return commands


def missing(text: str) -> list[str]:
    """What a page says it needs and is not here."""
    names = [name.strip() for said in _NEEDS.findall(text) for name in said.split(",")]
    return [name for name in names if importlib.util.find_spec(name) is None and shutil.which(name) is None]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_this_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if lacking := missing(text):
        pytest.skip(f"the page needs {' and '.join(lacking)}")
    blocks = blocks_of(text)
    python = [block for block in blocks if block.language == "python" and not block.skipped]
    printed = run_python(page, python, tmp_path) if python else {}

    for before, block in itertools.pairwise(blocks):
        if block.comment == "output":
            assert before.line in printed, f"{quoted(block, page)}\nis called output, but the block above was not run"
            got, said = printed[before.line].rstrip("\n"), "\n".join(block.code)
            assert got == said, f"{quoted(block, page)}\nbut the block above printed:\n{got}"

    for block in blocks:
        if block.language == "console" and block.comment == "run":
            for command in commands_of(block):
                code, out, err = run(command, tmp_path)
                if code != 0:
                    what = f"{quoted(block, page)}\n{shlex.join(command)} {ending(code)}"
                    pytest.fail(f"{what}\n--- stdout\n{out}\n--- stderr\n{err}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.skipped:
            assert re.fullmatch(r"not run: .*\w.*", block.comment), (
                f"{quoted(block, page)}\nis not run without a reason"
            )


# ---------------------------------------- the reader of pages itself

PAGE: Final = """\
# Title

```python
import sys
print("one")
```

<!-- output -->
```text
one
```

1. in a list

   ~~~~python
   if True:
       print("two")
   ~~~~

<!-- not run: needs a GPU -->

```python
boom
```

````markdown
```python
boom
```
````
"""


def test_a_page_is_read_into_its_blocks() -> None:
    blocks = blocks_of(PAGE)
    assert [(b.language, b.line, b.comment) for b in blocks] == [
        ("python", 3, ""),
        ("text", 9, "output"),
        ("python", 15, ""),
        ("python", 22, "not run: needs a GPU"),
        ("markdown", 26, ""),
    ]
    assert blocks[2].code == ("if True:", '    print("two")')


def test_a_page_that_fails_shows_the_block_and_its_line_number(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    blocks = blocks_of('```python\nprint("fine")\n```\n\ntext\n\n```python\n\n1 / 0\n```\n')
    with pytest.raises(pytest.fail.Exception) as caught:
        run_python(page, blocks, tmp_path)
    message = str(caught.value)
    assert "block of line 7" in message
    assert "    9  1 / 0" in message
    assert "line 9, in <module>" in message
    assert "ZeroDivisionError" in message


def test_what_each_block_prints_is_told_apart(tmp_path: Path) -> None:
    blocks = [b for b in blocks_of(PAGE) if b.language == "python" and not b.skipped]
    assert run_python(ROOT / "README.md", blocks, tmp_path) == {3: "one\n", 15: "two\n"}


def test_a_page_says_what_it_needs() -> None:
    assert missing("text\n<!-- needs: numpy, no_such_module, ls -->\n<!-- needs: nor_this -->\n") == [
        "no_such_module",
        "nor_this",
    ]
