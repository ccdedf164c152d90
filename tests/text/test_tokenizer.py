import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.errors import InputError, RowError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.chat_template import Renderer
from sarathi_pp.text.tokenizer import EncodedPrompt, Tokenizer, _paragraph_ends
from tests.text.tokenizer_kinds import continued

CORPUS = [
    "hello world, the quick brown fox",
    "STOP and END. Stopping the end",
    "gr\u00fc\u00dfe \u65e5\u672c\u8a9e \N{SLIGHTLY SMILING FACE}",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
VOCAB_SIZE = 400
DASHES = "-" * 48


def byte_level(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer: id 0 <s>, 1 </s>, 2 <|end|>, then every byte, then merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "</s>", "<|end|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    names = {"eos_token": "</s>", "extra_special_tokens": ["<|end|>"]}
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        names["bos_token"] = "<s>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def metaspace() -> PreTrainedTokenizerFast:
    """Make a sentencepiece-like tokenizer: spaces belong to the word after them, unknown bytes are single tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdeEND", "\u2581a", "\u2581E", "ND", DASHES]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


BYTES = byte_level()
PIECES = metaspace()


def tokenizer(backend: PreTrainedTokenizerFast | None = BYTES, **kwargs) -> Tokenizer:
    return Tokenizer(backend, **{"vocab_size": VOCAB_SIZE, "eos_token_ids": [1], **kwargs})


def plain_ids(text: str) -> list[int]:
    return BYTES(text, add_special_tokens=False)["input_ids"]


def request(stop=(), prompt=(0,), **sampling) -> Request:
    return Request(0, tuple(prompt), SamplingParams(stop=stop, **sampling))


def finish(text: Tokenizer, ids, reason="length", stop=(), prompt=(0,), **sampling) -> str | None:
    return text.finish(Completion(request(stop, prompt, **sampling), tuple(ids), reason))


def code_of(call, *args) -> str:
    with pytest.raises(RowError) as caught:
        call(*args)
    return caught.value.code


def test_a_prompt_gets_bos_and_a_rendered_chat_gets_one_only():
    assert tokenizer().encode_prompt("hello") == EncodedPrompt((0, *plain_ids("hello")))
    backend = byte_level()
    backend.chat_template = TEMPLATE
    ids = tokenizer(backend).encode_chat([{"role": "user", "content": "hello"}]).token_ids
    assert ids.count(0) == 1 and ids[0] == 0
    assert backend.decode(ids) == "<s>[user]hello[assistant]"


def test_a_prompt_that_was_rendered_before_gets_no_second_bos():
    text = tokenizer()
    assert text.encode_prompt("<s>hello").token_ids == (0, *plain_ids("hello"))
    # If a prompt contains the token twice, it gets it twice.
    assert text.encode_prompt("<s><s>hello").token_ids == (0, 0, *plain_ids("hello"))
    ends = text.encode_prompt("<s>ab\n\ncd", paragraphs=True)
    assert ends == text.encode_prompt("ab\n\ncd", paragraphs=True)
    # A tokenizer that adds none takes none away.
    backend = byte_level(bos=False)
    backend.bos_token = "<s>"
    assert tokenizer(backend).encode_prompt("<s><s>hello").token_ids == (0, 0, *plain_ids("hello"))


def test_a_prompt_is_taken_as_it_is_if_asked_for():
    text = tokenizer()
    assert text.encode_prompt("hello", add_special_tokens=False).token_ids == tuple(plain_ids("hello"))
    assert text.encode_prompt("<s><s>hello", add_special_tokens=False).token_ids == (0, 0, *plain_ids("hello"))
    with pytest.raises(RowError, match="add_special_tokens is false") as refused:
        text.encode_prompt("", add_special_tokens=False)
    assert refused.value.code == "empty_prompt"


def test_an_empty_prompt_is_bos_or_an_error():
    assert tokenizer().encode_prompt("") == EncodedPrompt((0,))
    assert code_of(tokenizer(byte_level(bos=False)).encode_prompt, "") == "empty_prompt"
    assert tokenizer(byte_level(bos=False)).encode_prompt(" ") == EncodedPrompt(tuple(plain_ids(" ")))


def paragraphs(backend: PreTrainedTokenizerFast, text: str) -> list[str]:
    """Decode the text's tokens paragraph by paragraph."""
    encoded = tokenizer(backend).encode_prompt(text, paragraphs=True)
    assert encoded.token_ids == tokenizer(backend).encode_prompt(text).token_ids
    cuts = [0, *encoded.paragraph_ends, len(encoded.token_ids)]
    assert cuts == sorted(set(cuts)) or encoded.paragraph_ends[-1] == len(encoded.token_ids)
    parts = [list(encoded.token_ids[first:end]) for first, end in zip(cuts, cuts[1:], strict=False)]
    return [backend.decode(part, skip_special_tokens=True) for part in parts]


@pytest.mark.parametrize("backend", [BYTES, PIECES])
def test_paragraphs_end_behind_their_blank_lines(backend):
    assert paragraphs(backend, "ab\n\ncd\ne\n\n\nb") == ["ab\n\n", "cd\ne\n\n\n", "b"]
    assert paragraphs(backend, "ab\r\n\r\ncd") == ["ab\r\n\r\n", "cd"]
    assert paragraphs(backend, "ab\n\n") == ["ab\n\n", ""]
    assert paragraphs(backend, "ab\ncd") == ["ab\ncd"]
    assert tokenizer(backend).encode_prompt("ab\n\ncd").paragraph_ends == ()


def test_a_token_that_goes_on_behind_the_blank_line_belongs_to_the_paragraph_before():
    assert _paragraph_ends("ab\n\ncd\n\n", [(0, 0), (0, 2), (2, 7), (7, 8)]) == (3, 4)
    assert _paragraph_ends("ab\n\ncd\n\nef", [(0, 2), (2, 3), (3, 8), (8, 10)]) == (3,)


def test_where_blank_lines_leave_no_token_the_next_paragraph_begins_with_its_first_word():
    assert _paragraph_ends("ab\n\ncd", [(0, 0), (0, 2), (4, 6)]) == (2,)
    assert _paragraph_ends("\n\ncd\n\nef", [(2, 4), (6, 8)]) == (1,)
    # Blank lines are cut from the positions of their tokens, as in RoBERTa's tokenizer.
    assert _paragraph_ends("ab\n\ncd", [(0, 2), (3, 3), (4, 4), (4, 6)]) == (3,)


def test_paragraphs_of_a_chat_are_those_of_the_rendered_text():
    backend = byte_level()
    backend.chat_template = TEMPLATE
    encoded = tokenizer(backend).encode_chat([{"role": "user", "content": "ab\n\ncd"}], paragraphs=True)
    (end,) = encoded.paragraph_ends
    assert backend.decode(encoded.token_ids[:end]) == "<s>[user]ab\n\n"


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (None, "no_chat_template"),
        ("{{ raise_exception('roles must alternate') }}", "chat_template_error"),
        ("{{ 'x' * 20000000 }}", "chat_template_error"),
        ("{{ messages[0].content.nothing.more }}", "chat_template_error"),
        ("{% if false %}x{% endif %}", "empty_prompt"),
    ],
)
def test_chat_templates_that_fail_are_row_errors(template, code):
    backend = byte_level(bos=False)
    backend.chat_template = template
    assert code_of(tokenizer(backend).encode_chat, [{"role": "user", "content": "hello"}]) == code


