"""The options of a batch, and the checks before any process loads a model. They do not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from sarathi_pp.checkpoint.checksums import verify_checksums
from sarathi_pp.checkpoint.facts.support import WHY_NO_PREFIX_CACHE, ModelFacts, check_model, check_shards
from sarathi_pp.checkpoint.fetch import find_model
from sarathi_pp.checkpoint.quantised.scheme import DEQUANTISED, KEPT_AS_STORED
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
from sarathi_pp.inputs.scan import names_grammars, scan_input
from sarathi_pp.model.dtypes import Dtypes, choose_dtypes, computes_on_cpu, stored_code_bits, why_slow
from sarathi_pp.outputs.journal import Start, holds_anything, read_done
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.run_identity import Identity, differences, grown_input, identity_of, output_name
from sarathi_pp.outputs.sink import check_output
from sarathi_pp.run.auto_options import profile_mismatch, tuned
from sarathi_pp.run.display import Display
from sarathi_pp.text.tokenizer import Tokenizer, has_tokenizer

# Reading the vocabulary of 131,072 tokens keeps the interpreter's lock for 1 s. This is more than ten times of that,
# for slow and busy machines.
_VOCABULARY_S_PER_TOKEN = 1e-4


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The options of a batch.

    Attributes:
        start: treatment of an existing output: "new" refuses it, "replace" empties it, "resume" continues it.
        retry_errors: when the output is resumed, run input lines again that ended with an error.
        force: resume the output even if model, parameters or input have changed.
        strict: refuse an input with a line that cannot run.
        verify: read the weight files completely, and compare their checksums.
        metrics_port: port of the server of metrics; None for no server.
        scratch: temporary folder of this rank's run directory, removed at the end; None if the run directory is kept.
        how_to_resume: advice that is added to the message of a stopped run.
        input_format: format of the input lines, as the user gave it.
        lock_patience_s: seconds for which rank 0 waits until an earlier start has released its locks.
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
        """Return the run directory that the user named, or the one next to the output."""
        return RunDirectory(self.config.run_dir or RunDirectory.default_path(self.output_path))


@dataclass(frozen=True, slots=True)
class Preflight:
    """The facts about a run that are known before any of its processes starts.

    Attributes:
        config: configuration of the run, including the profile's choices.
        model_dir: directory of the model; None if stages are emulated.
        profile: profile of emulated stages, otherwise None.
        defaults: sampling parameters of input lines that do not set their own.
        notes: sentences for the user about the model.
        warnings: sentences for the user about what may not be as intended.
        identity: values that a later start must share to resume the output of this one, see run_identity.py; empty if
            no later start can resume it.
        reads_text: False if all prompts are token ids, and no text is written.
        names_grammars: input lines name grammars. Only rank 0 knows it, and only if the input is a file. None: unknown.
    """

    config: RunConfig
    model_dir: Path | None
    profile: Profile | None
    facts: ModelFacts
    defaults: GenerationDefaults
    run_dir: RunDirectory
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    names_grammars: bool | None = None
    reads_text: bool = True

    @property
    def prepares_grammars(self) -> bool:
        """Return whether the stages that draw read the vocabulary for grammars before the run.

        The library keeps the interpreter's lock while it reads, so the rank sends no heartbeats. If it is unknown
        whether requests name grammars, the first one may bring that silence into the run. It must be shorter than
        --peer-timeout.
        """
        if self.names_grammars is not None or self.config.num_ranks == 1:
            return bool(self.names_grammars)
        return self.facts.vocab_size * _VOCABULARY_S_PER_TOKEN >= self.config.peer_timeout_s

    @property
    def dtypes(self) -> Dtypes:
        """The float types of the run."""
        return dtypes_of(self.config, self.facts)

    def tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer, or return one without files, for token ids only."""
        vocab_size = self.facts.vocab_size
        if self.model_dir is None or not self.reads_text:
            return Tokenizer(None, vocab_size=vocab_size)
        return Tokenizer.load(self.model_dir, vocab_size=vocab_size, eos_token_ids=self.defaults.eos_token_ids)


