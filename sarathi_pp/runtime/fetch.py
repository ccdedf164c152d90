"""From what --model says to a local directory."""

from __future__ import annotations

from pathlib import Path

from sarathi_pp.errors import MissingError

# Weights in one format only, and never code.
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


def find_model(name: str) -> Path:
    """The directory itself, or the Hub repository's files in the local cache, downloaded where they are not.

    Raises MissingError with one line that says what to do.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise MissingError(f"--model {name}: there is no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # no network, no such repository, no permission: one answer
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MissingError(
            f"--model {name} is no directory here and could not be fetched from the Hub ({reason}); give a directory, "
            f"or check the name, the network and `hf auth login`"
        ) from error
