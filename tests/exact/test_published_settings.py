"""With the generation_config.json of a published model, tokens are those of transformers' `generate` with that file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sarathi_pp.core.request import Request
from sarathi_pp.inputs.generation_config import GenerationDefaults, read_generation_config
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.text.tokenizer import Tokenizer
from tests.engine.pipeline import Outcome, run_pipeline
from tests.exact.references import Reference, Tokens
from tests.inputs.test_generation_config import PUBLISHED
from tests.model.families import VOCAB_SIZE

NEW_TOKENS = 12
NUM_PROMPTS = 6
NUM_SAMPLES = 1000
LIMITS = PromptLimits(max_model_len=512, num_pages=512, page_size=4, vocab_size=VOCAB_SIZE)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def known(reference) -> Reference:
    return reference("llama")


def write_settings(folder: Path, known: Reference, name: str) -> None:
    """Write a published file next to the tiny model. Its token ids become ids that this model generates."""
    settings = dict(PUBLISHED[name])
    ends = settings["eos_token_id"]
    drawn = [known.outputs[place][3 + place] for place in range(len(ends) if isinstance(ends, list) else 1)]
    settings |= {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": drawn if isinstance(ends, list) else drawn[0]}
    folder.mkdir()
    shutil.copy(known.directory / "config.json", folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))


def generate(known: Reference, folder: Path, prompt: Tokens, **call: Any) -> Any:
    known.model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        return known.model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **call)


def run(known: Reference, defaults: GenerationDefaults, prompts: list[Tokens], most: int, **options: Any) -> Outcome:
    """Run the requests that lines without any sampling key become."""
    ends = defaults.eos_token_ids
    maker = RequestMaker(Tokenizer(None, vocab_size=VOCAB_SIZE, eos_token_ids=ends), defaults, LIMITS, seed=0)
    made: list[Request] = [
        maker.make(ParsedLine(number, number, "own", prompt_token_ids=prompt, overrides={"max_new_tokens": most}), 0, 0)
        for number, prompt in enumerate(prompts)
    ]
    sampling, rules = [one.sampling for one in made], [one.rules for one in made]
    return run_pipeline(known.directory, prompts, eos_token_ids=ends, sampling=sampling, rules=rules, **options)


@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_tokens_end_and_repeat_as_in_transformers(name, known, tmp_path):
    folder, prompts = tmp_path / "model", list(known.prompts[:NUM_PROMPTS])
    write_settings(folder, known, name)
    outcome = run(known, read_generation_config(folder, {"do_sample": False}), prompts, NEW_TOKENS, stages=2)
    for prompt, found in zip(prompts, outcome.tokens, strict=True):
        theirs = generate(known, folder, prompt, do_sample=False, max_new_tokens=NEW_TOKENS).sequences[0]
        assert found == tuple(theirs[len(prompt) :].tolist())
    assert {"stop", "length"} <= set(outcome.reasons), "some outputs end at a token of the file"


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_drawn_from_the_distribution_of_transformers(name, known, tmp_path):
    folder, prompt = tmp_path / "model", known.prompts[8]
    write_settings(folder, known, name)
    scores = generate(known, folder, prompt, max_new_tokens=1, output_scores=True).scores[0][0]
    expected = scores.double().softmax(-1)
    outcome = run(known, read_generation_config(folder), [prompt] * NUM_SAMPLES, 1, stages=1, chunk_size=256)
    drawn = torch.tensor([token for (token,) in outcome.tokens])
    assert (expected[drawn] > 0).all(), "every token passes the filters of the file"
    shares = torch.bincount(drawn, minlength=VOCAB_SIZE) / NUM_SAMPLES
    assert (shares - expected).abs().sum() / 2 < 0.1
