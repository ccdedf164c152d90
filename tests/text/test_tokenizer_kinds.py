"""Every kind of tokenizer: ids as tokenizer.json has them, text as transformers continues it."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.output_text import decodes_locally
from sarathi_pp.text.tokenizer import Tokenizer
from tests import thinning
from tests.text.tokenizer_kinds import CLASSES, CORPUS, KINDS, VOCAB_SIZE, continued, write_tokenizer

MODEL_TYPES = ("llama", "qwen2", "gpt2")
# Kinds for which transformers decodes an output differently without its prompt: it drops a first space, or keeps the
# mark of a continued word.
NEED_THE_PROMPT = ("metaspace", "prepended", "unigram", "word_level", "word_piece")

pytestmark = pytest.mark.oldest


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Return parts of the corpus, digits, spaces, added tokens and characters of all planes, in random order."""
    drawn = random.Random(seed)
    words = [word for line in CORPUS for word in line.split(" ")]
    others = [
        " ",
        "  ",
        "\n",
        "\t",
        "7",
        "2024",
        "<tool>",
        "</tool>",
        "<|user|>",
        "<|end|>",
        "fox",
        "foxes",
        "Hello again",
    ]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(drawn.randint(1, 12)):
            character = chr(drawn.choice([drawn.randint(33, 0x2FF), drawn.randint(0x3040, 0x9FFF), 0x1F600, 0x301]))
            parts.append(drawn.choice([drawn.choice(words), drawn.choice(others), character, " "]))
        texts.append("".join(parts))
    return texts


TEXTS = [" x", "x ", "x\n\n", *CORPUS, *random_texts(60)]


@functools.cache
def made(kind: str) -> Backend:
    return KINDS[kind]()


@functools.cache
def theirs(kind: str) -> transformers.PreTrainedTokenizerFast:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made(kind), **names)


def load(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory, vocab_size=512, eos_token_ids=[2])


