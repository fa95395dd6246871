"""What a run found, as a table for the terminal, as JSON, and as one HTML page that needs no network.

Pure, but for ``write``. A rate is shown beside its share of the workload's first limit, and the ratio of ours to it.
A contender whose content was wrong keeps its rate, marked, and takes no part in a claim.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock._bench.claims import Verdict, judge
from penstock._bench.contenders import CONTENDERS
from penstock._bench.harness import Results, Summary
from penstock._bench.limits import LIMITS
from penstock._bench.workloads import FULL, QUICK, WORKLOADS

__all__ = ["as_html", "as_json", "as_markdown", "as_text", "write"]

Cells = Sequence[str]

_STATUS: Final = {"wrong": "! WRONG CONTENT"}


def _rate(summary: Summary) -> str:
    if summary.samples_per_s is None or summary.bytes_per_s is None:
        return "-"
    if WORKLOADS[summary.workload].unit == "bytes":
        return f"{summary.bytes_per_s / 1e9:.2f} GB/s"
    return f"{_number(summary.samples_per_s)}/s"


def _number(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def _spread(summary: Summary) -> str:
    if not summary.samples_per_s or summary.low is None or summary.high is None or summary.rounds < 2:
        return ""
    return f"{summary.low / summary.samples_per_s - 1:+.0%} {summary.high / summary.samples_per_s - 1:+.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _mib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**20:.0f}"


def _times(one: Summary | None, other: Summary | None) -> float | None:
    """How many times the rate of the other it has; None for a contender and itself, and where there is no rate."""
    if one is None or other is None or one is other or not one.samples_per_s or not other.samples_per_s:
        return None
    return one.samples_per_s / other.samples_per_s


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _title(name: str) -> str:
    return LIMITS[name][0] if name in LIMITS else CONTENDERS[name].title


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    """One workload, ready to be drawn."""

    name: str
    title: str
    head: Cells
    rows: tuple[Cells, ...]
    notes: tuple[str, ...]
    ours: Summary | None
    """Whose rate the others are compared with."""
    limit: Summary | None
    ran: tuple[Summary, ...]


def _mib_of(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def _tables(results: Results) -> list[_Table]:
    tables = []
    for name in results.setup.workloads:
        workload = WORKLOADS[name]
        here = [summary for summary in results.summaries if summary.workload == name]
        ran = sorted(
            (summary for summary in here if summary.samples_per_s is not None),
            key=lambda summary: (summary.kind != "limit", -(summary.samples_per_s or 0)),
        )
        ours = next((summary for summary in ran if summary.contender == "penstock"), None)
        limit = next((summary for summary in ran if summary.contender == workload.limits[0]), None)
        head = [
            "contender", "rate", "spread", f"of {workload.limits[0]}",
            "penstock / it", "first batch", "gap", "CPU/sample", "added MiB", "peak MiB",
        ]  # fmt: skip
        rows = [
            [
                summary.contender
                + (" (limit)" if summary.kind == "limit" else "")
                + ("" if summary.status == "ok" else " !"),
                _rate(summary),
                _spread(summary),
                _ratio(_times(summary, limit)),
                _ratio(_times(ours, summary)),
                _time(summary.first_batch_s),
                _time(summary.gap_s),
                _time(None if summary.cpu_us_per_sample is None else summary.cpu_us_per_sample / 1e6),
                _mib(summary.added_bytes),
                _mib(summary.peak_bytes),
            ]
            for summary in ran
        ]
        notes = [
            f"{summary.contender}: {_STATUS.get(summary.status, summary.status)}: {summary.reason}"
            for summary in here
            if summary.status != "ok"
        ]
        notes += [
            f"{summary.contender}: left {summary.left_behind} processes behind"
            for summary in here
            if summary.left_behind
        ]
        notes += [f"{absence.status}: {absence.reason}" for absence in results.absent if absence.workload == name]
        if not ran and not notes:
            notes.append("not run")
        rounds = max((summary.rounds for summary in ran), default=0)
        said = [f"{rounds} round{'' if rounds == 1 else 's'}"]
        if (budget_bytes := workload.budget_of(results.setup.budget_bytes)) != results.setup.budget_bytes:
            said.append(f"budget {_mib_of(budget_bytes)}")
        title = f"{workload.title} ({', '.join(said)})"
        tables.append(_Table(name, title, head, tuple(rows), tuple(notes), ours, limit, tuple(ran)))
    return tables


_CLAIM_HEAD: Final = ("claim", "wanted", "got", "holds", "")


def _claim_cells(verdict: Verdict) -> Cells:
    return (verdict.claim.text, verdict.claim.wanted_text, verdict.got_text, verdict.word, verdict.note)


def _aligned(head: Cells, rows: Sequence[Cells], *, left: Sequence[int] = (0,)) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        ("  " + "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )).rstrip()
        for row in (head, *rows)
    ]  # fmt: skip


def _sizes(results: Results) -> str:
    """Which sizes were read: those of the mode, and as flags those that are others."""
    usual, sizes = QUICK if results.setup.quick else FULL, results.setup.sizes
    given = [
        f"--{field.name.replace('_', '-')} {getattr(sizes, field.name):.15g}"
        for field in dataclasses.fields(sizes)
        if getattr(sizes, field.name) != getattr(usual, field.name)
    ]
    said = "quick sizes" if results.setup.quick else "full sizes"
    return f"{said}, but {' '.join(given)}" if given else said


def _about(results: Results) -> list[str]:
    machine, setup = results.machine, results.setup
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}, {packages}",
        (
            f"{machine['date']}; at most {setup.rounds} rounds, {setup.memory_rounds} for memory; "
            f"{setup.workers} workers, budget {_mib_of(setup.budget_bytes)}, seed {setup.seed}; {_sizes(results)}; "
            f"{results.took_s:.0f} s"
        ),
        *(["interrupted: this is what was finished until then"] if results.interrupted else []),
    ]


def as_text(results: Results) -> str:
    """The whole run for a terminal."""
    lines = [*_about(results), ""]
    for table in _tables(results):
        lines += [f"{table.name}: {table.title}", *(_aligned(table.head, table.rows) if table.rows else [])]
        lines += [*(f"  {note}" for note in table.notes), ""]
    if claims := [_claim_cells(verdict) for verdict in judge(results.summaries)]:
        lines += ["claims", *_aligned(_CLAIM_HEAD, claims, left=(0, 4)), ""]
    return "\n".join(lines)


def _piped(head: Cells, rows: Sequence[Cells]) -> list[str]:
    rule = ["---" if not i else "--:" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def _stressed(summary: Summary) -> str:
    """Its title in Markdown: ours stand out, limits are not of the race."""
    stress = {"ours": "**", "limit": "*"}.get(summary.kind, "")
    return f"{stress}{_title(summary.contender)}{stress}"


def as_markdown(results: Results) -> str:
    """What docs/performance.md shows: what was run where, a table for each workload, the claims."""
    lines = [f"{' '.join(_about(results))}", ""]
    for table in _tables(results):
        top = table.limit.samples_per_s if table.limit else None
        rows = [
            (
                _stressed(s) + (" (wrong content)" if s.status == "wrong" else ""),
                _rate(s), f"{(s.samples_per_s or 0) / top:.2f}" if top else "", _time(s.first_batch_s), _time(s.gap_s),
                _time(None if s.cpu_us_per_sample is None else s.cpu_us_per_sample / 1e6), _mib(s.added_bytes),
            )
            for s in table.ran
        ]  # fmt: skip
        head = ("", "rate", f"of {WORKLOADS[table.name].limits[0]}", "first batch", "gap", "CPU a sample", "MiB added")
        lines += [f"**`{table.name}`**: {table.title}", "", *([*_piped(head, rows), ""] if rows else [])]
        lines += [*(f"- {note}" for note in table.notes), ""] if table.notes else []
    if claims := [_claim_cells(verdict) for verdict in judge(results.summaries)]:
        lines += _piped(_CLAIM_HEAD, claims)
    return "\n".join(lines)


def as_json(results: Results) -> str:
    """Every trial and every median."""
    tree = dataclasses.asdict(results)
    tables = {table.name: table for table in _tables(results)}
    for summary, each in zip(results.summaries, tree["summaries"], strict=True):
        table = tables[summary.workload]
        each["of_limit"] = _times(summary, table.limit)
        each["penstock_over_it"] = _times(table.ours, summary)
    tree["claims"] = [
        {**dataclasses.asdict(verdict), "text": verdict.claim.text} for verdict in judge(results.summaries)
    ]
    return json.dumps(tree, indent=1)


# ---------------------------------------------------------------- HTML

_STYLE: Final = """
:root { color-scheme: light dark; --ours: #0b7285; --peer: #adb5bd; --limit: #e8590c; --bad: #c92a2a; }
@media (prefers-color-scheme: dark) { :root { --ours: #3bc9db; --peer: #5c636a; --limit: #ff922b; --bad: #ff8787; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } .note, .bad { font-size: 13px; } .bad { color: var(--bad); }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.ours { fill: var(--ours); } .peer { fill: var(--peer); } .wrong { fill: var(--bad); }
.line { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 4 3; }
"""
_BAR_PX: Final = 22
_LEFT_PX: Final = 130
_WIDTH_PX: Final = 480


def _bars(title: str, bars: Sequence[tuple[Summary, float, str]], *, mark: tuple[float, str] | None) -> str:
    """Horizontal bars from zero, with a line for what bounds them."""
    most = max((*(value for _, value, _ in bars), mark[0] if mark else 0.0)) or 1.0
    # A budget that is many times what anyone used would press all bars against the axis.
    if mark and bars and mark[0] > 4 * max(value for _, value, _ in bars):
        title, most, mark = f"{title} ({mark[1]} is off the chart)", max(value for _, value, _ in bars) or 1.0, None
    width = _WIDTH_PX - _LEFT_PX - 90
    height = _BAR_PX * len(bars) + 44
    parts = [f'<svg viewBox="0 0 {_WIDTH_PX} {height}" role="img" aria-label="{html.escape(title)}">']
    parts.append(f'<text x="0" y="14" font-weight="600">{html.escape(title)}</text>')
    for place, (summary, value, label) in enumerate(bars):
        y = 24 + place * _BAR_PX
        length = width * value / most
        kind = "wrong" if summary.status == "wrong" else summary.kind
        parts.append(f'<text x="{_LEFT_PX - 8}" y="{y + 14}" text-anchor="end">{html.escape(summary.contender)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{_LEFT_PX}" y="{y + 2}" width="{length:.1f}" height="{_BAR_PX - 6}" rx="2">'
            f"<title>{html.escape(_title(summary.contender))}</title></rect>"
        )
        parts.append(f'<text x="{_LEFT_PX + length + 6:.1f}" y="{y + 14}">{html.escape(label)}</text>')
    if mark:
        x = _LEFT_PX + width * mark[0] / most
        parts.append(f'<line class="line" x1="{x:.1f}" y1="22" x2="{x:.1f}" y2="{height - 18}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{html.escape(mark[1])}</text>')
    return "".join(parts) + "</svg>"


def _charts(table: _Table, budget_bytes: int) -> str:
    runners = [summary for summary in table.ran if summary.kind != "limit"]
    top = table.limit.samples_per_s if table.limit else None
    speed = [
        (s, s.samples_per_s / (top or 1.0), f"{s.samples_per_s / top:.0%}" if top else _rate(s))
        for s in runners
        if s.samples_per_s is not None
    ]
    mark = (1.0, f"limit: {table.limit.contender} {_rate(table.limit)}") if table.limit else None
    budget_bytes = max((s.budget_bytes or 0 for s in runners), default=0) or budget_bytes
    memory = [(s, s.added_bytes / 2**20, f"{_mib(s.added_bytes)} MiB") for s in runners if s.added_bytes is not None]
    charts = [_bars("rate, relative to the limit" if top else "rate", speed, mark=mark)]
    if memory:
        budget = budget_bytes / 2**20
        charts.append(
            _bars("memory added at the peak (PSS of the tree)", memory, mark=(budget, f"budget {budget:.0f} MiB"))
        )
    return "".join(charts)


def as_html(results: Results) -> str:
    """The whole run as one page."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Penstock benchmark</title>',
        f"<style>{_STYLE}</style></head><body><h1>Penstock benchmark</h1>",
        *(f'<p class="note">{html.escape(line)}</p>' for line in _about(results)),
        (
            '<p class="note">Rates are medians over rounds; each trial is a fresh process, and contenders take turns. '
            "“penstock / it” says how many times Penstock's rate is the row's. "
            "CPU and memory are of the whole process tree.</p>"
        ),
    ]
    for table in _tables(results):
        parts.append(f"<h2>{html.escape(table.title)}</h2>")
        if table.rows:
            parts.append(f'{_charts(table, results.setup.budget_bytes)}<div class="wide"><table>')
            for cells, tag in ((table.head, "th"), *((row, "td") for row in table.rows)):
                parts.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>")
            parts.append("</table></div>")
        parts += [f'<p class="bad">{html.escape(note)}</p>' for note in table.notes]
    if claims := [_claim_cells(verdict) for verdict in judge(results.summaries)]:
        parts.append('<h2>Claims</h2><div class="wide"><table>')
        for cells, tag in ((_CLAIM_HEAD, "th"), *((cells, "td") for cells in claims)):
            parts.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>")
        parts.append("</table></div>")
    return "".join([*parts, "</body></html>"])


def write(results: Results, folder: Path) -> list[Path]:
    """Put ``bench.json`` and ``bench.html`` into a folder; gives their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("bench.json", as_json(results)), ("bench.html", as_html(results))):
        path, part = folder / name, folder / f".{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:  # a disk that is full leaves no half of it, and what an earlier run wrote
            part.unlink(missing_ok=True)
        written.append(path)
    return written
