"""A check of every line of an input file, before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.errors import InputError, RowError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.input_file import is_regular, open_input, parsed_lines
from sarathi_pp.inputs.input_format import InputFormat
from sarathi_pp.inputs.line_keys import SAMPLING_KEYS
from sarathi_pp.inputs.parse import ParsedLine
from sarathi_pp.inputs.row import shorten

# Number of problems that are shown.
_SHOWN_PROBLEMS = 5
# Codes of problems whose messages quote values of the line.
_QUOTING = ("invalid_parameter", "unknown_parameter", "unsupported_parameter")
# Keys of lines with a grammar, as JSON usually writes them.
_GRAMMAR_KEYS = tuple(f'"{key}"'.encode() for key, meant in SAMPLING_KEYS.items() if meant == "structured_outputs")
_LONGEST_KEY = max(map(len, _GRAMMAR_KEYS))
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class InputScan:
    """The problems that were found in the lines of an input file.

    Attributes:
        num_rows: number of input lines.
        num_problems: number of lines with a problem.
        problems: the first few problems, as text for people.
    """

    num_rows: int
    num_problems: int
    problems: tuple[str, ...]


def scan_input(
    path: str, defaults: GenerationDefaults, *, asked: InputFormat = "auto", has_text: bool = True
) -> InputScan:
    """Check every line without tokenising it: UTF-8, JSON, keys, sampling values, and ids that occur twice.

    Problems that need the model (lengths, token ids) are found when the line is run.

    Args:
        path: the input file.
        defaults: sampling values that a line does not set. Together with the line's own values they must be legal.
        asked: the format that the user named with --input-format.
        has_text: True if the model has a tokenizer. Otherwise only lines with token ids can run.

    Raises:
        InputError: the file cannot be read, or is neither JSON Lines nor text.
    """
    num_rows, num_problems = 0, 0
    problems: list[str] = []
    with open_input(path) as stream:
        try:
            for parsed in parsed_lines(path, stream, asked):
                num_rows += 1
                error = _find_error(parsed, defaults, has_text=has_text)
                if error is not None:
                    num_problems += 1
                    if len(problems) < _SHOWN_PROBLEMS:
                        problems.append(f"line {parsed.line}: {parsed.summary or _without_values(error)}")
        except OSError as error:
            raise InputError(f"--input {path} cannot be read further: {error}") from error
    return InputScan(num_rows, num_problems, tuple(problems))


def names_grammars(path: str) -> bool | None:
    """Return whether an input file seems to have a key with a grammar; None for a stream, which is not read.

    Such a key inside a prompt, or none of the rows left to run, does no harm: a vocabulary is read and not used.
    """
    if not is_regular(path):
        return None
    kept = b""
    with open_input(path) as stream:
        while block := stream.read(_BLOCK):
            if any(key in kept + block for key in _GRAMMAR_KEYS):
                return True
            kept = block[-_LONGEST_KEY:]
    return False


def _find_error(parsed: ParsedLine, defaults: GenerationDefaults, *, has_text: bool) -> RowError | None:
    """Return the error of a line, or None if it has none that can be found without tokenising it."""
    if parsed.error is not None:
        return parsed.error
    if not has_text and parsed.prompt_token_ids is None:
        return RowError("no_tokenizer", "text needs the model's tokenizer files, which are missing")
    if parsed.overrides or defaults.unsupported:  # the defaults alone were checked before
        try:
            defaults.params(parsed.overrides, parsed.switched_off)
        except RowError as error:
            return error
    return None


def _without_values(problem: RowError) -> str:
    """Return the text of a problem for a log, which must hold no prompt.

    It is only the problem's code if the message would quote the line. The output line has the full message.
    """
    if problem.code in _QUOTING:
        return problem.code
    return shorten(problem.message)
