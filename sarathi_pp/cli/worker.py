"""`sarathi-pp worker`: one stage of an LLM that a Python program made. Started by it, not by people."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sarathi_pp.config import RunConfig


@click.command(hidden=True)
@click.argument("config")
def worker(config: str) -> int:
    """Serve as the rank that the environment names, with CONFIG (a RunConfig as JSON)."""
    from sarathi_pp.runtime.place import let_threads_sleep

    let_threads_sleep()
    from sarathi_pp.runtime.batch import serve_llm

    fields = json.loads(config)
    if isinstance(fields["layer_split"], list):
        fields["layer_split"] = tuple(fields["layer_split"])
    for name in ("run_dir", "profile"):
        fields[name] = Path(fields[name]) if fields[name] else None
    return serve_llm(RunConfig(**fields), lambda text: click.echo(text, err=True))
