"""The tokenizer of one model, from text to token ids and back, with the additions that a batch run needs.

A prompt gets the special tokens that the tokenizer puts around text. A chat template writes its own special tokens, so
its text is encoded without any. So there is never a second beginning-of-sequence token.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.errors import InputError, RowError
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.chat_options import ChatOptions
from sarathi_pp.text.chat_template import Renderer
from sarathi_pp.text.output_text import OutputText, StopChecker, cut_at_stop, decodes_locally, find_context
from sarathi_pp.text.response import Message, ResponseReader, find_response_template
from sarathi_pp.text.token_bytes import is_byte_level, token_bytes
from sarathi_pp.text.tokenizer_backend import load_backend

# Characters of a piece of a text. Encoding takes up to some hundred bytes of memory per character. So the tokens of a
# longer text are first counted piece by piece.
_PIECE_CHARS = 2**18
# A cut between two pieces may add tokens. It adds fewer than this, even within a very long word.
_TOKENS_A_CUT = 256
# A text of up to this length is never refused by its number of characters alone, since a tokenizer may turn much white
# space into few tokens.
_MAX_FOLDED_CHARS = 2**20
# Bad words whose tokens are kept for the next request.
_MOST_BAD_WORDS = 4096
# A directory with none of these files has no tokenizer, whatever its config.json promises.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)

# Other files that decide how text becomes token ids and back.
_BESIDE_TOKENIZER = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")

_NO_OPTIONS = ChatOptions()
_PARAGRAPH_BREAK = re.compile(r"(?:\r?\n){2,}")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of a text.

    Attributes:
        paragraph_ends: for each paragraph, the number of tokens up to its end. Empty unless it was requested and the
            tokenizer knows the positions of tokens in the text.
    """

    token_ids: tuple[int, ...]
    paragraph_ends: tuple[int, ...] = ()


def tokenizer_digest(model_dir: Path) -> str:
    """Return a hex digest that is equal for equal tokenizer files and chat template.

    Raises:
        InputError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted((*_TOKENIZER_FILES, *_BESIDE_TOKENIZER)):
        path = model_dir / name
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        if content is not None:
            digest.update(b"%d %d\n" % (len(name), len(content)) + name.encode() + content)
    return digest.hexdigest()


def has_tokenizer(model_dir: Path) -> bool:
    """Return whether a model's directory has tokenizer files."""
    return any((model_dir / name).exists() for name in _TOKENIZER_FILES)


