"""A worker rank of a Python program's LLM. It computes its part of the model until the program closes the LLM."""

from __future__ import annotations

from pathlib import Path

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.checkpoint.fetch import find_model
from sarathi_pp.config import RunConfig
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.distributed.environment import find_environment
from sarathi_pp.errors import ConfigError
from sarathi_pp.inputs.generation_config import read_generation_config
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.console import Console
from sarathi_pp.run.ending import Ending, exit_code, handle_signals
from sarathi_pp.run.joining import joined, ready
from sarathi_pp.run.preflight import Preflight


def serve_llm(config: RunConfig, console: Console) -> int:
    """Run this process as a worker, and return its exit code.

    Raises:
        ConfigError: no Python program has started this process.
    """
    env = find_environment()
    if env is None or env.store is None:
        raise ConfigError(
            "this command runs a worker, which only the Python API's class LLM can start; use `sarathi-pp generate`"
        )
    parse_policy(config.policy)
    model_dir = find_model(config.model)
    # The program runs on the same host. It has made a temporary directory for the store. The run directory of this
    # worker is in it too, unless the user named one.
    run_dir = RunDirectory(config.run_dir) if config.run_dir else RunDirectory.unnamed(Path(env.store).parent / "run")
    defaults = read_generation_config(model_dir, config.override_generation_config)
    checked = Preflight(config, model_dir, None, check_model(model_dir), defaults, run_dir)
    ending = Ending(env, config, console, speaks=False)
    with exit_code(ending), handle_signals(ending), joined(env, config) as plane:
        with ready(checked, plane, ending) as rank:
            rank.serve()
            rank.finish()
    return ending.code
