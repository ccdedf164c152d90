"""A model for the tasks of lm-evaluation-harness (lm-eval), which computes on pipeline stages.

    task -> text -> tokens -> LLM.generate -> log probabilities of the continuation, or text -> task

Continuations are scored by the log probabilities of prompt tokens. lm-eval is not a dependency of this project.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from sarathi_pp.api import LLM, RequestOutput
from sarathi_pp.errors import ConfigError
from sarathi_pp.sampling_params import SamplingParams

# A text, and the tokens of its context and its continuation. The text is None for a window of a longer text.
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("sarathi_pp")
class SarathiLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model on pipeline stages, for lm-eval.

    Args:
        model: directory of the model, or its id on the Hugging Face Hub.
        pretrained: another name for `model`, which lm-eval's other models use.
        max_gen_toks: most tokens to generate for a task that sets no limit.
        prefix_token_id: token before a text that has no context. None: the beginning-of-sequence token.
        add_bos_token: put special tokens around a text. None: as the tokenizer does.
        chat_template_args: values for the chat template.
        think_end_token: text that ends the thinking of the model. What is before it is not part of the answer.
        batch_size, max_batch_size: without effect. All requests of a task run at once.
        device: "cpu", or anything else to choose. lm-eval passes "cuda:0" if it got no device.
        options: other arguments of LLM, such as stages and dtype.

    Raises:
        SarathiError: see LLM.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        pretrained: str | os.PathLike[str] | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if (model is None) == (pretrained is None):
            raise ConfigError("give the model's directory or id once, as model=... or pretrained=...")
        self.llm = LLM(model or pretrained or "", device="cpu" if device == "cpu" else "auto", **options)
        self.tokenizer = self.llm.get_tokenizer()
        self.max_gen_toks = max_gen_toks
        self._prefix_token_id = prefix_token_id
        self._special = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
        self._template_args = dict(chat_template_args or {})
        self._think_end_token = think_end_token

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and output."""
        return self.llm.max_model_len

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_args,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: object) -> list[int]:
        """Return the tokens of a text. A text that starts with the prefix token gets no special tokens."""
        special = dict(self._special)
        if add_special_tokens is not None:
            special["add_special_tokens"] = add_special_tokens
        elif string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            special["add_special_tokens"] = False
        return list(self.tokenizer.encode(string, **special))

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **others: object
    ) -> list[tuple[float, bool]]:
        """Return for each pair the log probability of the continuation, and whether greedy decoding would give it.

        A context that is too long loses its beginning.

        Raises:
            ConfigError: a continuation is longer than the model's context.
        """
        prompts, params = [], []
        for _, context, continuation in requests:
            if len(continuation) >= self.max_length:
                most = self.max_length - 1
                raise ConfigError(f"a continuation has {len(continuation)} tokens; the limit is {most}")
            prompts.append((context + continuation)[-self.max_length :])
            first = len(prompts[-1]) - len(continuation)
            params.append(SamplingParams(max_new_tokens=0, prompt_logprobs=1, logprobs_from=first))
        found = []
        for request, output in zip(requests, self._run(prompts, params, disable_tqdm), strict=True):
            answer = _scored(output)
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
            found.append(answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each text. A text that is too long is scored in windows."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            (text,) = request.args
            pairs = get_rolling_token_windows(
                self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            own: list[Pair] = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        found = []
        for request, count in zip(requests, counts, strict=True):
            found.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after each context, up to the first stop string.

        Raises:
            ConfigError: a task sets a parameter that SamplingParams does not have.
        """
        prompts, params, stops = [], [], []
        for request in requests:
            context, given = request.args
            given = normalize_gen_kwargs(given, default_max_gen_toks=self.max_gen_toks)
            most, until = given.pop("max_gen_toks"), [text for text in given.pop("until") if text]
            given.pop("do_sample")  # then temperature is 0 if it is false
            tokens, most = maybe_truncate(self.tok_encode(context), max_gen_toks=most, max_model_len=self.max_length)
            # The thinking of a model may hold the stop strings of a task.
            stop = () if self._think_end_token else until
            prompts.append(tokens)
            params.append(SamplingParams(max_new_tokens=most, stop=stop, **given))
            stops.append(until)
        found = []
        outputs = self._run(prompts, params, disable_tqdm)
        for request, output, until in zip(requests, outputs, stops, strict=True):
            text = postprocess_generated_text(output.outputs[0].text, until, self._think_end_token)
            self.cache_hook.add_partial("generate_until", request.args, text)
            found.append(text)
        return found

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool) -> list[RequestOutput]:
        """Return the answer to each prompt. Raise the error of the first one that has none."""
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs


def _scored(output: RequestOutput) -> tuple[float, bool]:
    """Return the log probability of the scored prompt tokens, and whether each is the likeliest one."""
    assert output.prompt_logprobs is not None, "they were asked for"
    scores = [one for one in output.prompt_logprobs if one is not None]
    ids = output.prompt_token_ids[len(output.prompt_token_ids) - len(scores) :]
    greedy = all(one.top[0][0] == token_id for one, token_id in zip(scores, ids, strict=True))
    return sum(one.logprob for one in scores), greedy
