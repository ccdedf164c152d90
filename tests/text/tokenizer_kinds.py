"""Tokenizers of every kind that published models have, small enough to train in a test.

Each is built with the tokenizers library alone, and written like a model directory: `tokenizer.json` with all that
decides ids and text, and `tokenizer_config.json` with a class name, which decides neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "Hello world, the quick brown fox doesn't jump over 13 lazy dogs. Hello again, world!",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 2024 65536 3.1415 and so on; hello hello hello.",
    "gr\u00fc\u00dfe \u65e5\u672c\u8a9e \u65e5\u672c caf\u00e9 \N{SLIGHTLY SMILING FACE} na\u00efve",
    "def f(x):\n    return x + 1\n\n\nprint(f(2))\t# the end",
    "<|user|> hi <tool> there <|end|>",
)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
VOCAB_SIZE = 480
CLASSES = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "GPT2Tokenizer",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "BertTokenizer",
    "NoSuchTokenizer",
)


def _bpe(**options: object) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), show_progress=False, **options)


def _with_bos(made: Tokenizer) -> Tokenizer:
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    """Make one like GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, _bpe(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return made


def byte_level_prefix_space() -> Tokenizer:
    """Make one like RoBERTa's with add_prefix_space."""
    return _with_bos(byte_level(add_prefix_space=True))


def byte_level_digits() -> Tokenizer:
    """Make one like those of Llama 3 and Qwen: a pattern splits the text before the bytes; here each digit is alone."""
    made = Tokenizer(models.BPE())
    pattern = Regex(r"\p{N}|[^\s\p{L}\p{N}]+| ?\p{L}+|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, _bpe(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return _with_bos(made)


def byte_level_added() -> Tokenizer:
    """Make one with added tokens, special or not, that take white space around them or match only whole words."""
    made = _with_bos(byte_level())
    made.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True), AddedToken("<|end|>", normalized=False)])
    made.add_tokens(
        [
            AddedToken("<tool>", rstrip=True),
            AddedToken("</tool>", lstrip=True),
            AddedToken("hello again", normalized=True),
            AddedToken("fox", single_word=True),
        ]
    )
    return made


def _pieces() -> dict[str, int]:
    """Return special tokens and bytes, which come first in a SentencePiece vocabulary."""
    return {piece: number for number, piece in enumerate((*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))))}


def _sentence_pieces(made: Tokenizer) -> Tokenizer:
    """Train pieces, then fill the vocabulary up with every byte, as SentencePiece does."""
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=list(SPECIAL), show_progress=False)
    )
    trained = json.loads(made.to_str())["model"]
    vocabulary = _pieces()
    for piece in trained["vocab"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [tuple(pair) for pair in trained["merges"]]
    made.model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return made


def _fallback_decoder(*last: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def metaspace() -> Tokenizer:
    """Make one like Llama 2's newer form: a space before the text, dropped in decoding; bytes for unknown text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = _fallback_decoder(decoders.Strip(" ", 1, 0))
    return _with_bos(_sentence_pieces(made))


def prepended() -> Tokenizer:
    """Make one like Llama 2's older form: the normalizer adds the space before every piece between special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made = _sentence_pieces(made)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.pre_tokenizer = None
    made.decoder = _fallback_decoder(decoders.Strip(" ", 1, 0))
    return _with_bos(made)


def metaspace_digits() -> Tokenizer:
    """Make one like DeepSeek's and Yi's: SentencePiece pieces with each digit alone, and no space before the text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    made.decoder = _fallback_decoder()
    return _with_bos(_sentence_pieces(made))


def unigram() -> Tokenizer:
    """Make one like those of T5 and XGLM."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=180, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False, n_sub_iterations=1
        ),
    )
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return made


def word_level() -> Tokenizer:
    """Make one of whole words without a decoder: text is words with a space between them."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False))
    return made


def word_piece() -> Tokenizer:
    """Make one like BERT's: lower case, no accents, pieces within a word marked."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=160, special_tokens=list(SPECIAL), show_progress=False)
    )
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made
    for made in (
        byte_level,
        byte_level_prefix_space,
        byte_level_digits,
        byte_level_added,
        metaspace,
        prepended,
        metaspace_digits,
        unigram,
        word_level,
        word_piece,
    )
}


def write_tokenizer(made: Tokenizer, directory: Path, tokenizer_class: str | None, **config: object) -> None:
    """Write both files as they are published. tokenizer_class: None writes tokenizer.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    if tokenizer_class is not None:
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        record = {**names, "tokenizer_class": tokenizer_class, **config}
        (directory / "tokenizer_config.json").write_text(json.dumps(record))


def continued(backend: Any, prompt: Sequence[int], ids: Sequence[int], *, skip: bool = True) -> str:
    """Return the text that an output adds to its prompt, by the definition: from decoding all of both.

    Args:
        backend: a transformers tokenizer.
    """
    parts = ([*prompt, *ids], [*prompt], [*ids])
    whole, before, alone = (backend.decode(part, skip_special_tokens=skip) for part in parts)
    same = len(os.path.commonprefix((whole, before)))
    spoiled = same < len(before) and whole[same : same + 1] == "\ufffd" != before[same]
    return alone if spoiled else whole[same:]
