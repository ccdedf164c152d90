"""The sampling parameters of a request, and their sources in order.

    input line  >  command line  >  --override-generation-config  >  the model's files  >  SamplingParams' own defaults

Each source wins over those to its right. The model's files are read as `generate` of transformers reads them. The
settings come from generation_config.json. If this file does not exist, they come from config.json or its text part.
Settings that only change how tokens are sampled, such as temperature and typical_p, count only with `do_sample: true`.
Otherwise the model is greedy. An unsupported setting that changes tokens is an error of each request that does not
switch it off. A setting that changes no token is ignored. An unknown setting is ignored with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sarathi_pp.errors import ConfigError, InputError, RowError
from sarathi_pp.sampling_params import MOST_BIAS, MOST_BIASED_TOKENS, SamplingParams

_SAMPLED_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Settings that count with and without sampling, each with the field of SamplingParams that it sets.
_ALWAYS_KEYS = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "min_length": "min_length",
    "stop_strings": "stop",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words_ids",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "sequence_bias": "logit_bias",
    "num_return_sequences": "n",
}
# Settings that a run follows.
_HONOURED = ("do_sample", "max_length", "eos_token_id", *_ALWAYS_KEYS, *_SAMPLED_KEYS)
# Fields of SamplingParams with the same purpose. A source that sets one of them replaces both.
_TOGETHER = {
    "min_new_tokens": "min_length",
    "min_length": "min_new_tokens",
    "bad_words": "bad_words_ids",
    "bad_words_ids": "bad_words",
}
# Fields of SamplingParams that `settings` always shows. It shows the others only if their value changes something.
_ALWAYS_SHOWN = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("stop", "ignore_eos", "skip_special_tokens"),
)
# The top_k of `generate` if neither the file nor the caller sets it.
_DEFAULT_TOP_K = 50
# Parts of config.json in which a multimodal or composed model may have its settings. The first one that exists counts.
_TEXT_PARTS = ("decoder", "generator", "text_config")
# Unsupported settings that change tokens, each with the values that have no effect. Null never has an effect.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "max_time": (),
    "top_h": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": (),
}
# Settings of UNSUPPORTED that have no effect on a greedy request.
_ONLY_SAMPLED = ("top_h",)
# Settings that change no token here: ids that only padding and prompts use, caches, speculation (which keeps
# the distribution), what `generate` returns, and options of the modes refused above.
_HARMLESS = frozenset(
    "pad_token_id bos_token_id decoder_start_token_id transformers_version _from_model_config "
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
    """The values of the sampling fields that an input line does not set, and the conditions that end an output.

    Attributes:
        sampling: values by field name of SamplingParams. Together they are legal.
        eos_token_ids: tokens that end an output. If the model names none, only length and stop strings end an output.
        warnings: warnings for the user, one sentence each.
        max_length: most tokens of prompt and output together. It counts only for a request without max_new_tokens.
            None: no such limit.
        unsupported: settings of the model that change tokens and that this runtime does not support. `sequence_bias`
            is one of them only if it cannot be written as a logit_bias.
        source: the file with these settings.
    """

    sampling: Mapping[str, object] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    warnings: tuple[str, ...] = ()
    max_length: int | None = None
    unsupported: Mapping[str, object] = field(default_factory=dict)
    source: str = "the model's generation_config.json"

    def with_command(self, overrides: Mapping[str, object]) -> GenerationDefaults:
        """Return these defaults after the values of the command line have replaced theirs.

        Args:
            overrides: fields of SamplingParams that the command line sets.

        Raises:
            ConfigError: a value is out of range.
        """
        sampling = _combined(self.sampling, overrides)
        try:
            _checked(sampling)
        except RowError as error:
            raise ConfigError(f"sampling options: {error}") from error
        return replace(self, sampling=sampling)

    def params(self, overrides: Mapping[str, object], switched_off: Collection[str] = ()) -> SamplingParams:
        """Return the sampling parameters of one request.

        Args:
            overrides: fields of SamplingParams that the request sets.
            switched_off: settings of the model that the request switches off with a value that has no effect, such as
                `"num_beams": 1`.

        Raises:
            RowError: `invalid_parameter` for a value out of range. `unsupported_setting` for an unsupported setting of
                the model that the request does not switch off.
        """
        params = _checked(_combined(self.sampling, overrides))
        useless = _ONLY_SAMPLED if params.greedy else ()
        for key, value in self.unsupported.items():
            if key not in switched_off and key not in useless and _ALWAYS_KEYS.get(key) not in overrides:
                raise RowError("unsupported_setting", _not_supported(self.source, key, value))
        return params

    def settings(self) -> dict[str, object]:
        """Return all settings that decide the answer of a request that sets none, as one flat dictionary.

        `--resume` compares it with the settings of the earlier start.
        """
        defaults = asdict(SamplingParams())
        params = {
            name: value
            for name, value in asdict(_checked(self.sampling)).items()
            if name in _ALWAYS_SHOWN or (value != defaults[name] and name != "seed")
        }
        bound = {} if "max_new_tokens" in self.sampling or self.max_length is None else {"max_length": self.max_length}
        return {"eos_token_ids": sorted(self.eos_token_ids), **params, **bound, **self.unsupported}

    def bounded(
        self, params: SamplingParams, overrides: Mapping[str, object], num_prompt_tokens: int
    ) -> SamplingParams:
        """Return a request's parameters after the model's max_length has limited max_new_tokens.

        The limit does not count if the request, the command line or the model's files set max_new_tokens.

        Args:
            params: complete parameters of the request.
            overrides: fields of SamplingParams that the request itself sets.

        Raises:
            RowError: `context_length_exceeded` for a prompt that leaves no room for an output. `generate` of
                transformers refuses it too.
        """
        if self.max_length is None or "max_new_tokens" in self.sampling or "max_new_tokens" in overrides:
            return params
        if num_prompt_tokens >= self.max_length:
            raise RowError(
                "context_length_exceeded",
                f"the prompt has {num_prompt_tokens} tokens, and {self.source} allows {self.max_length} for prompt and "
                f"output together; give max_new_tokens",
            )
        return replace(params, max_new_tokens=self.max_length - num_prompt_tokens)


def read_generation_config(model_dir: Path, overrides: Mapping[str, object] | None = None) -> GenerationDefaults:
    """Return the generation defaults of the model in a local directory.

    Both generation_config.json and config.json may be missing.

    Args:
        overrides: settings that replace those of the file, by the file's names. None removes a setting.

    Raises:
        InputError: a file cannot be read, or has a wrong value.
        ConfigError: an override is unknown or has a wrong value.
    """
    path, record = _read_settings(model_dir)
    known = {*_HONOURED, *UNSUPPORTED, *_HARMLESS}
    unknown = sorted(record.keys() - known)
    if overrides:
        for key in overrides:
            if key not in known:
                raise ConfigError(f"--override-generation-config: {key} is not a generation setting")
        record = {**record, **overrides}
    try:
        sampling = _sampling(record)
        _checked(sampling)
        max_length, eos_token_ids = _max_length(record), _eos_token_ids(record)
    except RowError as error:
        if overrides:
            raise ConfigError(f"{path} under --override-generation-config: {error}") from error
        raise InputError(f"{path}: {error}") from error
    unsupported = {
        key: record[key] for key, off in UNSUPPORTED.items() if record.get(key) is not None and record[key] not in off
    }
    if record.get("sequence_bias") and "logit_bias" not in sampling:
        unsupported["sequence_bias"] = record["sequence_bias"]
    warnings = [f"{path}: the setting {key} is unknown and is ignored" for key in unknown]
    if not eos_token_ids:
        warnings.append(f"{model_dir} names no eos_token_id: outputs end by length or stop string only")
    if max_length is not None and "max_new_tokens" not in sampling:
        warnings.append(
            f"{path}: max_length bounds prompt and output together at {max_length} tokens for requests that name no "
            f"length; --max-new-tokens counts the output alone"
        )
    return GenerationDefaults(sampling, eos_token_ids, tuple(warnings), max_length, unsupported, str(path))


def _read_settings(model_dir: Path) -> tuple[Path, dict[str, object]]:
    """Return the file from which transformers would take generation settings, and the settings in it."""
    path = model_dir / "generation_config.json"
    if path.exists():
        return path, _read_object(path)
    path = model_dir / "config.json"
    config = _read_object(path)
    part = next((found for name in _TEXT_PARTS if isinstance(found := config.get(name), dict) and found), {})
    known = (*_HONOURED, *UNSUPPORTED)
    found = {key: config[key] if config.get(key) is not None else part.get(key) for key in known}
    return path, {key: value for key, value in found.items() if value is not None}


def _sampling(record: Mapping[str, object]) -> dict[str, object]:
    sampling: dict[str, object] = {"temperature": 0.0}
    if record.get("do_sample") is True:
        # A sampling model without its own temperature samples at 1.
        sampling = {"temperature": 1.0, "top_k": _DEFAULT_TOP_K}
        sampling.update({key: record[key] for key in _SAMPLED_KEYS if record.get(key) is not None})
    for key, name in _ALWAYS_KEYS.items():
        if record.get(key) is not None:
            sampling[name] = record[key]
    if "min_new_tokens" in sampling:  # `generate` does not look at min_length then
        sampling.pop("min_length", None)
    for key in ("suppress_tokens", "begin_suppress_tokens"):
        if isinstance(ids := sampling.get(key), list):  # `generate` does not look at negative ids
            sampling[key] = [token_id for token_id in ids if not (type(token_id) is int and token_id < 0)]
    if "logit_bias" in sampling:
        biases = single_token_biases(sampling.pop("logit_bias"))
        if biases is not None:
            sampling["logit_bias"] = biases
    return sampling


def single_token_biases(value: object) -> dict[int, float] | None:
    """Return the bias of each token of transformers' `sequence_bias`, such as [[[5], -2.0], [[7], 1.5]].

    Return None if logit_bias cannot hold it: a sequence has several tokens, or a number or their count is too large.

    Raises:
        RowError: `invalid_parameter` for a value of another form.
    """
    if value == {}:
        return {}
    biases: dict[int, float] = {}
    for pair in value if isinstance(value, list) else [None]:
        match pair:
            case [[int(token_id)], int(bias) | float(bias)] if abs(bias) <= MOST_BIAS:
                biases[token_id] = bias
            case [[int(), *_], int() | float()]:
                return None
            case _:
                shown = json.dumps(value, default=repr)
                wanted = "a list of pairs of a list of token ids and a number"
                raise RowError("invalid_parameter", f"sequence_bias is {shown:.60}; it must be {wanted}")
    return biases if len(biases) <= MOST_BIASED_TOKENS else None


def _max_length(record: Mapping[str, object]) -> int | None:
    value = record.get("max_length")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise RowError("invalid_parameter", f"max_length is {value!r}; it must be an integer of at least 1")


def _eos_token_ids(record: Mapping[str, object]) -> frozenset[int]:
    value = record.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        message = f"eos_token_id is {value!r}; it must be a token id or a list of them"
        raise RowError("invalid_parameter", message)
    return frozenset(ids)


def _not_supported(source: str, key: str, value: object) -> str:
    values = UNSUPPORTED.get(key, ([],))
    off = json.dumps(next(iter(values), None))
    in_line = f'"{key}": {off} in the line, or ' if values else ""
    return (
        f"{source} asks for {key} = {json.dumps(value):.60}, which is not supported; to run without it, give {in_line}"
        f"--override-generation-config '{{\"{key}\": {off}}}'"
    )


def _read_object(path: Path) -> dict[str, object]:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{path} holds no JSON object, which generation settings need; repair the file")
    return record


def _combined(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Return the sampling values of two sources, by field of SamplingParams. Those of `above` win."""
    replaced = {_TOGETHER[name] for name in above if name in _TOGETHER}
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


def _checked(sampling: Mapping[str, object]) -> SamplingParams:
    try:
        return SamplingParams(**sampling)  # type: ignore[arg-type]  # values are checked there
    except OverflowError as error:
        raise RowError("invalid_parameter", f"a sampling parameter is too large: {error}") from error
