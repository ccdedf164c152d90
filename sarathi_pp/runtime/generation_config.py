"""Where a request's sampling parameters come from.

    input line  >  command line  >  the model's generation_config.json  >  SamplingParams' own defaults

The model's temperature, top_k, top_p and min_p hold only where it says `do_sample: true`; else it is greedy.
What the model asks for and this runtime does not do is refused where it would change a token, ignored where
it would not, and reported where nobody here knows the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sarathi_pp.config import SamplingParams
from sarathi_pp.errors import ConfigError, InputError, RowError

_SAMPLED_KEYS = ("temperature", "top_k", "top_p", "min_p")
_HONOURED = ("do_sample", "max_new_tokens", "stop_strings", "eos_token_id", *_SAMPLED_KEYS)
# Settings that change tokens, each with the values under which they do not. Null is always off.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
# Settings that change no token here: ids that only padding and prompts use, caches, speculation (which keeps
# the distribution), what `generate` returns, and options of the modes refused above. max_length never binds,
# because max_new_tokens is always set.
_HARMLESS = frozenset(
    "pad_token_id bos_token_id decoder_start_token_id transformers_version _from_model_config max_length "
    "use_cache cache_implementation cache_config return_legacy_cache max_cache_len low_memory "
    "prefill_chunk_size continuous_batching_config compile_config disable_compile "
    "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate "
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind "
    "target_lookbehind assistant_ensemble_weight speculation_type use_mtp "
    "early_stopping length_penalty diversity_penalty renormalize_logits remove_invalid_values "
    "trust_remote_code _commit_hash generation_kwargs".split()
)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling fields that a line does not set, and what ends an output.

    sampling: values under SamplingParams' names, proven to be a legal SamplingParams.
    eos_token_ids: empty where the model names none; then only length and stop strings end an output.
    warnings: for people, one sentence each.
    """

    sampling: Mapping[str, object] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()

    def with_command(self, overrides: Mapping[str, object]) -> GenerationDefaults:
        """These defaults under what the command line names. Raises ConfigError for a value out of range."""
        sampling = {**self.sampling, **overrides}
        try:
            _checked(sampling)
        except RowError as error:
            raise ConfigError(f"sampling options: {error}") from error
        return replace(self, sampling=sampling)

    def params(self, overrides: Mapping[str, object]) -> SamplingParams:
        """What one request samples with. Raises RowError (`invalid_parameter`) for a value out of range."""
        return _checked({**self.sampling, **overrides})


def read_generation_config(model_dir: Path) -> GenerationDefaults:
    """The defaults of the model in a local directory; both of its files may be absent.

    Raises ConfigError for settings that would change tokens and are not supported, InputError for a file
    that is not what it should be.
    """
    path = model_dir / "generation_config.json"
    record = _read_object(path)
    _refuse_unsupported(path, record)
    sampling: dict[str, object] = {"temperature": 0.0}
    if record.get("do_sample") is True:
        # Without a temperature of its own a sampling model samples at 1.
        sampling = {"temperature": 1.0}
        sampling.update({key: record[key] for key in _SAMPLED_KEYS if record.get(key) is not None})
    for key, name in (("max_new_tokens", "max_new_tokens"), ("stop_strings", "stop")):
        if record.get(key) is not None:
            sampling[name] = record[key]
    try:
        _checked(sampling)
    except RowError as error:
        raise InputError(f"{path}: {error}") from error
    eos_token_ids = _eos_token_ids(model_dir, path, record)
    unknown = sorted(record.keys() - {*_HONOURED, *_UNSUPPORTED, *_HARMLESS})
    warnings = [f"{path}: {key} is not known here and is ignored" for key in unknown]
    if not eos_token_ids:
        warnings.append(f"{model_dir} names no eos_token_id: outputs end by length or stop string only")
    return GenerationDefaults(sampling, eos_token_ids, tuple(warnings))


def _eos_token_ids(model_dir: Path, path: Path, record: Mapping[str, object]) -> frozenset[int]:
    """As `generate` takes them: from generation_config.json alone where there is one, else from config.json or the text
    part of a multimodal one.
    """
    value = record.get("eos_token_id")
    if not path.exists():
        path = model_dir / "config.json"
        config = _read_object(path)
        text_config = config.get("text_config")
        value = config.get("eos_token_id")
        if value is None and isinstance(text_config, dict):
            value = text_config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise InputError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them")
    return frozenset(ids)


def _refuse_unsupported(path: Path, record: Mapping[str, object]) -> None:
    wrong = {
        key: record[key] for key, off in _UNSUPPORTED.items() if record.get(key) is not None and record[key] not in off
    }
    if wrong:
        found = ", ".join(f"{key} = {json.dumps(value)}" for key, value in wrong.items())
        raise ConfigError(
            f"{path} asks for {found}, which would change the output and is not supported; "
            f"remove {' and '.join(wrong)} from that file to generate without"
        )


def _read_object(path: Path) -> dict[str, object]:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{path} must hold a JSON object")
    return record


def _checked(sampling: Mapping[str, object]) -> SamplingParams:
    try:
        return SamplingParams(**sampling)  # type: ignore[arg-type]  # values are checked there
    except OverflowError as error:
        raise RowError("invalid_parameter", f"a sampling parameter is too large: {error}") from error
