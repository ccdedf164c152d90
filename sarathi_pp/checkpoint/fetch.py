"""The local directory of the model that --model names, fetched from the Hub if needed.

From a Hub repository, config.json comes first. So a model that cannot run is refused before its weights are fetched.
Then come the small files and the index. The last are the weights that a run reads, in one format and from one commit.
"""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from sarathi_pp.checkpoint.facts.support import check_config
from sarathi_pp.checkpoint.files import indexed_files, reading
from sarathi_pp.checkpoint.kind import ADAPTER_FILE, INDEX_FILE, SINGLE_FILE, check_kind, refuse_path
from sarathi_pp.errors import MissingError, SarathiError, StoppedError

_ANSWER_S = 10.0
# Endings of files that are neither weights nor code. Any of them may hold settings of the tokenizer.
_SMALL = (".json", ".model", ".txt", ".jinja")
_FIRST = ("config.json", ADAPTER_FILE)


def find_model(name: str) -> Path:
    """Return the model's directory, or the local cache's copy of a Hub repository. A missing copy is fetched.

    Args:
        name: a directory, or the id of a Hub repository.

    Raises:
        MissingError: no such directory or repository exists, or the Hub does not give access.
        InputError: the directory cannot be read, or is a file.
        UnsupportedModelError: it is another kind of model. From a repository, only config.json is fetched then.
    """
    if _is_directory(name):
        return Path(name)
    with _hub_session(name):
        return _fetch(name)


def find_config(name: str) -> Path:
    """Return a directory with the model's config.json. From a Hub repository, nothing else is fetched.

    If the local cache has a copy, the Hub is not asked.

    Args:
        name: a directory, a file named config.json, or the id of a Hub repository.

    Raises:
        MissingError: no such directory or repository exists, or the Hub does not give access.
        InputError: the directory cannot be read, or the file is not a config.json.
        UnsupportedModelError: the file holds weights of a kind that is not supported.
    """
    path = Path(name)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if _is_directory(name):
        return path
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with _hub_session(name):
        cached = try_to_load_from_cache(name, "config.json")
        return Path(cached if isinstance(cached, str) else hf_hub_download(name, "config.json")).parent


def _is_directory(name: str) -> bool:
    """Return whether a name is a local directory. Raise if it is a file, or cannot be a repository's id."""
    path = Path(name)
    with reading(path):
        if path.is_dir():
            return True
        if path.exists():
            raise refuse_path(name, path.suffix)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise MissingError(f"--model {name}: no such directory; give a directory, or a Hub repository as OWNER/NAME")
    return False


@contextmanager
def _hub_session(name: str) -> Iterator[None]:
    """Limit the time of the Hub's answers, and raise its errors as MissingError."""
    from huggingface_hub import get_session

    session = get_session()
    before, session.timeout = session.timeout, _ANSWER_S  # the client's default is to wait for ever
    try:
        yield
    except SarathiError:
        raise
    except Exception as error:  # no network, no such repository, no permission: one message for all
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        raise MissingError(
            f"--model {name} is not a local directory and could not be fetched from the Hub ({reason}); give a "
            f"directory, or check the name, the network and `hf auth login`"
        ) from error
    finally:
        session.timeout = before


def _fetch(name: str) -> Path:
    """Fetch a repository's main branch and return its directory in the cache. Raise the errors of the Hub's client."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info = HfApi().model_info(name, timeout=_ANSWER_S)
    except StoppedError:
        raise
    except Exception as error:  # offline, no answer, or no permission: an earlier copy is enough
        try:
            return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent
        except StoppedError:
            raise
        except Exception:
            raise error from None
    names = _names(info)
    if "config.json" not in names:
        check_kind(name, names)  # raises, since config.json is missing
    # Fetched by the branch's name, so that the cache records its commit. All others are fetched by this commit.
    snapshot = Path(hf_hub_download(name, "config.json")).parent
    commit = snapshot.name
    if commit != info.sha:  # the branch has moved meanwhile
        names = _names(HfApi().model_info(name, revision=commit, timeout=_ANSWER_S))
    if ADAPTER_FILE in names:
        _download(name, commit, [ADAPTER_FILE])
    check_config(snapshot, names)
    _download(name, commit, [file for file in names if _is_small(file)])
    if SINGLE_FILE in names:
        _download(name, commit, [SINGLE_FILE])
    else:
        _download(name, commit, indexed_files(snapshot))
    return snapshot


def _names(info: object) -> list[str]:
    """Return the names of a repository's files."""
    return [sibling.rfilename for sibling in getattr(info, "siblings", None) or ()]


def _is_small(name: str) -> bool:
    """Return whether a file is one of settings or of the tokenizer at the root, or an additional chat template."""
    folder, _, file = name.rpartition("/")
    if folder:
        return folder == "additional_chat_templates" and file.endswith(".jinja")
    return file.endswith(_SMALL) and (file == INDEX_FILE or not file.endswith(".index.json")) and file not in _FIRST


def _download(name: str, commit: str, files: Collection[str]) -> None:
    """Fetch these files, several at a time. Files that are in the cache are not fetched again."""
    from huggingface_hub import snapshot_download

    if files:
        snapshot_download(name, revision=commit, allow_patterns=[glob.escape(file) for file in files])