class Tokenizer:
    """The tokenizer of the model in a local directory, checked against the model's embedding.

    Without tokenizer files, this class still checks `prompt_token_ids` and finishes requests, with null for their text.
    Encoding and decoding may run in different threads at the same time.
    """

    def __init__(self, backend: Any | None, *, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        """Check a tokenizer against the model's embedding. Raise InputError if they belong to different models.

        Args:
            backend: a transformers tokenizer; None without tokenizer files.
            vocab_size: rows of the embedding. Legal ids are [0, vocab_size).
            eos_token_ids: ids that end an output.
        """
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._special_ids: frozenset[int] = frozenset()
        self._num_known = 0
        self._bad_words: dict[str, list[tuple[int, ...]]] = {}
        self._adds_bos = self._decodes_locally = self._byte_level = False
        self._renderer = Renderer()
        template = find_response_template(backend)
        self._responses = None if template is None else ResponseReader(template)
        if backend is not None:
            if backend.vocab_size > vocab_size:
                raise InputError(
                    f"the tokenizer has {backend.vocab_size} tokens and the model's embedding {vocab_size} rows: "
                    f"they belong to different models; give the tokenizer files of this model"
                )
            added = backend.added_tokens_decoder.items()
            self._special_ids = frozenset(backend.all_special_ids) | {number for number, one in added if one.special}
            self._num_known = len(backend)
            self._decodes_locally = decodes_locally(backend)
            self._byte_level = is_byte_level(backend)
            # The first call clears a truncation that tokenizer.json may ask for. Later calls change nothing. So they
            # are safe while another thread decodes.
            special, plain = (self._encode("a", special=with_them).token_ids for with_them in (True, False))
            self._adds_bos = special[:1] == (backend.bos_token_id,) != plain[:1]

    @classmethod
    def load(cls, model_dir: Path, *, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Return the tokenizer of a model directory.

        Raises:
            InputError: the files cannot be loaded as a tokenizer, or belong to another model.
            UnsafeError: the tokenizer is Python code that the model directory names.
        """
        if not has_tokenizer(model_dir):
            return cls(None, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        return cls(load_backend(model_dir), vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    @property
    def backend(self) -> Any | None:
        """The tokenizer of transformers; None without tokenizer files."""
        return self._backend

    @property
    def spells_bytes(self) -> bool:
        """Return whether each token stands for known bytes, and every text has tokens. A grammar needs both."""
        fallback = "<0x0A>" in self._ids
        return bool(getattr(self._backend, "is_fast", False)) and (self._byte_level or fallback)

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        """The id of each token by its text. The library takes up to 0.2 s to return it, and does so for each call."""
        return {} if self._backend is None else self._backend.get_vocab()

    @property
    def has_text(self) -> bool:
        """Return whether there are tokenizer files, so that text can be read and written."""
        return self._backend is not None

    @property
    def reads_responses(self) -> bool:
        """Return whether `read_response` can read outputs, because the tokenizer has a usable response template."""
        return self._responses is not None and self._responses.fault is None

    @property
    def unknown_id(self) -> int | None:
        """Return the id of the token for text that has no other token; None if the tokenizer has no such token.

        Tokenizers with tokens for any text often name another special token, so that the setting has a value.
        """
        if (backend := self._backend) is None:
            return None
        unknown_id: int | None = backend.unk_token_id
        return None if unknown_id in (backend.bos_token_id, backend.eos_token_id, backend.pad_token_id) else unknown_id

    def end_token_doubt(self, source: str) -> str | None:
        """Return a warning if the tokenizer's end token does not end an output; None if it does, or is not known.

        Args:
            source: the file that names the tokens that end an output.
        """
        end_id = self._backend.eos_token_id if self._backend is not None else None
        if end_id is None or not self._eos_token_ids or end_id in self._eos_token_ids:
            return None
        ends = ", ".join(
            f"{self.written(one)!r} ({one})" if one < self._num_known else str(one)
            for one in sorted(self._eos_token_ids)
        )
        return (
            f"the tokenizer's end token {self.written(end_id)!r} ({end_id}) does not end outputs: eos_token_id is "
            f"{ends}. If outputs are too long, correct it in {source}"
        )

    def encode_prompt(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        paragraphs: bool = False,
        most_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Return the token ids of a text prompt, with the special tokens that the tokenizer puts around text.

        BOS is the beginning-of-sequence token. A text that begins with it, such as that of a chat template, gets no
        second one. An empty text becomes the BOS token alone.

        Args:
            add_special_tokens: False adds no special tokens.
            paragraphs: True to find the ends of paragraphs.
            most_tokens: most tokens that the run can take; None for no limit. A much longer text is refused before it
                is encoded. The result may still have more tokens than this, so the caller must check it.

        Raises:
            RowError: `no_tokenizer`, `empty_prompt` (nothing to continue and no BOS), `invalid_token_id`,
                `invalid_parameter` (text that is not Unicode), `context_length_exceeded`.
        """
        backend = self._require("a text prompt")
        self._refuse_longer(text, most_tokens)
        encoded = self._encode(text, special=add_special_tokens, paragraphs=paragraphs)
        bos = backend.bos_token_id
        if add_special_tokens and self._adds_bos and encoded.token_ids[:2] == (bos, bos):
            encoded = EncodedPrompt(encoded.token_ids[1:], tuple(end - 1 for end in encoded.paragraph_ends))
        if add_special_tokens and not encoded.token_ids and bos is not None:
            encoded = EncodedPrompt((bos,))
        if not encoded.token_ids:
            why = "the model has no BOS token to start from" if add_special_tokens else "add_special_tokens is false"
            raise RowError("empty_prompt", f"the prompt has no tokens and {why}")
        self.check_token_ids(encoded.token_ids)
        return encoded

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        options: ChatOptions = _NO_OPTIONS,
        *,
        paragraphs: bool = False,
        most_tokens: int | None = None,
    ) -> EncodedPrompt:
        """Return the token ids of a conversation, which the model's chat template turns into one text.

        The other arguments are those of `encode_prompt`.

        Raises:
            RowError: `no_tokenizer`, `no_chat_template`, `chat_template_error` (the template refused or failed, or took
                more than `Renderer` allows), `unsupported_parameter` (the template has no use for an option, or calls
                of tools cannot be read), `empty_prompt`, `invalid_token_id`, `invalid_parameter`,
                `context_length_exceeded`.
        """
        backend = self._require("messages")
        if not backend.chat_template:
            raise RowError("no_chat_template", "the model has no chat template; give a prompt instead of messages")
        if options.tools and not self.reads_responses:
            raise RowError("unsupported_parameter", self._why_no_tools())
        try:
            template = backend.get_chat_template(tools=options.tools or None)
        except ValueError as error:
            raise RowError("chat_template_error", f"the model's chat templates cannot be used: {error}") from error
        if options.tools or options.variables:
            options.check_names(self._renderer.variables(template))
        text = self._renderer.render(template, messages, backend.special_tokens_map, options)
        self._refuse_longer(text, most_tokens)
        encoded = self._encode(text, special=False, paragraphs=paragraphs)
        if not encoded.token_ids:
            raise RowError("empty_prompt", "the chat template wrote nothing for these messages")
        self.check_token_ids(encoded.token_ids)
        return encoded

    def _why_no_tools(self) -> str:
        need = "tools need a response_template in the model's tokenizer_config.json, the description of its calls"
        if self._responses is None:
            return f"{need}; it has none. Add one, or remove tools"
        return f"{need}; it cannot be used: {self._responses.fault}. Correct it, or remove tools"

    def check_token_ids(self, token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the ids as a tuple. Raise RowError (`invalid_token_id`) if one has no row in the model's embedding."""
        ids = tuple(token_ids)
        # min and max run at C speed. The position is only searched if there is a wrong id.
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            position, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < self._vocab_size)
            raise RowError(
                "invalid_token_id",
                f"token {position} of the prompt is {wrong}; the model's ids are 0 to {self._vocab_size - 1}",
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Bytes that make no character become U+FFFD."""
        text: str = self._require("text").decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def visible(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Return whether `decode` can show this token.

        It cannot show a special token that is skipped, or an id that has a row in the embedding but no token.
        """
        return token_id < self._num_known and not (skip_special_tokens and token_id in self._special_ids)

    def written(self, token_id: int) -> str:
        """Return the token as it is written in the vocabulary, such as `##ing` in a WordPiece vocabulary."""
        written: str = self._require("text").convert_ids_to_tokens(token_id)
        return written

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for. Without tokenizer files, `token_id:` and the id, as in vLLM."""
        if self._backend is None or token_id >= self._num_known:
            return f"token_id:{token_id}".encode()
        special = token_id in self._special_ids
        return token_bytes(self.written(token_id), byte_level=self._byte_level, is_special=special)

    def encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the token ids of a word that must not be in an output; empty if it has none. It keeps some results.

        As in vLLM, the second item is the word after a space, if that has as many tokens and begins with another one.

        Raises:
            RowError: `no_tokenizer`.
        """
        if word not in self._bad_words:
            if len(self._bad_words) >= _MOST_BAD_WORDS:
                self._bad_words.clear()
            self._bad_words[word] = self._encode_bad_word(word.lstrip())
        return self._bad_words[word]

    def _encode_bad_word(self, word: str) -> list[tuple[int, ...]]:
        alone, spaced = (self._encode(text, special=False).token_ids for text in (word, f" {word}"))
        if not alone:
            return []
        return [alone, spaced] if len(spaced) == len(alone) and spaced[0] != alone[0] else [alone]

    def context(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Return the last tokens of a prompt, which decide how the first tokens of its output decode.

        If their number is not known, return the whole prompt.
        """
        if not self._decodes_locally:
            return list(prompt_token_ids)
        return find_context(self, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def stop_checker(self, request: Request) -> StopChecker | None:
        """Return a checker for the request's stop strings in its output; None if it has no stop strings."""
        stop = request.sampling.stop
        if not stop:
            return None
        self._require("a stop string")
        return StopChecker(self._output_text(request), stop, self._stop_ids(stop), request.sampling.min_new_tokens)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that the vocabulary writes as this text; None if it has none."""
        return self._ids.get(text)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written exactly like this text; None if there is none."""
        if self._backend is None:
            return None
        token_id = self._backend.convert_tokens_to_ids(text)
        # For a text that the vocabulary does not have, this is the unknown token, which is special too.
        return token_id if token_id in self._special_ids and self.written(token_id) == text else None

    def finish(self, completion: Completion) -> str | None:
        """Return the text of a finished request's output, cut at the first stop string; None without tokenizer files.

        The token that ended the output is left out: a stop token, or the end-of-sequence token unless the request shows
        special tokens. With `include_stop_str_in_output`, the stop string or stop token stays.
        """
        if self._backend is None:
            return None
        sampling, ids = completion.request.sampling, list(completion.token_ids)
        keep, ended = sampling.include_stop_str_in_output, completion.finish_reason == "stop"
        if ids and ended and not keep and self._is_left_out(ids[-1], sampling):
            ids.pop()
        text = self._output_text(completion.request)
        return cut_at_stop(text, ids, sampling, self._stop_ids(sampling.stop)) if sampling.stop else text.of(ids)

    def read_response(self, completion: Completion, tools: Sequence[Mapping[str, object]]) -> Message | None:
        """Return the message that a finished request's output means; None if that cannot be read. See ResponseReader.

        The response template sees special tokens, and the end-of-sequence token too. The output ends as in `finish`.

        Args:
            tools: functions that the request offers. Without them, an output that calls one cannot be read.
        """
        if self._responses is None:
            return None
        sampling, ids = completion.request.sampling, list(completion.token_ids)
        ended, keep = completion.finish_reason == "stop", sampling.include_stop_str_in_output
        if ids and ended and not keep and ids[-1] in sampling.stop_token_ids:
            ids.pop()
        prompt_ids = completion.request.prompt_token_ids
        text = OutputText(self, prompt_ids, skip_special_tokens=False)
        output = cut_at_stop(text, ids, sampling, self._stop_ids(sampling.stop)) if sampling.stop else text.of(ids)
        message = self._responses.read(output, self.decode(prompt_ids, skip_special_tokens=False), tools)
        return None if message is None or (message.calls and not tools) else message

    def _is_left_out(self, last_id: int, sampling: SamplingParams) -> bool:
        """Return whether the last token of an output that has stopped is not part of its text."""
        return last_id in sampling.stop_token_ids or (sampling.skip_special_tokens and last_id in self._eos_token_ids)

    def _output_text(self, request: Request) -> OutputText:
        skip = request.sampling.skip_special_tokens
        return OutputText(self, request.prompt_token_ids, skip_special_tokens=skip)

    def _stop_ids(self, stop: Sequence[str]) -> frozenset[int]:
        return frozenset(token_id for token_id in map(self.special_id, stop) if token_id is not None)

    def _refuse_longer(self, text: str, most_tokens: int | None) -> None:
        """Refuse a text that certainly has more than `most_tokens` tokens, before it is encoded as a whole.

        Encoding a very long text would take much memory. First the number of characters is compared with the length of
        the longest token. Then the tokens of the pieces are counted.

        Raises:
            RowError: `context_length_exceeded`. It is never raised for a text that would fit.
        """
        if most_tokens is None or len(text) <= _PIECE_CHARS:
            return
        self._require("text")
        longest = max(map(len, self._ids), default=1)
        if len(text) <= max(_MAX_FOLDED_CHARS, most_tokens * longest):
            room = 2 * most_tokens
            for start in range(0, len(text), _PIECE_CHARS):
                room += _TOKENS_A_CUT - len(self._encode(text[start : start + _PIECE_CHARS], special=False).token_ids)
                if room < 0:
                    break
            else:
                return
        raise RowError(
            "context_length_exceeded",
            f"the text has {len(text)} characters; they do not fit into {most_tokens} tokens; shorten the text",
        )

    def _encode(self, text: str, *, special: bool, paragraphs: bool = False) -> EncodedPrompt:
        backend = self._require("text")
        # Only tokenizers of the Rust library know the place of a token in the text.
        located = {"return_offsets_mapping": True} if paragraphs and backend.is_fast else {}
        try:
            found = backend(text, add_special_tokens=special, verbose=False, **located)
        except (TypeError, UnicodeEncodeError) as error:
            # The library raises these for lone surrogates, which JSON can write ("\ud800") and UTF-8 cannot.
            raise RowError("invalid_parameter", "the prompt holds half a surrogate pair; remove it") from error
        ends = _paragraph_ends(text, found["offset_mapping"]) if located else ()
        return EncodedPrompt(tuple(found["input_ids"]), ends)

    def _require(self, what: str) -> Any:
        if self._backend is None:
            raise RowError(
                "no_tokenizer", f"the model has no tokenizer files, so {what} cannot be used; give prompt_token_ids"
            )
        return self._backend


def _paragraph_ends(text: str, offsets: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return, for each paragraph that a blank line ends, the number of tokens up to its end, in ascending order.

    If a token reaches from the blank line into the next paragraph, it counts as the end of the paragraph before. If the
    tokenizer drops blank lines, a paragraph ends before the first token of the next one.

    Args:
        offsets: first and end character of each token in the text; (0, 0) for special tokens.
    """
    breaks = deque(found.end() for found in _PARAGRAPH_BREAK.finditer(text))
    ends: list[int] = []
    for number, (first, end) in enumerate(offsets):
        while breaks and end >= breaks[0]:
            position = number if first >= breaks[0] and end > breaks[0] else number + 1
            if position > (ends[-1] if ends else 0):
                ends.append(position)
            breaks.popleft()
    return tuple(ends)
