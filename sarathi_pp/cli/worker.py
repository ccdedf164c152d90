"""`sarathi-pp worker`: one rank of an LLM that a Python program made. That program starts it, not the user."""

from __future__ import annotations

import json

import click

from sarathi_pp.config import RunConfig


@click.command(hidden=True)
@click.argument("config")
def worker(config: str) -> int:
    """Serve as the rank that the environment names, with CONFIG (a RunConfig as JSON)."""
    from sarathi_pp.distributed.environment import let_threads_sleep

    let_threads_sleep()
    from sarathi_pp.run.llm_worker import serve_llm

    return serve_llm(RunConfig(**json.loads(config)), _Console())


class _Console:
    """A display that prints errors to standard error."""

    def error(self, text: str) -> None:
        click.echo(text, err=True)