@pytest.mark.parametrize("inner", ["", "x"])
def test_a_chat_template_that_does_not_end_is_a_row_error(inner, monkeypatch):
    """The template may write output meanwhile or not. Ten thousand million rounds would take an hour."""
    monkeypatch.setattr("sarathi_pp.text.chat_template.MAX_RENDER_S", 0.3)
    backend = byte_level(bos=False)
    turns = "{% for a in range(99999) %}{% for b in range(99999) %}"
    backend.chat_template = f"{turns}{inner}{{% endfor %}}{{% endfor %}}"
    with pytest.raises(RowError, match=r"ran for more than 0\.3 s") as refused:
        tokenizer(backend).encode_chat([{"role": "user", "content": "hello"}])
    assert refused.value.code == "chat_template_error"
    backend.chat_template = TEMPLATE  # and the next one has all its time
    assert tokenizer(backend).encode_chat([{"role": "user", "content": "hello"}]).token_ids


def test_what_one_expression_of_a_template_takes_is_bounded(monkeypatch):
    """Such a step of the interpreter ends only when it is done; a timeout cannot interrupt it."""
    backend = byte_level()
    for expression, says in {
        "7 ** 500000000": r"it ran for more than 0\.5 s",
        "('x' * 10 ** 8)|replace('x', 'xxxxxxxxxx')": r"it (took more than 512 MiB of memory|ran for more than 0\.5 s)",
    }.items():
        backend.chat_template = f"{{{{ {expression} }}}}"
        with monkeypatch.context() as patch, pytest.raises(RowError, match=says):
            patch.setattr("sarathi_pp.text.chat_template.MAX_RENDER_S", 0.5)
            tokenizer(backend).encode_chat([{"role": "user", "content": "hello"}])
    text = tokenizer(backend)
    for expression, says in {
        "'x' * 10 ** 11": "it took more than 512 MiB of memory",
        "'x'.center(10 ** 11)": "it took more than 512 MiB of memory",
        "'%*d' % (2 * 10 ** 9, 1)": "it took more than 512 MiB of memory",
        "'x' * 20000000": "it wrote 20000000 characters",
    }.items():
        backend.chat_template = f"{{{{ {expression} }}}}"
        with pytest.raises(RowError, match=says) as refused:
            text.encode_chat([{"role": "user", "content": "hello"}])
        assert refused.value.code == "chat_template_error"
    backend.chat_template = TEMPLATE
    assert text.encode_chat([{"role": "user", "content": "hello"}]).token_ids


