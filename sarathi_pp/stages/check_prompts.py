"""The prompts with which a model is checked: those of the user's file, or random ones."""

from __future__ import annotations

from pathlib import Path

import torch

from sarathi_pp.errors import InputError, MissingError, RowError
from sarathi_pp.model.checkpoint.support import ModelFacts, check_model
from sarathi_pp.text.tokenizer import Tokenizer

# Tokens of the random prompts.
_LENGTHS = (1, 7, 64, 200)


def read_prompts(directory: Path, file: Path) -> list[list[int]]:
    """Return the token ids of the prompts in a file, one per line. Blank lines are skipped.

    Args:
        directory: directory of the model, whose tokenizer is used.

    Raises:
        MissingError: the file does not exist.
        InputError: the file cannot be read, or is not UTF-8, or has no prompt. Or a prompt is too long for the model,
            or the model has no tokenizer.
    """
    facts = check_model(directory)
    tokenizer = Tokenizer.load(directory, vocab_size=facts.vocab_size)
    prompts = []
    for number, line in enumerate(_read(file).split(b"\n"), 1):
        where = f"--prompts {file}, line {number}"
        try:
            text = line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: byte {error.start} of the line is not UTF-8; convert the file to UTF-8"
            ) from error
        if text.strip():
            prompts.append(_encode(tokenizer, facts, where, text))
    if not prompts:
        raise InputError(f"--prompts {file} has no lines; give a text file with a prompt on each line")
    return prompts


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise MissingError(f"--prompts {file} does not exist; give a text file with a prompt on each line") from error
    except IsADirectoryError as error:
        raise InputError(f"--prompts {file} is a directory; give a text file with a prompt on each line") from error
    except (OSError, ValueError) as error:  # a ValueError says that the name holds a null character
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(
            f"--prompts {file} cannot be read: {why.lower()}; give a text file that this user may read"
        ) from error


def _encode(tokenizer: Tokenizer, facts: ModelFacts, where: str, text: str) -> list[int]:
    longest = facts.max_position_embeddings
    try:
        found = list(tokenizer.encode_prompt(text, most_tokens=longest).token_ids)
    except RowError as error:
        raise InputError(f"{where}: {error}") from error
    if len(found) > longest:
        raise InputError(
            f"{where}: the prompt has {len(found)} tokens, and the model has {longest} positions; shorten the prompt"
        )
    return found


def random_prompts(directory: Path) -> list[list[int]]:
    """Return the token ids of random prompts, which are the same in each call."""
    facts = check_model(directory)
    generator = torch.Generator().manual_seed(0)
    longest = min(_LENGTHS[-1], facts.max_position_embeddings)
    lengths = [length for length in _LENGTHS if length <= longest] or [longest]
    return [torch.randint(0, facts.vocab_size, (length,), generator=generator).tolist() for length in lengths]
