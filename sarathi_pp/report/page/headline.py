"""The top of a page: sentences made from the figures, the best advice, and the origin of the run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import PurePath
from typing import Any

from sarathi_pp.report import formats
from sarathi_pp.report.advice import apart
from sarathi_pp.report.vocabulary import CAUSES, cause_name, doubt, setup_of

# For each advised option, the options of the command that it replaces. A policy brings its own chunk size.
_REPLACED = {
    "--policy": ("--policy", "--chunk-size", "--max-num-batched-tokens"),
    "--chunk-size": ("--chunk-size", "--max-num-batched-tokens"),
    "--stages": ("--stages", "--pipeline-parallel-size", "--pp-size", "--layer-split"),
}
# Options that concern only the run of the report. A new run gets its own directory.
_THIS_RUN = ("--run-dir",)
_OUTPUT = ("-o", "--output")
_FLAGS = ("--resume", "--overwrite", "--force", "--retry-errors")


def headline(report: Mapping[str, Any]) -> str:
    """Return the result of a run in one to three sentences of HTML."""
    stages, wall_s, ratio = report["stages"], formats.seconds(report["wall_s"]), report["bubble_ratio"]
    if ratio is None:
        return "No microbatch has come back in this run."
    pipelines = f"{report['replicas']} pipelines of " if report.get("replicas", 1) > 1 else ""
    counted = f"{pipelines}{stages} stage{'s' if stages != 1 else ''}"
    policy = escape(str(report["policy"]))
    sentences = [f"{policy} kept {counted} busy {formats.share(1 - ratio, 0)} of {wall_s} s."]
    causes = report.get("causes")
    if causes and (idle_s := sum(causes.values())) > 0:
        worst = max(causes, key=lambda name: causes[name])
        share = formats.share(causes[worst] / idle_s, 0)
        if doubt(report):
            share = f"Roughly {share}"
        sentences.append(f"{share} of the idle time is {cause_name(worst)}: {CAUSES[worst]}.")
    advice = best_advice(report)
    if advice is not None:
        option = f"<code>{escape(advice['option'])}</code>"
        what = "Twice the requests in one run" if advice["option"] == "--input" else option
        sentences.append(f"<strong>{what} would save {formats.share(advice['gain_s'] / report['wall_s'], 0)}.</strong>")
    return " ".join(sentences)


def best_advice(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the advice that saves most; None if no advice saves time."""
    found = [one for one in report.get("advice") or () if one.get("gain_s")]
    return found[0] if found and report["wall_s"] else None


def advice_list(report: Mapping[str, Any], *, without: Mapping[str, Any] | None = None) -> str:
    """Return all advice of a run, each with the command to copy; empty if there is no advice.

    Args:
        without: this advice gets no command, because its command is shown elsewhere.
    """
    found = report.get("advice") or ()
    copies = ("" if one is without else _copy(report, one) for one in found)
    items = "".join(f"<li>{escape(str(one['text']))}{copy}</li>" for one, copy in zip(found, copies, strict=True))
    hint = f'<p class="hint">{sentence}</p>' if (sentence := apart(found)) else ""
    return f'<ul class="advice">{items}</ul>{hint}' if items else ""


def best_command(report: Mapping[str, Any]) -> str:
    """Return the command to copy, of the advice that saves most; empty if no advice saves time."""
    best = best_advice(report)
    return _copy(report, best) if best is not None else ""


def _copy(report: Mapping[str, Any], advice: Mapping[str, Any]) -> str:
    option = str(advice.get("option", ""))
    if " " not in option:
        return ""
    return _copyable("try", changed_command(report, option) or option)


def _copyable(label: str, text: str) -> str:
    """Return a line of code after its label, with a button that copies it."""
    button = '<button type="button" data-copy>copy</button>'
    return f'<span class="copy"><span>{label}</span><code>{escape(text)}</code>{button}</span>'


def changed_command(report: Mapping[str, Any], option: str) -> str | None:
    """Return the command of a run with an option changed and a new output file; None if it is not known.

    For a run over several hosts it is not known, because the arguments of the launcher are not recorded.
    """
    words = report.get("command")
    if not words or words[1:2] != ["generate"] or len({stage["host"] for stage in report["per_stage"]}) > 1:
        return None
    changed = option.split()
    dropped = {name for word in changed if word.startswith("--") for name in (word, *_REPLACED.get(word, ()))}
    kept = list(_without(words, {*dropped, *_THIS_RUN, *_OUTPUT}))
    output = next(iter(_values(words, _OUTPUT)), None)
    if output not in (None, "-"):
        path = PurePath(output)
        kept += ["--output", str(path.with_name(f"{path.stem}-changed{path.suffix}"))]
    return shlex.join([*kept, *changed])


def _without(words: Sequence[str], names: set[str]) -> Iterator[str]:
    """Yield the words of a run's command, without the named options and their values, and without _FLAGS.

    _FLAGS concern only the files of that run.
    """
    skip = False
    for word in words:
        if skip or word in _FLAGS or word.partition("=")[0] in names:
            skip = not skip and word in names
        else:
            yield word


def _values(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in names:
            yield value if equals else following


def provenance(report: Mapping[str, Any]) -> str:
    """Return the origin of the figures: model, dtype, device, hosts, date, versions and command."""
    hosts = list(dict.fromkeys(stage["host"] for stage in report["per_stage"]))
    facts = [setup_of(report), f"{'host' if len(hosts) == 1 else f'{len(hosts)} hosts:'} {', '.join(hosts)}"]
    if started := report.get("started_unix_s"):
        facts.append(f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC")
    facts += [
        f"{name} {report[key]}" for key, name in (("sarathi_pp", "sarathi-pp"), ("torch", "torch")) if key in report
    ]
    line = " &middot; ".join(f"<span>{escape(fact)}</span>" for fact in facts)
    command = _copyable("command", shlex.join(report["command"])) if report.get("command") else ""
    return f'<p class="provenance">{line}</p>{command}'
