"""From what --model says to a local directory."""

from __future__ import annotations

from pathlib import Path

from sarathi_pp.errors import MissingError
from sarathi_pp.model.checkpoint import reading

_ANSWER_S = 10.0
# Weights in one format only, and never code.
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


def find_model(name: str) -> Path:
    """The directory itself, or the Hub repository's files in the local cache, downloaded where they are not.

    Raises MissingError with one line that says what to do, InputError where nobody may look.
    """
    path = Path(name)
    with reading(path):
        if path.is_dir():
            return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise MissingError(f"--model {name}: there is no such directory")
    from huggingface_hub import get_session, snapshot_download

    session = get_session()
    before, session.timeout = session.timeout, _ANSWER_S  # by itself it waits for ever
    silence = _silence(name)
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=silence is not None))
    except Exception as error:  # no network, no such repository, no permission: one answer
        cause = silence or error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise MissingError(
            f"--model {name} is no directory here and could not be fetched from the Hub ({reason}); give a directory, "
            f"or check the name, the network and `hf auth login`"
        ) from error
    finally:
        session.timeout = before


def _silence(name: str) -> Exception | None:
    """Why the Hub does not answer in time, None where it does; the download asks this without a limit of its own."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, timeout=_ANSWER_S)
    except (HfHubHTTPError, OfflineModeIsEnabled):
        return None  # the download says what is wrong better, or finds what is needed in the cache
    except Exception as error:
        return error
    return None