def preflight(options: BatchOptions) -> Preflight:
    """Check quickly and without torch whether a batch can run. Return the facts that are found.

    Call it before workers are started. It changes no file.

    Raises:
        SarathiError: the batch cannot run.
    """
    config = options.config
    policy = parse_policy(config.policy)
    check_input(options.input_path)
    if options.strict and not is_regular(options.input_path):
        raise ConfigError(
            f"--strict: --input {options.input_path} is a stream, so its lines cannot be checked before they run; "
            f"give a regular file, or leave out --strict"
        )
    _check_order(options)
    check_output(options.output_path, options.input_path, options.start)
    if options.metrics_port is not None:
        from sarathi_pp.run.metrics import check_port

        check_port(options.metrics_port)
    run_dir = options.run_directory()
    RunDirectory.check(run_dir.path, overwrite=options.start == "replace", resume=options.start == "resume")
    if options.output_path != "-" and Path(options.output_path).resolve().is_relative_to(run_dir.path.resolve()):
        raise ConfigError(
            f"--output {options.output_path} is in the run directory {run_dir.path}, which is for the other files "
            f"of a run; name an output outside of it, or another --run-dir"
        )
    GenerationDefaults().with_command(config.sampling_overrides)  # raises for a value out of range
    check_machine(config)
    config, model_dir, profile, facts = open_model(config)
    partition(facts.num_layers, config.stages, config.layer_split)
    facts.max_model_len(config.max_model_len)
    defaults = _generation_defaults(config, model_dir)
    defaults = defaults.with_command(config.sampling_overrides)
    dtypes = dtypes_of(config, facts)
    warnings = [*defaults.warnings, *profile_mismatch(config, dtypes.compute)]
    if config.emulate is None and computes_on_cpu(config.device):
        warnings += _slow_on_cpu(config, dtypes)
    if options.config.chunk_size is not None and not policy.kind.uses_chunk_size:
        warnings.append(
            f"--policy {config.policy} does not use --chunk-size: its own rule sets the prompt tokens of a microbatch"
        )
    notes = [note.replace(DEQUANTISED, KEPT_AS_STORED) if dtypes.coded else note for note in facts.notes]
    if facts.has_states and config.prefix_cache == "auto":
        notes.append(f"the prefix cache is off: {WHY_NO_PREFIX_CACHE}")
    return Preflight(config, model_dir, profile, facts, defaults, run_dir, tuple(notes), tuple(warnings))


def _slow_on_cpu(config: RunConfig, dtypes: Dtypes) -> Iterator[str]:
    """Yield a warning for each type of numbers that makes a run on CPU slow."""
    if slow := why_slow(dtypes):
        yield slow
    if config.kv_cache_dtype == "fp8":
        yield (
            f"--kv-cache-dtype fp8 saves memory on CPU, and costs time: attention first copies keys and values to "
            f"{dtypes.compute}. A long context costs most"
        )


def _check_order(options: BatchOptions) -> None:
    """Refuse the order of prefixes for input lines that are not known in advance.

    Raises:
        ConfigError: the input is a stream, or its lines arrive one after the other.
    """
    config = options.config
    if config.order != "prefix" and config.order_window is None:
        return
    option = "--order prefix" if config.order == "prefix" else f"--order-window {config.order_window}"
    if not is_regular(options.input_path):
        raise ConfigError(
            f"{option}: --input {options.input_path} is a stream, which is answered while it is written; give a "
            f"regular file, or leave out {option}"
        )
    if config.request_rate != math.inf:
        raise ConfigError(
            f"{option}: with --request-rate {config.request_rate:g} the lines arrive in the order of the input; leave "
            f"out one of the two options"
        )


def identify(options: BatchOptions, checked: Preflight) -> Preflight:
    """Return the facts with the identity of this start, and with grammars in the input. This reads the whole input.

    Raises:
        ConfigError: the output cannot be resumed, because it belongs to another input or other options.
        InputError: the input cannot be read.
    """
    identity = {
        **identity_of(
            checked.config, checked.facts, checked.dtypes, checked.defaults, checked.model_dir, options.input_path
        ),
        "output": output_name(options.output_path, checked.run_dir.path),
        **({} if options.input_format == "auto" else {"input_format": options.input_format}),
    }
    if options.start == "resume" and not options.force:
        _check_resumable(options, checked.run_dir, identity)
    return replace(checked, identity=identity, names_grammars=names_grammars(options.input_path))


def _check_resumable(options: BatchOptions, run_dir: RunDirectory, identity: Identity) -> None:
    """Check that the existing output belongs to this input and these options.

    Raises:
        ConfigError: it belongs to another input or other options, or run.json does not record them.
    """
    remedy = "name another --output, or continue with --force"
    if not is_regular(options.input_path):
        raise ConfigError(f"--resume needs an --input that can be read again; {options.input_path} is a stream")
    before = (run_dir.read_run() or {}).get("identity")
    if not holds_anything(options.output_path):
        owner = before.get("output") if isinstance(before, dict) else None
        if owner not in (None, identity["output"]):
            raise ConfigError(
                f"--resume: the run directory {run_dir.path} belongs to {owner}, not to {identity['output']}; name "
                f"another --run-dir, or use this one with --force"
            )
        return
    if not isinstance(before, dict):
        raise ConfigError(
            f"--resume: {run_dir.path}/run.json does not record what input and options {options.output_path} belongs "
            f"to; {remedy}"
        )
    before = {"kv_cache_dtype": "auto", **before}  # earlier versions had no other one, and did not record it
    changed = differences(before, grown_input(before, identity, options.input_path))
    if changed:
        if before["kv_cache_dtype"] != identity["kv_cache_dtype"]:
            remedy = f"give --kv-cache-dtype {before['kv_cache_dtype']}, {remedy}"
        if before.get("dtype") not in (None, identity["dtype"]):
            remedy = f"give --dtype {before['dtype']}, {remedy}"
        raise ConfigError(
            f"--resume: {options.output_path} was written by a different run: {'; '.join(changed)}; {remedy}"
        )