def test_what_a_template_says_of_its_failure_is_cut():
    with pytest.raises(RowError, match="the chat template failed: xxx") as refused:
        Renderer().render("{{ raise_exception('x' * 10 ** 8) }}", [], {})
    assert 1000 < len(refused.value.message) < 1100


def test_the_process_that_renders_outlives_the_thread_that_first_asked():
    renderer, found = Renderer(), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append((renderer.render("x", [], {}), renderer.pid)))
        thread.start()
        thread.join()
        time.sleep(0.2)
    assert found[0] == found[1] == ("x", renderer.pid)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        {"default": TEMPLATE, "tool_use": "no"},
        "{{ eos_token }}{{ extra_special_tokens }}{{ messages|tojson }}{{ add_generation_prompt }}{{ tools }}",
        "{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% continue %}{% endif %}-{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
)
def test_a_template_writes_what_the_library_would(template):
    messages = [
        {"role": "system", "content": None, "name": "\u65e5"},
        {"role": "user", "content": "a\n\ud83dz", "n": 1.5},
    ]
    backend = byte_level()
    backend.chat_template = template
    expected = backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Renderer().render(backend.get_chat_template(), messages, backend.special_tokens_map) == expected


def word_pieces() -> PreTrainedTokenizerFast:
    """Make a tokenizer like BERT's: a word of over a hundred characters is one token, white space is none."""
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2, "b": 3}
    backend = Backend(models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


WORDY = word_pieces()


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (BYTES, "hello world, " * 40_000),
        (PIECES, "a E\u65e5" * 150_000),
        (PIECES, DASHES * 6_000),
        (WORDY, "a" * 600_000),
        (WORDY, "b " + " " * 900_000),
        (WORDY, ("a" * 101 + " ") * 9_000),
    ],
)
def test_a_long_text_that_just_fits_is_taken(backend, text):
    text_tokenizer = tokenizer(backend)
    whole = text_tokenizer.encode_prompt(text)
    assert text_tokenizer.encode_prompt(text, most_tokens=len(whole.token_ids)) == whole