def write(backend: object, directory: Path, tokenizer_class: str | None, model_type: str, **config: object) -> Path:
    write_tokenizer(backend, directory, tokenizer_class, **config)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_tokenizer_json_under_any_class_name(kind, tmp_path):
    backend = made(kind)
    texts = [text for text in TEXTS if backend.encode(text).ids]
    expected = [tuple(backend.encode(text).ids) for text in texts]
    assert len({len(ids) for ids in expected}) > 5, "the texts say something"
    for model_type in MODEL_TYPES:
        for name in (*CLASSES, None):
            text = load(write(backend, tmp_path / f"{model_type}-{name}", name, model_type))
            assert [text.encode_prompt(one).token_ids for one in texts] == expected, (model_type, name)
            assert [text.decode(ids) for ids in expected] == [backend.decode(ids) for ids in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_encodes_and_decodes_the_same_where_it_keeps_to_tokenizer_json(kind, tmp_path):
    directory = write(made(kind), tmp_path / "model", "PreTrainedTokenizerFast", "llama")
    text, by_class = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for one in TEXTS:
        ids = tuple(by_class(one)["input_ids"])
        assert text.encode_prompt(one).token_ids == ids or not ids
        assert text.decode(ids) == by_class.decode(ids, skip_special_tokens=True)
        assert text.decode(ids, skip_special_tokens=False) == by_class.decode(ids)


def test_a_class_gives_the_special_tokens_that_no_file_names(tmp_path):
    """Only the class names GPT-2's special tokens; its repository has them in no file."""
    backend = made("byte_level")
    backend.add_special_tokens(["<|endoftext|>"])
    bare = write(backend, tmp_path / "bare", None, "gpt2")
    assert load(bare).encode_prompt("").token_ids == (backend.token_to_id("<|endoftext|>"),)
    named = write(backend, tmp_path / "named", "GPT2Tokenizer", "gpt2")
    assert load(named).encode_prompt("").token_ids == (1,)
    # A class's token outside the vocabulary would be one more than the embedding's rows.
    other = load(write(made("word_level"), tmp_path / "other", None, "gpt2"))
    assert other.visible(len(made("word_level").get_vocab())) is False


def request(prompt: Iterable[int], **sampling: object) -> Request:
    return Request(0, tuple(prompt), SamplingParams(**sampling))


@pytest.fixture(scope="module")
def model() -> Iterator[transformers.LlamaForCausalLM]:
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5)
    yield model
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_transformers_pipeline_adds_to_the_prompt(kind, model, tmp_path):
    directory = write(made(kind), tmp_path / "model", "PreTrainedTokenizerFast", "llama")
    text, by_class = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=by_class)
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    for prompt in ("Hello", "Hello world 12", "caf\u00e9 \u65e5", "<|user|> hi", *random_texts(3, seed=1)):
        asked = request(text.encode_prompt(prompt).token_ids)
        ids = torch.tensor([asked.prompt_token_ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        output = output[0, len(asked.prompt_token_ids) :].tolist()
        output = [token_id for token_id in output if token_id < len(by_class)]
        answer = text.finish(Completion(asked, tuple(output), "stop" if output[-1:] == [2] else "length"))
        assert answer == continued(by_class, asked.prompt_token_ids, output)
        (found,) = pipeline(prompt, **options)
        if kind in NEED_THE_PROMPT:
            shown = found["generated_text"]
            assert answer.strip() == (shown.removeprefix("##") if kind == "word_piece" else shown).strip()
        else:
            assert answer == found["generated_text"]


def test_an_output_keeps_the_space_between_it_and_the_prompt(tmp_path):
    for kind in ("metaspace", "prepended", "unigram", "word_level", "byte_level"):
        text = load(write(made(kind), tmp_path / kind, "LlamaTokenizer", "llama"))
        prompt = text.encode_prompt("Hello").token_ids
        word = " world" if kind == "byte_level" else "world"
        output = made(kind).encode(word, add_special_tokens=False).ids
        assert text.finish(Completion(request(prompt), tuple(output), "length")) == " world", kind
        checker = text.stop_checker(request(prompt, stop=" w"))
        assert any(map(checker.push, output)), kind


def test_a_character_that_begins_in_the_prompt_is_completed_by_the_output(tmp_path):
    text = load(write(made("metaspace"), tmp_path / "pieces", "LlamaTokenizer", "llama"))
    first, *others = (made("metaspace").token_to_id(f"<0x{byte:02X}>") for byte in "\u8a9e".encode())
    answer = [
        text.finish(Completion(request((1, first)), tuple([*others, 1][:count]), "length")) for count in (0, 1, 2)
    ]
    assert answer == ["", "\ufffd", "\u8a9e"]
    prompt = (1, first, *others)
    answer = [text.finish(Completion(request(prompt), (first, *others)[:count], "length")) for count in range(4)]
    assert answer == ["", "\ufffd", "\ufffd\ufffd", "\u8a9e"], "the prompt's character is never the output's"


IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


@settings(max_examples=thinning.examples(1500))
@given(
    st.sampled_from(list(KINDS)),
    st.booleans(),
    st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=90),
    IDS,
    st.integers(0, 8),
    st.integers(1, 4),
)
def test_text_and_stops_are_those_of_decoding_everything(kind, skip, prompt, ids, at, length):
    """The ids are arbitrary: a short context, if one is taken, changes nothing."""
    backend = theirs(kind)
    text = Tokenizer(backend, vocab_size=512)
    full = continued(backend, prompt, ids, skip=skip)
    assert text.finish(Completion(request(prompt, skip_special_tokens=skip), tuple(ids), "length")) == full
    stop = full[at : at + length]
    if not stop:
        return
    asked = request(prompt, skip_special_tokens=skip, stop=stop)
    checker = text.stop_checker(asked)
    stopped = next((count for count, token_id in enumerate(ids, start=1) if checker.push(token_id)), None)
    counts = range(1, len(ids) + 1)
    assert stopped == next((n for n in counts if stop in continued(backend, prompt, ids[:n], skip=skip)), None)


def test_of_every_kind_it_is_known_how_far_back_text_depends():
    assert all(decodes_locally(theirs(kind)) for kind in KINDS)


def test_where_that_is_not_known_the_whole_prompt_is_decoded(tmp_path):
    """Cleaning up replaces strings in the whole text, and one replacement depends on earlier ones."""
    directory = write(
        made("word_level"), tmp_path / "cleaned", "PreTrainedTokenizerFast", "llama", clean_up_tokenization_spaces=True
    )
    by_class = transformers.AutoTokenizer.from_pretrained(directory)
    assert not decodes_locally(by_class)
    text = load(directory)
    prompt = list(text.encode_prompt("Hello world ' ' ' fox ' ' '").token_ids)
    for output in ("' world", ", hello .", "' ' '"):
        ids = text.encode_prompt(output).token_ids
        assert text.finish(Completion(request(prompt), ids, "length")) == continued(by_class, prompt, ids)
