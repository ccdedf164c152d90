"""The arguments of an LLM: their names, and error messages about them.

Most error messages name options of the command line. A message often comes as text from another rank, which does not
know whether a command or a Python program has started the run. So an LLM rewrites messages with names of arguments:

    --kv-cache-memory 12MiB or less, more --stages      kv_cache_memory_bytes='12MiB' or less, more stages
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from sarathi_pp.config import (
    ALIASES,
    ATTENTIONS,
    DEVICES,
    DTYPES,
    HEADS,
    KV_CACHE_DTYPES,
    ORDERS,
    PREFIX_CACHES,
    TRANSPORTS,
    WEIGHTS,
    RunConfig,
    names_of,
    option_of,
)
from sarathi_pp.core.policy import POLICIES
from sarathi_pp.errors import ConfigError, OptionError, SarathiError
from sarathi_pp.given_values import did_you_mean
from sarathi_pp.sampling_params import UNSUPPORTED_SAMPLING, SamplingParams, changes_nothing

_TEXT_ONLY = "models read text only"
_WEIGHTS = "config.json names the form of quantised weights. Leave it out, or keep FP8 on a GPU with weights='stored'"
_REVISION = "one revision of a model is loaded. Download another one, and give its directory as the model"
_NOT_YET = "it is not supported yet"
# Arguments of other engines and of the command that an LLM does not have. The first item holds the values that agree
# with what an LLM does, so they are accepted. The second is the reason why other values are refused.
_OTHERS: dict[str, tuple[tuple[object, ...], str]] = {
    "tokenizer": ((), "the tokenizer is read from the model's directory. Put its files there"),
    "tokenizer_mode": (("auto",), "the tokenizer is read from the model's directory"),
    "tokenizer_revision": ((), _REVISION),
    "revision": ((), _REVISION),
    "code_revision": ((), _REVISION),
    "skip_tokenizer_init": ((False,), "a model without tokenizer files takes token ids. Use one"),
    "trust_remote_code": ((False,), "code of a model's author is never run. Use a model of a supported architecture"),
    "quantization": ((), _WEIGHTS),
    "load_format": (("auto", "safetensors"), "weights are read from safetensors files. Convert them"),
    "cpu_offload_gb": ((0,), "weights stay on the device. Use more stages"),
    "swap_space": ((0,), "requests that do not fit into memory are computed again, not swapped"),
    "enable_prefix_caching": ((True,), "write prefix_cache, such as prefix_cache='all'"),
    "enable_chunked_prefill": ((True,), "the policy decides whether prompts are cut. Choose one with policy"),
    "enable_lora": ((False,), _NOT_YET),
    "speculative_config": ((), _NOT_YET),
    "distributed_executor_backend": ((), "stages are processes of this host. For several hosts use torchrun"),
    "limit_mm_per_prompt": (({},), _TEXT_ONLY),
    "hf_overrides": (({},), "config.json is used without changes. Change the file"),
    "download_dir": ((), "the variable HF_HOME sets the directory of downloaded models"),
    "compilation_config": ((), "enforce_eager=True switches CUDA graphs off"),
    "disable_custom_all_reduce": ((True, False), ""),
    "disable_log_stats": ((True, False), ""),
    "emulate": ((), "an LLM runs its model. Use the command `sarathi-pp generate`, or `sarathi-pp simulate`"),
    "request_rate": ((math.inf,), "all prompts of a call arrive at once. Use the command `sarathi-pp generate`"),
    "tbt_slo": ((), "it belongs to the policy. Write policy='balanced:tbt_slo=SECONDS'"),
}
# Names of sampling parameters, which belong to SamplingParams and not to an LLM.
_OF_SAMPLING = {*(name for one in fields(SamplingParams) for name in names_of(one.name)), *UNSUPPORTED_SAMPLING}

_CHOICES = {
    "dtype": DTYPES,
    "weights": WEIGHTS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "device": DEVICES,
    "head": HEADS,
    "transport": TRANSPORTS,
    "attention": ATTENTIONS,
    "order": ORDERS,
    "policy": tuple(POLICIES),
    "layer_split": ("even",),
    "prefix_cache": PREFIX_CACHES,
}
_FLAGS = ("debug_nan", "enforce_eager", "ignore_eos", "include_stop_str_in_output")
_FIELDS = {option_of(one.name): one.name for kind in (RunConfig, SamplingParams) for one in fields(kind)}
_OPTION = re.compile("|".join(sorted((rf"{re.escape(option)}(?![\w-])" for option in _FIELDS), key=len, reverse=True)))
_NUMBER = re.compile(r" (\d+(?:,\d+)+|\d+(?:\.\d+)?(?:[KMGT]i?B)?)(?![\w])")
_QUOTED = re.compile(r" '[^']*'")
# Parts of messages that are advice for users of the command. They are removed.
_FOR_COMMANDS = re.compile(r',? and (?:run again with )?--resume(?: --retry-errors)?|"\w+": \S+ in the line, or ')


class Arguments:
    """The arguments that a program gave to an LLM."""

    def __init__(self, model: object, stages: object, options: Mapping[str, object]) -> None:
        if options.get("enable_prefix_caching") is False and options.get("prefix_cache", "off") == "off":
            options = {name: value for name, value in options.items() if name != "enable_prefix_caching"}
            options = {**options, "prefix_cache": "off"}
        self._given = {"model": model, **({} if stages is None else {"stages": stages}), **options}
        self._names = {ALIASES.get(name, name): name for name in self._given}  # from a field to the name that was used

    def config(self) -> RunConfig:
        """Return the configuration that the arguments describe.

        Raises:
            ConfigError: an argument is unknown, cannot be honoured or was given under two names.
        """
        values: dict[str, object] = {}
        known = [name for one in fields(RunConfig) for name in names_of(one.name) if name not in _OTHERS]
        for name, value in self._given.items():
            field_name = ALIASES.get(name, name)
            if field_name in values:
                names = " and ".join(one for one in self._given if ALIASES.get(one, one) == field_name)
                raise ConfigError(f"{names} are the same argument. Give one of them")
            if name in _OTHERS:
                self._refuse_other(name, value)
            elif name in known:
                values[field_name] = value
            elif name in _OF_SAMPLING:
                raise ConfigError(f"LLM has no argument {name!r}. SamplingParams has it")
            else:
                near = did_you_mean(name, known, "help(sarathi_pp.RunConfig)")
                raise ConfigError(f"LLM has no argument {name!r}{near}")
        try:
            return RunConfig(**values)  # type: ignore[arg-type]  # values are checked there
        except OptionError as error:
            raise error.renamed(self._names.get(error.name, error.name)) from None

    def _refuse_other(self, name: str, value: object) -> None:
        off, reason = _OTHERS[name]
        if changes_nothing(value, off) or (name == "tokenizer" and value == self._given["model"]):
            return
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        raise ConfigError(f"{name}={value!r:.60} cannot be honoured: {reason}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Rewrite the errors of the block so that they name arguments instead of options."""
        try:
            yield
        except SarathiError as error:
            error.args = (self.reword(str(error)),)
            raise

    def reword(self, text: str) -> str:
        """Return a message that names arguments instead of options."""
        if "--" not in text:
            return text
        text = _FOR_COMMANDS.sub("", text)
        parts, end = [], 0
        for match in _OPTION.finditer(text):
            if match.start() < end:
                continue
            field_name = _FIELDS[match[0]]
            value, after = self._value(field_name, text, match.end())
            name = self._names.get(field_name, field_name)
            parts.append(text[end : match.start()] + (name if value is None else f"{name}={value}"))
            end = after
        return "".join(parts) + text[end:]

    def _value(self, field_name: str, text: str, at: int) -> tuple[str | None, int]:
        """Return the value after an option, as Python writes it, and the position of its end in the text.

        The value is None if an ordinary word of the sentence follows the option.
        """
        if field_name in _FLAGS:
            return "True", at
        if match := _QUOTED.match(text, at):
            value = match[0].strip()
            return (value.strip("'") if field_name == "override_generation_config" else value), match.end()
        for known in (*self._values(field_name), *_CHOICES.get(field_name, ())):
            if text.startswith(f" {known}", at) and not re.match(r"\w", text[at + 1 + len(known) :]):
                return repr(known), at + 1 + len(known)
        if match := _NUMBER.match(text, at):
            number = match[1]
            shown = f"[{number.replace(',', ', ')}]" if "," in number else number
            return (repr(number) if number[-1] == "B" else shown), match.end()
        return None, at

    def _values(self, field_name: str) -> list[str]:
        """Return the text that the program gave for a field, and its beginnings up to each colon, the longest first.

        A message may quote only a beginning of the text, such as the name of a policy without its options.
        """
        value = self._given.get(self._names.get(field_name, field_name))
        if not isinstance(value, (str, os.PathLike)):
            return []
        pieces = os.fspath(value).split(":")
        return [":".join(pieces[:count]) for count in range(len(pieces), 0, -1) if pieces[0]]
