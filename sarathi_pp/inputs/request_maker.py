"""The step from a parsed line to a request: its prompt is tokenised and checked, its sampling parameters completed.

Parameters that change logits become the rules of the request, which name tokens by id only. The stage that draws needs
no tokenizer for them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from sarathi_pp.core.draw_rules import MOST_BYTES, DrawRules
from sarathi_pp.core.request import Request
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.ids import id_key
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.unknown_tokens import UnknownTokens
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.chat_options import ChatOptions
from sarathi_pp.text.grammar import grammar_text
from sarathi_pp.text.tokenizer import EncodedPrompt, Tokenizer

# Fields of SamplingParams with ids of tokens that are never drawn. A model's file may name ids without a token.
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """A maker of requests from parsed lines. It tokenises and checks a prompt, and completes its sampling parameters.

    Args:
        defaults: values of sampling fields that a line does not set.
        seed: seed of the run, from which each request without a seed gets its own.
        paragraphs: True if the scheduling policy needs the positions at which paragraphs of a prompt end.
        unknown: counts text prompts that consist mostly of the unknown token.
        chat_variables: variables of the chat template that a line does not set.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    limits: PromptLimits
    seed: int
    paragraphs: bool = False
    unknown: UnknownTokens = field(default_factory=UnknownTokens)
    chat_variables: Mapping[str, object] = field(default_factory=dict)

    def make(self, parsed: ParsedLine, index: int, arrival_s: float) -> Request:
        """Return the request of a line that has no error.

        Args:
            index: number of the request, unique in the run.
            arrival_s: time of its arrival on the coordinator's clock, in seconds.

        Raises:
            RowError: the line cannot run.
        """
        sampling = self.defaults.params(parsed.overrides, parsed.switched_off)
        if sampling.n > 1 and sampling.greedy:
            raise RowError(
                "invalid_parameter",
                f"n is {sampling.n}, and at temperature 0 all outputs would be equal; it must be 1, or the temperature "
                f"must be above 0",
            )
        for what, texts in (("stop strings", sampling.stop), ("bad_words", sampling.bad_words)):
            if texts and not self.tokenizer.has_text:
                raise RowError("no_tokenizer", f"{what} need the model's tokenizer files, which are missing")
        if sampling.seed is None:
            sampling = replace(sampling, seed=row_seed(self.seed, parsed.id))
        prompt = self._encode(parsed)
        self.limits.check_prompt(len(prompt.token_ids))
        sampling = self.defaults.bounded(sampling, parsed.overrides, len(prompt.token_ids))
        if sampling.min_length:
            least = max(0, sampling.min_length - len(prompt.token_ids))
            sampling = replace(sampling, min_length=0, min_new_tokens=least)
        sampling = self.limits.clamp(sampling)
        if parsed.echo and sampling.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=sampling.logprobs, logprobs_from=0)
        _check_scored(sampling, len(prompt.token_ids))
        rules = self._rules(sampling, parsed.overrides, len(prompt.token_ids))
        if parsed.prompt_token_ids is None:
            self.unknown.count(prompt.token_ids)
        # The rules have the grammar.
        sampling = replace(sampling, structured_outputs=None) if sampling.structured_outputs else sampling
        ends, salt = prompt.paragraph_ends, parsed.cache_salt
        return Request(index, prompt.token_ids, sampling, arrival_s, ends, rules, salt)

    def offered_tools(self, parsed: ParsedLine) -> bytes | None:
        """Return the functions that a conversation offers, as a JSON list. See Row."""
        if parsed.messages is None or not self.tokenizer.reads_responses:
            return None
        return json.dumps(list(parsed.chat.tools) if parsed.chat else []).encode()

    def echo(self, parsed: ParsedLine, request: Request) -> str:
        """Return the text of a line's prompt, which its output line repeats; empty without tokenizer files."""
        if parsed.prompt is not None:
            return parsed.prompt
        ids = request.prompt_token_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False) if self.tokenizer.has_text else ""

    def _rules(self, sampling: SamplingParams, overrides: Collection[str], num_prompt: int) -> DrawRules | None:
        """Return the rules for drawing the request's tokens; None if there are none.

        Args:
            overrides: fields of SamplingParams that the line itself sets.

        Raises:
            RowError: `invalid_parameter` for an id that is not of the model, rules that allow no token, or rules that
                take too many bytes.
        """
        least, end_ids = sampling.min_new_tokens, self._end_token_ids(sampling)
        grammar, start_after = self._grammar(sampling, end_ids)
        rules = DrawRules(
            num_prompt=num_prompt,
            logit_bias=tuple(pair for pair in sampling.logit_bias if pair[1]),
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            allowed_token_ids=None if sampling.allowed_token_ids is None else _unique(sampling.allowed_token_ids),
            banned_token_ids=self._in_vocabulary(sampling.suppress_tokens),
            banned_at_start=self._in_vocabulary(sampling.begin_suppress_tokens),
            bad_words=self._bad_words(sampling),
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            min_tokens=least if end_ids else 0,
            end_token_ids=end_ids if least or grammar else (),
            typical_p=1.0 if sampling.greedy else sampling.typical_p,
            epsilon_cutoff=0.0 if sampling.greedy else sampling.epsilon_cutoff,
            eta_cutoff=0.0 if sampling.greedy else sampling.eta_cutoff,
            logprobs=sampling.logprobs,
            grammar=grammar,
            start_after=start_after,
        )
        self._check_ids(sampling, overrides)
        if rules == DrawRules(num_prompt=num_prompt):
            return None
        self._check_rules(rules)
        return rules

    def _grammar(self, sampling: SamplingParams, end_ids: Collection[int]) -> tuple[str, int | None]:
        """Return the grammar of the output, and the id of the token after which it begins. See DrawRules.

        Raises:
            RowError: the grammar or the token is not legal, or the model's tokenizer cannot have a grammar.
        """
        asked = sampling.structured_outputs
        if asked is None:
            return "", None
        if not self.tokenizer.has_text:
            raise RowError("no_tokenizer", "structured_outputs needs the model's tokenizer files, which are missing")
        if not self.tokenizer.spells_bytes:
            what = "structured_outputs needs a fast tokenizer of byte-level or byte-fallback tokens"
            raise RowError("unsupported_parameter", f"{what}, and the model has another one; remove the parameter")
        if not end_ids:
            what = "structured_outputs needs a token that ends the output, and the model names none"
            raise RowError("invalid_parameter", f"{what}; give stop_token_ids")
        start_after = None
        if asked.start_after is not None:
            start_after = self.tokenizer.token_id(asked.start_after)
            if start_after is None:
                what = f"structured_outputs.start_after is {asked.start_after!r}"
                raise RowError("invalid_parameter", f"{what}; it must be one token of the vocabulary, such as </think>")
        return grammar_text(asked), start_after

    def _end_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Return the ids of tokens that end the output, in ascending order."""
        eos = () if sampling.ignore_eos else self._in_vocabulary(self.defaults.eos_token_ids)
        return _unique((*eos, *sampling.stop_token_ids))

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of tokens that must not be in the output.

        As in transformers, a sequence of `bad_words_ids` that is only an end-of-sequence token does not count.
        """
        found = [ids for ids in sampling.bad_words_ids if len(ids) > 1 or ids[0] not in self.defaults.eos_token_ids]
        for position, word in enumerate(sampling.bad_words):
            encoded = self.tokenizer.encode_bad_word(word)
            if not encoded:
                wanted = "a text for which the tokenizer has tokens"
                raise RowError("invalid_parameter", f"bad_words[{position}] is {word!r}; it must be {wanted}")
            found += encoded
        return tuple(dict.fromkeys(found))

    def _in_vocabulary(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        return _unique(token_id for token_id in token_ids if token_id < self.limits.vocab_size)

    def _check_ids(self, sampling: SamplingParams, overrides: Collection[str]) -> None:
        """Raise RowError if a parameter names a token id that the model does not have.

        Ids in the model's own lists of suppressed tokens have no effect then, as in transformers.
        """
        for name in ("logit_bias", "allowed_token_ids", "bad_words_ids", "stop_token_ids", *_SUPPRESSED):
            value = getattr(sampling, name)
            if not value or (name in _SUPPRESSED and name not in overrides):
                continue
            if name == "logit_bias":
                value = [token_id for token_id, _ in value]
            elif name == "bad_words_ids":
                value = [token_id for ids in value for token_id in ids]
            largest, most = max(value), self.limits.vocab_size - 1
            if largest > most:
                message = f"{name} has the token id {largest}; it must be one of the model's, 0 to {most}"
                raise RowError("invalid_parameter", message)

    def _check_rules(self, rules: DrawRules) -> None:
        """Raise RowError if the rules always ban every token, or are too long for a message."""
        banned = {*rules.banned_token_ids, *(ids[0] for ids in rules.bad_words if len(ids) == 1)}
        at_start = {*banned, *rules.banned_at_start, *(rules.end_token_ids if rules.min_tokens else ())}
        allowed = rules.allowed_token_ids
        left = self.limits.vocab_size - len(at_start) if allowed is None else len({*allowed} - at_start)
        if left <= 0:
            what = "the sampling parameters ban every token at the start of the output"
            raise RowError("invalid_parameter", f"{what}; allow another token, or ban fewer")
        size = len(rules.to_bytes())
        if size > MOST_BYTES:
            what = f"the line's penalties, biases, grammar and lists of tokens take {size} bytes"
            raise RowError("invalid_parameter", f"{what}; the limit is {MOST_BYTES}. Give fewer tokens or words")

    def _encode(self, parsed: ParsedLine) -> EncodedPrompt:
        if parsed.prompt_token_ids is not None:
            if not parsed.prompt_token_ids:
                raise RowError("empty_prompt", "the prompt is empty; it needs at least one token id")
            return EncodedPrompt(self.tokenizer.check_token_ids(parsed.prompt_token_ids))
        most = self.limits.max_model_len
        if parsed.messages is not None:
            options = (parsed.chat or ChatOptions()).with_defaults(self.chat_variables)
            return self.tokenizer.encode_chat(parsed.messages, options, paragraphs=self.paragraphs, most_tokens=most)
        assert parsed.prompt is not None, "a parsed line has a prompt"
        return self.tokenizer.encode_prompt(
            parsed.prompt,
            add_special_tokens=parsed.add_special_tokens,
            paragraphs=self.paragraphs,
            most_tokens=most,
        )


def _check_scored(sampling: SamplingParams, num_prompt: int) -> None:
    """Raise RowError if `logprobs_from` names no token of the prompt, or has no effect."""
    first = sampling.logprobs_from
    if first and sampling.prompt_logprobs is None:
        raise RowError("invalid_parameter", f"logprobs_from is {first}; it must be 0 without prompt_logprobs")
    if first >= num_prompt:
        wanted = f"a position in the prompt, 0 to {num_prompt - 1}"
        raise RowError("invalid_parameter", f"logprobs_from is {first}; it must be {wanted}")


def _unique(token_ids: Iterable[int]) -> tuple[int, ...]:
    """Return each id once, in ascending order."""
    return tuple(sorted(set(token_ids)))


def row_seed(run_seed: int, id: object) -> int:
    """Return the seed of an input line that sets none: a 63-bit hash of the run's seed and the line's id.

    It does not depend on the line's position, or on other requests that run at the same time.
    """
    digest = blake2b(f"{run_seed}/{id_key(id)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