def finished_before(options: BatchOptions) -> Done | None:
    """Return the input lines that the output answers, if it answers all of them. Otherwise, return None.

    A run with --resume then has nothing to do. Call it after `preflight`.

    Raises:
        InputError: the input cannot be read, or is neither JSON Lines nor text.
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
    """Report the number of input lines, and the lines that cannot run, before anything is loaded.

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
        raise InputError(f"--input {options.input_path}: none of its {found.num_rows} lines can run: {problems}")
    text = f"--input {options.input_path}: {found.num_problems} of {found.num_rows} lines cannot run: {problems}"
    if options.strict:
        raise InputError(f"{text}. Without --strict the other lines run")
    display.warn(f"{text}. Their lines in the output give the reasons")


def check_weights(options: BatchOptions, display: Display) -> None:
    """Compare the weight files with their checksums if the user asked for it. One rank per host calls this.

    Raises:
        InputError: a file differs from its checksum or cannot be read.
        MissingError: no checksum of a file is known.
    """
    if options.verify and options.config.emulate is None:
        with display.activity.phase("verifying the weight files"):
            verify_checksums(find_model(options.config.model))


def count_total(options: BatchOptions) -> int | None:
    """Return the number of requests in the input file; None if it is a stream."""
    return count_rows(options.input_path) if is_regular(options.input_path) else None


def is_unkept(output: str) -> bool:
    """Return whether answers go to a stream or device, so that no run directory is kept.

    Its usual place is next to the output file. Here that would be the current folder or /dev.
    """
    return is_stream(output) or output.startswith(("/dev/", "/proc/"))


def follow(options: BatchOptions) -> Preflight:
    """Return the facts that a rank other than 0 needs. Such a rank reads no input and writes no output."""
    parse_policy(options.config.policy)  # raises an error if the user's own policy is missing on this host
    config, model_dir, profile, facts = open_model(options.config)
    defaults = _generation_defaults(config, model_dir)
    return Preflight(config, model_dir, profile, facts, defaults, options.run_directory())


def dtypes_of(config: RunConfig, facts: ModelFacts) -> Dtypes:
    """Return the float types of a run. Emulated stages compute nothing, so their type is that of the profile."""
    if config.emulate is not None:
        return Dtypes(facts.dtype, facts.dtype)
    bits = stored_code_bits(config.weights, facts.quantised, config.device)
    quantised = facts.quantised is not None
    return choose_dtypes(config.dtype, facts.dtype, config.device, quantised=quantised, code_bits=bits)


def _generation_defaults(config: RunConfig, model_dir: Path | None) -> GenerationDefaults:
    """Return the sampling parameters that the model's files recommend; none if stages are emulated."""
    if model_dir is None:
        return GenerationDefaults()
    return read_generation_config(model_dir, config.override_generation_config)


def check_machine(config: RunConfig) -> None:
    """Check that the profile and the CUDA device of the options exist here. Call this before a model is fetched.

    Raises:
        ConfigError: torch finds no CUDA device.
        InputError: the profile is not valid.
        MissingError: the profile cannot be read.
    """
    if config.profile is not None:
        read_profile(config.profile)
    if config.emulate is None and config.device == "cuda" and version("torch").endswith("+cpu"):
        # A CPU build of torch finds no CUDA device. It is imported only for the error that choose_device then raises.
        # With another build, each rank notices a missing device soon enough.
        from sarathi_pp.distributed.devices import choose_device

        choose_device(config.device, RankEnvironment())


def open_model(config: RunConfig) -> tuple[RunConfig, Path | None, Profile | None, ModelFacts]:
    """Find and check the model, or read the profile of emulated stages (--emulate).

    Returns:
        Four values: the configuration with the options that a profile sets; the model's directory, or None if stages
        are emulated; the profile of emulated stages, or None; the facts of the model.
    """
    if config.emulate is None:
        model_dir = find_model(config.model)
        facts = check_model(model_dir)
        check_shards(model_dir, config.tensor_parallel_size)
        facts.prefix_cache(config.prefix_cache)  # raises for a model that has none
        return tuned(config, facts), model_dir, None, facts
    from sarathi_pp.stages.emulated_stage import emulated_facts, with_profile

    profile = read_profile(config.emulate)
    facts = emulated_facts(profile, config.page_size)
    facts.prefix_cache(config.prefix_cache)  # raises for a model that has none
    return with_profile(tuned(config, facts), profile), None, profile, facts
