"""The prompts with which a model is checked: those of the user's file, or random ones.

A model may compute longer prompts in another way than shorter ones. Only a prompt that is longer than such a *boundary*
tests it. So there is a random prompt for it, if this prompt is not too expensive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sarathi_pp.checkpoint.facts.pretrained import load_config
from sarathi_pp.checkpoint.facts.support import ModelFacts, check_model
from sarathi_pp.core.partition import partition
from sarathi_pp.errors import CapacityError, InputError, MissingError, RowError
from sarathi_pp.model.loader import layer_windows
from sarathi_pp.stages.check_memory import CheckMemory
from sarathi_pp.text.tokenizer import Tokenizer

# Tokens of the random prompts.
_LENGTHS = (1, 7, 64, 200)
# Tokens of a random prompt beyond a boundary. The last ones are decodes.
_BEYOND = 64
# Most floating-point operations of transformers for a prompt beyond a boundary. Two cores take some minutes for it.
_MOST_FLOP = 3e13


@dataclass(frozen=True, slots=True)
class Boundary:
    """A number of tokens beyond which a model computes in another way.

    Attributes:
        kind: "sliding_window": some layers do not see the first tokens any more. "short_factors": rotary embeddings use
            the long factors for the whole prompt (longrope).
        num_tokens: most tokens of a prompt that is computed in the first way.
    """

    kind: Literal["sliding_window", "short_factors"]
    num_tokens: int


def find_boundaries(directory: Path, facts: ModelFacts) -> list[Boundary]:
    """Return the boundaries that a prompt of the model can be longer than, shortest first."""
    family, config = load_config(directory)
    found = {Boundary("sliding_window", window) for window in layer_windows(config, family) if window is not None}
    if facts.longrope_after is not None:
        found.add(Boundary("short_factors", facts.longrope_after))
    possible = [boundary for boundary in found if boundary.num_tokens < facts.max_position_embeddings]
    return sorted(possible, key=lambda boundary: boundary.num_tokens)


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


def random_prompts(directory: Path, num_stages: int) -> list[list[int]]:
    """Return the token ids of random prompts, which are the same in each call on one machine.

    One of them is longer than the boundaries of the model, if memory and time permit.

    Raises:
        PartitionError: the model has fewer layers than stages.
    """
    facts = check_model(directory)
    stages = partition(facts.num_layers, num_stages)
    longest = min(_LENGTHS[-1], facts.max_position_embeddings)
    lengths = [length for length in _LENGTHS if length <= longest] or [longest]
    beyond = [
        min(boundary.num_tokens + _BEYOND, facts.max_position_embeddings)
        for boundary in find_boundaries(directory, facts)
        if boundary.num_tokens >= longest
    ]
    if beyond:
        memory = CheckMemory.of(directory, facts, stages)
        lengths += [length for length in beyond if _affords(memory, lengths, length)][-1:]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, facts.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _affords(memory: CheckMemory, lengths: Sequence[int], length: int) -> bool:
    """Return whether another prompt takes little time, and does not change how the model is cut into parts."""
    facts = memory.facts
    linear = 2 * memory.num_weights * length
    attention = 4 * length**2 * facts.num_heads * facts.head_dim * facts.num_layers
    if linear + attention > _MOST_FLOP:
        return False
    try:
        return memory.parts(lengths) == memory.parts([*lengths, length])
    except CapacityError:
        return False
