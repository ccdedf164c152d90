"""The model for lm-eval scores and generates as transformers does.

lm-eval is not installed with this project. Its modules that the model uses are replaced here by the least that works,
and `examples/benchmarks/compare_lm_eval.py` compares the figures of real tasks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sarathi_pp.errors import ConfigError

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")
TEXTS = ("12+30=42", "7+8=15\n40+2=42", "1+1=3")


class TemplateLM:
    """Stands for the class of lm-eval."""

    def __init__(self) -> None:
        self.cache_hook = SimpleNamespace(add_partial=lambda *record: self.cached.append(record))
        self.cached: list[tuple[Any, ...]] = []


def normalized(given: dict[str, Any], default_max_gen_toks: int) -> dict[str, Any]:
    return {"max_gen_toks": default_max_gen_toks, "until": [], "do_sample": False, "temperature": 0.0, **given}


def truncated(tokens: list[int], max_gen_toks: int, max_model_len: int) -> tuple[list[int], int]:
    return tokens[max(0, len(tokens) + max_gen_toks - max_model_len) :], max_gen_toks


def before_stop(text: str, until: list[str], think_end_token: str | None) -> str:
    text = text.split(think_end_token)[-1] if think_end_token else text
    for stop in until:
        text = text.split(stop)[0]
    return text


def windows(token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int) -> list[Any]:
    assert len(token_list) <= max_seq_len and context_len == 1
    return [([prefix_token, *token_list[:-1]], token_list)]


@pytest.fixture(scope="module")
def model():
    modules = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: cls},
        "lm_eval.models": {},
        "lm_eval.models.utils": {
            "normalize_gen_kwargs": normalized,
            "maybe_truncate": truncated,
            "postprocess_generated_text": before_stop,
        },
        "lm_eval.utils": {
            "get_rolling_token_windows": windows,
            "make_disjoint_window": lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            patch.setitem(sys.modules, name, module)
        from sarathi_pp.lm_eval.model import SarathiLM

        # lm-eval passes the last three, asked or not.
        model = SarathiLM(
            pretrained=ADDER, stages=2, dtype="float32", batch_size=1, max_batch_size=None, device="cuda:0"
        )
        yield model
        model.llm.close()
    del sys.modules["sarathi_pp.lm_eval.model"]


def request(*args: object) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def logprobs(tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(ADDER, dtype=torch.float32)
        return theirs(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def test_a_continuation_has_the_log_probability_of_transformers(model):
    pairs = [model.tok_encode(text) for text in TEXTS]
    cut = [(("a", str(number)), tokens[:-2], tokens[-2:]) for number, tokens in enumerate(pairs)]
    found = model._loglikelihood_tokens(cut, disable_tqdm=True)
    for tokens, (logprob, is_greedy) in zip(pairs, found, strict=True):
        rows = logprobs(tokens)[len(tokens) - 3 : -1]
        assert logprob == pytest.approx(
            sum(row[token].item() for row, token in zip(rows, tokens[-2:], strict=True)), abs=1e-4
        )
        assert is_greedy == (rows.argmax(-1).tolist() == tokens[-2:])
    assert [is_greedy for _, is_greedy in found] == [True, True, False]
    assert model.cached[-3:] == [("loglikelihood", key, one) for (key, *_), one in zip(cut, found, strict=True)]


def test_a_context_that_is_too_long_loses_its_beginning(model):
    filler = [*model.tok_encode("1+1=2\n" * 400), *model.tok_encode("1+1=", add_special_tokens=False)]
    answer = model.tok_encode("2", add_special_tokens=False)
    assert len(filler) > model.max_length
    ((logprob, is_greedy),) = model._loglikelihood_tokens([(None, filler, answer)], disable_tqdm=True)
    kept = (filler + answer)[-model.max_length :]
    assert logprob == pytest.approx(logprobs(kept)[-2, answer[0]].item(), abs=1e-4) and is_greedy
    with pytest.raises(ConfigError, match="a continuation has"):
        model._loglikelihood_tokens([(None, [1], filler)], disable_tqdm=True)


def test_a_text_has_the_log_probability_of_all_its_tokens(model):
    found = model.loglikelihood_rolling([request(text) for text in TEXTS], disable_tqdm=True)
    for text, logprob in zip(TEXTS, found, strict=True):
        tokens = model.tok_encode(text)
        rows = logprobs([model.prefix_token_id, *tokens])[:-1]
        assert logprob == pytest.approx(
            sum(row[token].item() for row, token in zip(rows, tokens, strict=True)), abs=1e-4
        )
    assert model.cached[-1] == ("loglikelihood_rolling", (TEXTS[-1],), found[-1])


def test_a_text_is_generated_up_to_the_first_stop_string(model):
    given = {"until": ["2"], "max_gen_toks": 8}
    found = model.generate_until([request("12+30=", given), request("40+2=", {"max_gen_toks": 1})], disable_tqdm=True)
    assert found == ["4", "4"]
    assert model.cached[-2:] == [("generate_until", ("12+30=", given), "4"), model.cached[-1]]
    with pytest.raises(ConfigError, match="num_beems"):
        model.generate_until([request("1+1=", {"num_beems": 4})], disable_tqdm=True)


def test_a_text_with_the_prefix_token_gets_no_second_one(model):
    prefix = model.tokenizer.decode(model.prefix_token_id)
    tokens = model.tok_encode("1+1=")
    assert (
        model.tok_encode(f"{prefix}1+1=")[:1] == [model.prefix_token_id] == tokens[:1] and tokens.count(tokens[0]) == 1
    )
