"""The step from a parsed line to a request: its prompt is tokenised and checked, its sampling parameters completed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b

from sarathi_pp.core.request import Request
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.ids import id_key
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.unknown_tokens import UnknownTokens
from sarathi_pp.text.tokenizer import EncodedPrompt, Tokenizer


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """A maker of requests from parsed lines. It tokenises and checks a prompt, and completes its sampling parameters.

    Args:
        defaults: values of sampling fields that a line does not set.
        seed: seed of the run, from which each request without a seed gets its own.
        paragraphs: True if the scheduling policy needs the positions at which paragraphs of a prompt end.
        unknown: counts text prompts that consist mostly of the unknown token.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    limits: PromptLimits
    seed: int
    paragraphs: bool = False
    unknown: UnknownTokens = field(default_factory=UnknownTokens)

    def make(self, parsed: ParsedLine, index: int, arrival_s: float) -> Request:
        """Return the request of a line that has no error.

        Args:
            index: number of the request, unique in the run.
            arrival_s: time of its arrival on the coordinator's clock, in seconds.

        Raises:
            RowError: the line cannot run.
        """
        sampling = self.defaults.params(parsed.overrides, parsed.switched_off)
        if sampling.stop and not self.tokenizer.has_text:
            raise RowError("no_tokenizer", "stop strings need the model's tokenizer files, which are missing")
        if sampling.seed is None:
            sampling = replace(sampling, seed=row_seed(self.seed, parsed.id))
        prompt = self._encode(parsed)
        self.limits.check_prompt(len(prompt.token_ids))
        sampling = self.defaults.bounded(sampling, parsed.overrides, len(prompt.token_ids))
        if parsed.prompt_token_ids is None:
            self.unknown.count(prompt.token_ids)
        return Request(index, prompt.token_ids, self.limits.clamp(sampling), arrival_s, prompt.paragraph_ends)

    def _encode(self, parsed: ParsedLine) -> EncodedPrompt:
        if parsed.prompt_token_ids is not None:
            if not parsed.prompt_token_ids:
                raise RowError("empty_prompt", "the prompt is empty; it needs at least one token id")
            return EncodedPrompt(self.tokenizer.check_token_ids(parsed.prompt_token_ids))
        most = self.limits.max_model_len
        if parsed.messages is not None:
            return self.tokenizer.encode_chat(parsed.messages, paragraphs=self.paragraphs, most_tokens=most)
        assert parsed.prompt is not None, "a parsed line has a prompt"
        return self.tokenizer.encode_prompt(
            parsed.prompt,
            add_special_tokens=parsed.add_special_tokens,
            paragraphs=self.paragraphs,
            most_tokens=most,
        )


def row_seed(run_seed: int, id: object) -> int:
    """Return the seed of an input line that sets none: a 63-bit hash of the run's seed and the line's id.

    It does not depend on the line's position, or on other requests that run at the same time.
    """
    digest = blake2b(f"{run_seed}/{id_key(id)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
