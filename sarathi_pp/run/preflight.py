"""What is known, checked and refused of a batch before any process loads a model; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import ConfigError, InputError
from sarathi_pp.inputs.done import Done
from sarathi_pp.inputs.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.inputs.input_file import (
    check_input,
    check_redirected,
    count_rows,
    has_every_row,
    is_regular,
    is_stream,
)
from sarathi_pp.inputs.input_format import InputFormat
from sarathi_pp.inputs.scan import scan_input
from sarathi_pp.model.checkpoint.checksums import verify_checksums
from sarathi_pp.model.checkpoint.fetch import find_model
from sarathi_pp.model.checkpoint.support import ModelFacts, check_model, check_shards
from sarathi_pp.outputs.journal import Start, holds_anything, read_done
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.run_identity import Identity, differences, grown_input, identity_of, output_name
from sarathi_pp.outputs.sink import check_output
from sarathi_pp.run.auto_options import profile_mismatch, tuned
from sarathi_pp.run.display import Display
from sarathi_pp.text.tokenizer import Tokenizer, has_tokenizer


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """start: what becomes of an output that is there. retry_errors: when it is resumed, its errors are run again.

    force: it is resumed whatever has changed since. strict: an input with a line that cannot run is refused. verify:
    weight files are read as a whole and compared with their sums. scratch: a temporary folder that holds this rank's
    run directory, of which nothing stays; None if the run directory is kept. how_to_resume: for the message of a
    stopped run. input_format: what the user says that the lines are. lock_patience_s: how long rank 0 waits for the
    locks of an earlier start.
    """

    config: RunConfig
    input_path: str
    output_path: str
    start: Start = "new"
    retry_errors: bool = False
    force: bool = False
    strict: bool = False
    verify: bool = False
    metrics_port: int | None = None
    scratch: Path | None = None
    how_to_resume: str = "to resume, give --resume"
    input_format: InputFormat = "auto"
    lock_patience_s: float = 0.0

    def run_directory(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir or RunDirectory.default_path(self.output_path))


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is known of a run before any of its processes starts.

    config: the run's, with what the profile decides. model_dir: None where the stages are emulated by `profile`.
    identity: of this start, empty where there is no output to go on with.
    """

    config: RunConfig
    model_dir: Path | None
    profile: Profile | None
    facts: ModelFacts
    defaults: GenerationDefaults
    run_dir: RunDirectory
    warnings: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)

    def tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer, or one without files, for token ids alone, where stages are emulated."""
        vocab_size = self.facts.vocab_size
        if self.model_dir is None:
            return Tokenizer(None, vocab_size=vocab_size)
        return Tokenizer.load(self.model_dir, vocab_size=vocab_size, eos_token_ids=self.defaults.eos_token_ids)


def preflight(options: BatchOptions) -> Preflight:
    """Refuse what can be refused quickly, without torch, before a worker starts and before a file is touched."""
    config = options.config
    policy = parse_policy(config.policy)
    check_input(options.input_path)
    if options.strict and not is_regular(options.input_path):
        raise ConfigError(
            f"--strict: --input {options.input_path} is a stream, whose lines are not there to be looked at before "
            f"they run; give a regular file, or leave --strict out"
        )
    check_output(options.output_path, options.input_path, options.start)
    if options.metrics_port is not None:
        from sarathi_pp.run.metrics import check_port

        check_port(options.metrics_port)
    run_dir = options.run_directory()
    RunDirectory.check(run_dir.path, overwrite=options.start == "replace", resume=options.start == "resume")
    if options.output_path != "-" and Path(options.output_path).resolve().is_relative_to(run_dir.path.resolve()):
        raise ConfigError(
            f"--output {options.output_path} lies in the run directory {run_dir.path}, which holds what runs write "
            f"beside their outputs; name an output outside of it, or another --run-dir"
        )
    GenerationDefaults().with_command(config.sampling_overrides)  # raises for a value out of range
    check_machine(config)
    config, model_dir, profile, facts = open_model(config)
    partition(facts.num_layers, config.stages, config.layer_split)
    facts.max_model_len(config.max_model_len)
    defaults = _generation_defaults(config, model_dir)
    defaults = defaults.with_command(config.sampling_overrides)
    note = () if facts.note is None else (facts.note,)
    warnings = [*defaults.warnings, *note, *profile_mismatch(config, facts)]
    if options.config.chunk_size is not None and not policy.kind.uses_chunk_size:
        warnings.append(f"--policy {config.policy} does not use --chunk-size: its own rule says how long prompts run")
    return Preflight(config, model_dir, profile, facts, defaults, run_dir, tuple(warnings))


def identify(options: BatchOptions, checked: Preflight) -> Preflight:
    """Add the identity of this start, for which the whole input is read. Raises ConfigError if it cannot be resumed."""
    identity = {
        **identity_of(checked.config, checked.facts, checked.defaults, checked.model_dir, options.input_path),
        "output": output_name(options.output_path, checked.run_dir.path),
        **({} if options.input_format == "auto" else {"input_format": options.input_format}),
    }
    if options.start == "resume" and not options.force:
        _check_resumable(options, checked.run_dir, identity)
    return replace(checked, identity=identity)


def _check_resumable(options: BatchOptions, run_dir: RunDirectory, identity: Identity) -> None:
    """Raises ConfigError where what is there answers something else, or nobody knows what."""
    remedy = "name another --output, or go on all the same with --force"
    if not is_regular(options.input_path):
        raise ConfigError(f"--resume needs an --input that can be read again; {options.input_path} is a stream")
    before = (run_dir.read_run() or {}).get("identity")
    if not holds_anything(options.output_path):
        owner = before.get("output") if isinstance(before, dict) else None
        if owner not in (None, identity["output"]):
            raise ConfigError(
                f"--resume: the run directory {run_dir.path} is that of {owner}, not of {identity['output']}; name "
                f"another --run-dir, or take it all the same with --force"
            )
        return
    if not isinstance(before, dict):
        raise ConfigError(
            f"--resume: {run_dir.path}/run.json does not tell what {options.output_path} answers; {remedy}"
        )
    changed = differences(before, grown_input(before, identity, options.input_path))
    if changed:
        raise ConfigError(f"--resume: {options.output_path} answers something else: {'; '.join(changed)}; {remedy}")


def finished_before(options: BatchOptions) -> Done | None:
    """Return what the output holds if a run that resumes it has nothing to do, else None. `preflight` has passed.

    Raises InputError.
    """
    if options.start != "resume" or not is_regular(options.input_path) or not holds_anything(options.output_path):
        return None
    with open(options.output_path, "rb") as stream:
        if sum(1 for _ in stream) < count_rows(options.input_path):  # counting takes a fraction of the time of parsing
            return None
    done = read_done(options.output_path)
    if done is None or (options.retry_errors and done.num_errors > done.num_duplicates):
        return None
    return done if has_every_row(options.input_path, done, options.input_format) else None


def check_lines(options: BatchOptions, checked: Preflight, display: Display) -> None:
    """Report how many lines an input file has, and which cannot run, before anything is loaded.

    Raises:
        InputError: no line can run, the file does not consist of lines, or with --strict a line cannot run.
    """
    if not is_regular(options.input_path):
        if options.input_path == "-":
            check_redirected(options.input_format)
        return
    has_text = checked.model_dir is not None and has_tokenizer(checked.model_dir)
    with display.activity.phase(f"reading {options.input_path}"):
        found = scan_input(options.input_path, checked.defaults, asked=options.input_format, has_text=has_text)
    if not found.num_problems:
        display.say(f"{options.input_path}: {found.num_rows:,} requests")
        return
    more = f"; and {left} more" if (left := found.num_problems - len(found.problems)) else ""
    problems = "; ".join(found.problems) + more
    if found.num_problems == found.num_rows:
        raise InputError(f"--input {options.input_path}: none of its {found.num_rows} rows can run: {problems}")
    text = f"--input {options.input_path}: of {found.num_rows} rows {found.num_problems} cannot run: {problems}"
    if options.strict:
        raise InputError(f"{text}. Without --strict the others are run")
    display.warn(f"{text}. Their lines in the output tell more")


def check_weights(options: BatchOptions, display: Display) -> None:
    """Verify the weight files if the user asked for it, once per host. Raises InputError or MissingError."""
    if options.verify and options.config.emulate is None:
        with display.activity.phase("verifying the weight files"):
            verify_checksums(find_model(options.config.model))


def count_total(options: BatchOptions) -> int | None:
    """Return the requests of the input file. None if it is a stream."""
    return count_rows(options.input_path) if is_regular(options.input_path) else None


def is_unkept(output: str) -> bool:
    """Return whether answers go to a stream: the current folder or /dev is no place for its run directory."""
    return is_stream(output) or output.startswith(("/dev/", "/proc/"))


def follow(options: BatchOptions) -> Preflight:
    """What a rank other than 0 needs to know; it reads no input and writes no output."""
    parse_policy(options.config.policy)  # a policy of the user's own may be missing on this host alone
    config, model_dir, profile, facts = open_model(options.config)
    defaults = _generation_defaults(config, model_dir)
    return Preflight(config, model_dir, profile, facts, defaults, options.run_directory())


def _generation_defaults(config: RunConfig, model_dir: Path | None) -> GenerationDefaults:
    """Return those of the model's files, or none if stages are emulated."""
    if model_dir is None:
        return GenerationDefaults()
    return read_generation_config(model_dir, config.override_generation_config)


def check_machine(config: RunConfig) -> None:
    """Raise if what the options name is not here: a CUDA device, a profile. Before a model is fetched or read."""
    if config.profile is not None:
        read_profile(config.profile)
    if config.emulate is None and config.device == "cuda" and version("torch").endswith("+cpu"):
        # Only then is torch imported here: of another build each rank finds out soon enough.
        from sarathi_pp.distributed.devices import choose_device

        choose_device(config.device, RankEnvironment())


def open_model(config: RunConfig) -> tuple[RunConfig, Path | None, Profile | None, ModelFacts]:
    """The model's directory, or the profile that stands in for it, and the facts of either."""
    if config.emulate is None:
        model_dir = find_model(config.model)
        facts = check_model(model_dir)
        check_shards(model_dir, config.tensor_parallel_size)
        return tuned(config, facts), model_dir, None, facts
    from sarathi_pp.stages.emulated_stage import emulated_facts, with_profile

    profile = read_profile(config.emulate)
    facts = emulated_facts(profile, config.page_size)
    return with_profile(tuned(config, facts), profile), None, profile, facts
