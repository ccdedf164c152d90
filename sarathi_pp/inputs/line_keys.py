"""The keys that an input line may have, and the sampling parameter that each one sets."""

from __future__ import annotations

from sarathi_pp.inputs.chat.options import CHAT_KEYS
from sarathi_pp.inputs.generation_config import UNSUPPORTED
from sarathi_pp.inputs.row import Form
from sarathi_pp.sampling_params import UNSUPPORTED_SAMPLING

URL_FORMS: dict[str, Form] = {
    "/v1/chat/completions": "openai-chat",
    "/v1/completions": "openai-completion",
}
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
# From a key to the field of SamplingParams that it sets.
SAMPLING_KEYS = {
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token_ids",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "min_new_tokens": "min_new_tokens",
    "min_tokens": "min_new_tokens",
    "min_length": "min_length",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "logit_bias": "logit_bias",
    "sequence_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "bad_words_ids": "bad_words_ids",
    "suppress_tokens": "suppress_tokens",
    "begin_suppress_tokens": "begin_suppress_tokens",
    "typical_p": "typical_p",
    "epsilon_cutoff": "epsilon_cutoff",
    "eta_cutoff": "eta_cutoff",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "logprobs_from": "logprobs_from",
    "n": "n",
    "num_return_sequences": "n",
    "structured_outputs": "structured_outputs",
    "response_format": "structured_outputs",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
}
# Fields that are whole numbers. A program that exports tables may write 16 as 16.0, so this is accepted.
WHOLE_NUMBERS = (
    *("max_new_tokens", "top_k", "seed", "min_new_tokens", "min_length", "no_repeat_ngram_size", "n"),
    *("prompt_logprobs", "logprobs_from"),
)
CACHE_SALT = "cache_salt"
MOST_SALT = 256  # characters of a cache_salt
# Keys that change how the prompt is rendered and tokenised, and with which requests it shares KV pages.
READING_KEYS = ("add_special_tokens", CACHE_SALT, *CHAT_KEYS)
# Keys with another name than the settings of generation_config.json that they switch off.
SETTINGS = {
    "use_beam_search": ("num_beams",),
}
# Keys for the caller's own records. They change no token.
OPENAI_LABELS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Unsupported parameters of other engines, each with the values that have no effect. They are accepted with these.
UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    **UNSUPPORTED_SAMPLING,
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "max_length": (),
    "max_output_tokens": (),
    "n_predict": (),
    "do_sample": (),
    "stop_sequences": ([],),
    "chat_template": (),
}
# A key of completions, which puts the prompt before the output.
ECHO = "echo"
OWN_KEYS = ("id", "custom_id", *PROMPT_KEYS, *READING_KEYS, *SAMPLING_KEYS, *UNSUPPORTED_KEYS, ECHO)
BATCH_KEYS = ("custom_id", "method", "url", "body")
MISPLACED_KEYS = ("id", *PROMPT_KEYS, *READING_KEYS, *SAMPLING_KEYS, *UNSUPPORTED_KEYS, ECHO)