@pytest.mark.parametrize("text", ["1+" * 10_000_000, "\U0001f600" * 2_000_000, " a" * 500_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(text, monkeypatch):
    backend = byte_level()
    backend.chat_template = "{{ messages[0].content }}"
    longest = []
    encode = Tokenizer._encode

    def noting(self, text, **options):
        longest.append(len(text))
        return encode(self, text, **options)

    text_tokenizer = tokenizer(backend)
    monkeypatch.setattr(Tokenizer, "_encode", noting)
    with pytest.raises(RowError, match=f"the text has {len(text)} characters; they do not fit into 1000 tokens") as no:
        text_tokenizer.encode_prompt(text, most_tokens=1000)
    assert no.value.code == "context_length_exceeded"
    if len(text.encode()) < 2**24:
        with pytest.raises(RowError, match="they do not fit into 1000 tokens"):
            text_tokenizer.encode_chat([{"role": "user", "content": text}], most_tokens=1000)
    assert max(longest, default=0) <= 2**18


def test_token_ids_are_those_of_the_embedding():
    assert tokenizer().check_token_ids([0, VOCAB_SIZE - 1]) == (0, VOCAB_SIZE - 1)
    with pytest.raises(RowError, match="token 1 of the prompt is 400.*0 to 399"):
        tokenizer().check_token_ids([5, VOCAB_SIZE, -1])
    assert code_of(tokenizer().check_token_ids, [-1]) == "invalid_token_id"


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(InputError, match="different models"):
        tokenizer(vocab_size=100)


def test_half_a_surrogate_pair_is_a_row_error():
    assert code_of(tokenizer().encode_prompt, "a\ud800") == "invalid_parameter"


def test_load_reads_a_local_directory_and_none_is_no_tokenizer(tmp_path):
    BYTES.save_pretrained(tmp_path / "with")
    (tmp_path / "without").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    loaded = Tokenizer.load(tmp_path / "with", vocab_size=VOCAB_SIZE)
    assert loaded.encode_prompt("hello world") == tokenizer().encode_prompt("hello world")
    bare = Tokenizer.load(tmp_path / "without", vocab_size=VOCAB_SIZE)
    assert not bare.has_text
    assert bare.check_token_ids([3]) == (3,)
    assert finish(bare, [3]) is None
    assert code_of(bare.encode_prompt, "x") == "no_tokenizer"
    assert code_of(bare.encode_chat, [{"role": "user"}]) == "no_tokenizer"
    assert code_of(bare.stop_checker, request(["x"])) == "no_tokenizer"
    with pytest.raises(InputError, match="broken"):
        Tokenizer.load(tmp_path / "broken", vocab_size=VOCAB_SIZE)


def test_finish_leaves_out_the_end_token_and_the_stop_string():
    text = tokenizer()
    assert finish(text, [*plain_ids("hello"), 1], "stop", ()) == "hello"
    assert finish(text, plain_ids("hello END and STOP"), "stop", ("STOP", "END")) == "hello "
    assert finish(text, plain_ids("hello"), "length", ("STOP",)) == "hello"
    assert finish(text, [], "length", ()) == ""
    # An end token that the tokenizer does not know as special is still left out.
    last = plain_ids("END")
    assert finish(tokenizer(eos_token_ids=last[-1:]), [*plain_ids("ab"), last[-1]], "stop", ()) == "ab"


def test_a_stop_token_is_left_out_or_kept():
    ids = plain_ids("hello END")
    last = {"stop_token_ids": ids[-1:]}
    without = BYTES.decode(ids[:-1])
    assert finish(tokenizer(), ids, "stop", **last) == without != "hello END"
    assert finish(tokenizer(), ids, "length", **last) == "hello END", "the token did not end the output"
    assert finish(tokenizer(), ids, "stop", **last, include_stop_str_in_output=True) == "hello END"
    # A special token is shown only with the others of its kind.
    special = [*plain_ids("ab"), 2]
    shown = {"skip_special_tokens": False, "stop_token_ids": [2]}
    assert finish(tokenizer(), special, "stop", **shown) == "ab"
    assert finish(tokenizer(), special, "stop", **shown, include_stop_str_in_output=True) == "ab<|end|>"
    assert finish(tokenizer(), special, "stop", stop_token_ids=[2], include_stop_str_in_output=True) == "ab"


def test_the_end_token_is_kept_if_asked_for_and_special_tokens_are_shown():
    ids, keep = [*plain_ids("ab"), 1], {"include_stop_str_in_output": True}
    assert finish(tokenizer(), ids, "stop", **keep) == "ab"
    assert finish(tokenizer(), ids, "stop", **keep, skip_special_tokens=False) == "ab</s>"
    last = plain_ids("END")
    plain_end = tokenizer(eos_token_ids=last[-1:])
    assert finish(plain_end, last, "stop", **keep) == "END" != finish(plain_end, last, "stop")


def test_a_stop_string_is_kept_if_asked_for():
    keep = {"include_stop_str_in_output": True}
    assert finish(tokenizer(), plain_ids("hello END and STOP"), "stop", ("STOP", "END"), **keep) == "hello END"
    assert finish(tokenizer(), plain_ids("hello END"), "stop", ("END", "EN"), **keep) == "hello EN"
    assert finish(tokenizer(), [*plain_ids("ab"), 2], "stop", ("<|end|>",), **keep) == "ab<|end|>"
    assert finish(tokenizer(), plain_ids("hello"), "length", ("STOP",), **keep) == "hello"


def test_no_stop_string_ends_an_output_before_its_least_tokens():
    ids = [*plain_ids("ab"), 2, *plain_ids("ab"), 2]
    early = len(plain_ids("ab")) + 1
    checker = tokenizer().stop_checker(request(["<|end|>"], min_new_tokens=early))
    assert [checker.push(token_id) for token_id in ids].index(True) == len(ids) - 1
    assert finish(tokenizer(), ids, "stop", ("<|end|>",), min_new_tokens=early) == "abab"
    assert finish(tokenizer(), ids[:early], "length", ("<|end|>", "ab"), min_new_tokens=early) == "ab"
    # A stop string may begin in the early tokens.
    ids = plain_ids("END")
    checker = tokenizer().stop_checker(request(["END"], min_new_tokens=1))
    assert [checker.push(token_id) for token_id in ids] == [False, True]


def test_special_tokens_are_shown_if_asked_for():
    ids = [*plain_ids("ab"), 2, *plain_ids("c"), 1]
    assert finish(tokenizer(), ids, "stop") == "abc"
    assert finish(tokenizer(), ids, "stop", skip_special_tokens=False) == "ab<|end|>c</s>"
    checker = tokenizer().stop_checker(request(["b<|end|>c"], skip_special_tokens=False))
    assert [checker.push(token_id) for token_id in ids[:4]].index(True) == len(plain_ids("ab")) + 1


def test_a_token_that_tokenizer_json_alone_calls_special_can_stop():
    backend = byte_level()
    backend.add_tokens(["<|turn|>"], special_tokens=True)
    number = backend.convert_tokens_to_ids("<|turn|>")
    assert number not in backend.all_special_ids and finish(tokenizer(backend), [number]) == ""
    assert tokenizer(backend).stop_checker(request(["<|turn|>"])).push(number)


def test_a_stop_string_that_is_no_token_does_not_stop_at_the_unknown_one():
    unknown = WORDY.convert_tokens_to_ids("[UNK]")
    assert unknown == WORDY.convert_tokens_to_ids("END")
    assert not tokenizer(WORDY).stop_checker(request(["END"])).push(unknown)
    assert finish(tokenizer(WORDY), [unknown, 3], stop=["END"]).strip() == "b"


def test_a_stop_string_written_like_a_special_token_stops_at_it():
    checker = tokenizer().stop_checker(request(["<|end|>"]))
    assert [checker.push(token_id) for token_id in [*plain_ids("ab"), 2]][-1]
    assert finish(tokenizer(), [*plain_ids("ab"), 2], "stop", ("<|end|>",)) == "ab"


def test_a_stop_string_is_seen_across_tokens_and_split_characters():
    ids = plain_ids("ab") + [BYTES.convert_tokens_to_ids(piece) for piece in byte_pieces("\u8a9e END")]
    checker = tokenizer().stop_checker(request(["\u8a9e EN"]))
    assert [checker.push(token_id) for token_id in ids] == [False] * (len(ids) - 2) + [True, True]


def byte_pieces(text: str) -> list[str]:
    """Return the single-byte tokens of a text."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list(pre.pre_tokenize_str(text)[0][0])


def first_end(text: str, stop: list[str], early: str) -> tuple[int, int] | None:
    """Find the first place in a text at which a stop string begins, and its end, which is after the text `early`."""
    ends = range(len(early.rstrip("\ufffd")) + 1, len(text) + 1)
    found = [(end - len(one), end) for one in stop for end in ends if text[:end].endswith(one)]
    return min(found, default=None)


def first_stop(
    backend: PreTrainedTokenizerFast, prompt: tuple[int, ...], ids: list[int], stop: list[str], least: int = 0
) -> int | None:
    """Find the stop by its definition: the fewest tokens whose text holds a stop string that ends after the early."""
    early = continued(backend, prompt, ids[:least]) if least else ""
    for count in range(least + 1, len(ids) + 1):
        if first_end(continued(backend, prompt, ids[:count]), stop, early) is not None:
            return count
    return None


def assert_stops_where_defined(
    backend: PreTrainedTokenizerFast, ids: list[int], stop: list[str], prompt: tuple[int, ...] = (0,), least: int = 0
) -> None:
    text = tokenizer(backend)
    checker = text.stop_checker(request(stop, prompt, min_new_tokens=least))
    stopped = next((i for i, token_id in enumerate(ids, start=1) if checker.push(token_id)), None)
    assert stopped == first_stop(backend, prompt, ids, stop, least)
    if stopped is not None:
        full = continued(backend, prompt, ids[:stopped])
        start, end = first_end(full, stop, continued(backend, prompt, ids[:least]) if least else "")
        given = (text, ids[:stopped], "stop", stop, prompt)
        assert finish(*given, min_new_tokens=least) == full[:start]
        assert finish(*given, min_new_tokens=least, include_stop_str_in_output=True) == full[:end]


WORDS = st.lists(
    st.sampled_from(["E", "N", "D", "EN", "ND", " ", "end", "\u8a9e", "\u00fc", "hello ", ".", "\n"]), max_size=60
).map("".join)


@settings(max_examples=120)
@given(
    st.one_of(
        WORDS.map(plain_ids), WORDS.map(lambda t: [BYTES.convert_tokens_to_ids(p) for p in byte_pieces(t)] if t else [])
    ),
    st.lists(st.sampled_from(["END", "D.", "\u8a9eE", "\n\n", "\u00fc", " hello END"]), min_size=1, max_size=2),
    st.integers(0, 20),
)
@example(ids=plain_ids("END" * 9), stop=["END"], least=5)
@example(ids=plain_ids("hello " * 40 + "END"), stop=["END"], least=78)
@example(ids=plain_ids("END" + "hello " * 20 + "END"), stop=["END"], least=4)
def test_incremental_stops_are_those_of_the_full_decode(ids, stop, least):
    assert_stops_where_defined(BYTES, ids, stop)
    assert_stops_where_defined(BYTES, ids, stop, least=least)


@settings(max_examples=120)
@given(
    st.lists(st.integers(min_value=0, max_value=330), max_size=80),
    st.lists(st.sampled_from(["a", "\u8bed", "th", "\n"])),
)
@example(ids=[0, 1, 2, 350, 399] * 10, stop=["a"])
def test_arbitrary_tokens_stop_where_the_full_decode_does(ids, stop):
    if stop:
        assert_stops_where_defined(BYTES, ids, stop)


@settings(max_examples=120)
@given(
    st.lists(
        st.sampled_from(
            [PIECES.convert_tokens_to_ids(p) for p in ["<s>", "\u2581", "\u2581E", "E", "ND", "a", "\u2581a"]]
        ),
        max_size=90,
    )
)
def test_a_decoder_that_drops_the_first_space_drops_only_that(ids):
    assert_stops_where_defined(PIECES, ids, [" END", "a  a"])


def test_a_stop_string_that_begins_in_a_long_token_is_seen():
    ids = PIECES.convert_tokens_to_ids([DASHES, "E", "N", "D"])
    assert_stops_where_defined(PIECES, ids, ["-END"])


@settings(max_examples=120)
@given(
    st.text(alphabet="\u8a9e\N{GRINNING FACE}aE", max_size=80),
    st.sampled_from(["\u8a9eE", "\u8a9e\u8a9e\N{GRINNING FACE}", "aE"]),
)
@example(text="a" + "\N{GRINNING FACE}" * 90 + "E", stop="\N{GRINNING FACE}E")
@example(text="\u8a9e" * 60 + "E", stop="\u8a9eE")
@example(text="\u8a9e" * 60 + "E", stop="\u8a9e\u8a9eE")
@example(text="\u8a9e" * 60 + "E", stop="\u8a9e\u8a9e\u8a9eE")
def test_characters_in_single_byte_tokens_stop_where_the_full_decode_does(text, stop):
    # One bad byte breaks the whole run of byte tokens around it: a window must not start inside a character.
    pieces = [
        piece for char in text for piece in ([char] if char in "aE" else [f"<0x{byte:02X}>" for byte in char.encode()])
    ]
    assert_stops_where_defined(PIECES, PIECES.convert_tokens_to_ids(pieces), [stop])


def test_a_find_is_confirmed_on_the_whole_output():
    # A WordPiece decoder drops the ## of every token but the first, so a window shows one that the text does not have.
    vocabulary = {"<unk>": 0, "abc": 1, "##def": 2}
    backend = Backend(models.WordPiece(vocab=vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    assert_stops_where_defined(PreTrainedTokenizerFast(tokenizer_object=backend), [1] + [2] * 60, ["##"])


class Counting:
    """A tokenizer that counts the tokens it decodes, in all and at most at once."""

    def __init__(self, backend):
        self._backend = backend
        self.decoded = self.longest = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def __len__(self):
        return len(self._backend)

    def __call__(self, *args, **kwargs):
        return self._backend(*args, **kwargs)

    def decode(self, ids, **kwargs):
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return self._backend.decode(ids, **kwargs)


# Neither ids without text (0 and 399) nor bytes that make no character may fill the window. A first character of one
# token and then characters of four tokens have borders that halving alone never finds.
LONG_OUTPUTS = [
    (BYTES, [*plain_ids("hello world " * 100), *[0, VOCAB_SIZE - 1] * 300, *plain_ids("\u8a9e")[-1:] * 300], 500),
    (PIECES, PIECES.convert_tokens_to_ids(["a", *["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"] * 300]), 250),
]


@pytest.mark.parametrize(("backend", "ids", "most"), LONG_OUTPUTS)
def test_the_cost_of_a_token_does_not_grow_with_the_output(backend, ids, most):
    counting = Counting(backend)
    checker = tokenizer(counting).stop_checker(request(["STOP!"], prompt=ids[:1] * 100_000))
    for token_id in ids:
        assert not checker.push(token_id)
    assert counting.longest < most
    assert counting.decoded < 400 * len(ids)


def test_a_stop_string_in_the_early_tokens_does_not_make_later_ones_costly():
    counting, early = Counting(BYTES), plain_ids("STOP! " * 20)
    ids = [*early, *plain_ids("hello world " * 500)]
    checker = tokenizer(counting).stop_checker(request(["STOP!"], prompt=ids[:1], min_new_tokens=len(early)))
    assert not any(checker.push(token_id) for token_id in ids)
    assert counting.decoded < 400 * len(ids)


def test_without_stop_strings_there_is_no_checker():
    assert tokenizer().stop_checker(request()) is None


def test_encoding_and_decoding_in_threads_at_once():
    text = tokenizer()
    prompt, failures = "hello world " * 100, []
    encoded = text.encode_prompt(prompt)

    def repeat(call, expected):
        try:
            assert all(call() == expected for _ in range(100))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(lambda: text.encode_prompt(prompt), encoded)) for _ in range(2)]
    threads += [
        threading.Thread(target=repeat, args=(lambda: text.decode(encoded.token_ids), prompt)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_end_token_that_ends_no_output_is_doubted():
    backend = word_pieces()
    backend.eos_token = "b"
    end_id = backend.eos_token_id
    assert tokenizer(backend, eos_token_ids=[end_id, 1]).end_token_doubt("a file") is None
    assert tokenizer(backend, eos_token_ids=[]).end_token_doubt("a file") is None
    assert tokenizer(None, eos_token_ids=[1]).end_token_doubt("a file") is None
    no_token = len(backend) + 5
    doubt = tokenizer(backend, eos_token_ids=[1, no_token], vocab_size=no_token + 1).end_token_doubt("a file")
    assert f"'b' ({end_id}) does not end outputs" in doubt
    assert f"(1), {no_token}. If outputs are too long, correct it in a file" in doubt


def test_an_unknown_token_with_another_use_is_none():
    backend = word_pieces()
    assert tokenizer(backend).unknown_id == backend.unk_token_id is not None
    backend.eos_token = backend.unk_token
    assert tokenizer(backend).unknown_id is None


def test_the_vocabulary_is_read_once_for_all_requests(monkeypatch):
    """Reading it takes up to 0.2 s, in which no other thread of the process can run."""
    backend, reads = byte_level(), []
    read = backend.get_vocab
    monkeypatch.setattr(backend, "get_vocab", lambda: reads.append(1) or read(), raising=False)
    tokenizer = Tokenizer(backend, vocab_size=VOCAB_SIZE)
    reads.clear()
    for _ in range(3):
        assert tokenizer.spells_bytes and tokenizer.token_id("</s>") == 1 and tokenizer.token_id("nothing") is None
    assert len(reads) == 1
