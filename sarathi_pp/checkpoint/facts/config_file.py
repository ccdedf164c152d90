"""The content of a model's config.json, with errors that name the file and the key. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sarathi_pp.checkpoint.facts.wrapper import text_values
from sarathi_pp.checkpoint.files import read_json, stored_names
from sarathi_pp.errors import InputError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of config.json, with errors that name the file.

    Attributes:
        values: the keys with their values.
        wrapper: model_type of the multimodal model, if `values` are those of its text part; None for a text model.
    """

    directory: Path
    values: dict[str, object]
    wrapper: str | None = None

    @classmethod
    def read(cls, directory: Path) -> ConfigFile:
        """Read the config.json of a model directory. Of a multimodal model, take the text part (wrapper.py).

        Raises:
            MissingError: the file does not exist.
            InputError: it cannot be read or is no JSON object.
            UnsafeError: it is a link out of the directory.
        """
        values = read_json(directory, "config.json")
        text = text_values(values, lambda: stored_names(directory))
        return cls(directory, values) if text is None else cls(directory, text, str(values["model_type"]))

    def size(self, key: str) -> int:
        """Return the value of a key that must be an integer of at least 1. Raise InputError if it is not."""
        value = self.optional_size(key, None)
        if value is None:
            what = "null" if key in self.values else "missing"
            raise InputError(f"{self.path}: {key} is {what}; expected an integer of at least 1")
        return value

    def optional_size(self, key: str, default: int | None) -> int | None:
        """Return an integer of at least 1; None for null; the default for an absent key. Otherwise raise InputError."""
        value = self.values.get(key, default)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{self.path}: {key} is {value!r:.100}; expected an integer of at least 1")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; the default for an absent key. Raise InputError for any other value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.path}: {key} is {value!r:.100}; expected true or false")
        return value

    @property
    def path(self) -> Path:
        return self.directory / "config.json"

    def refuse(self, what: str) -> UnsupportedModelError:
        """Return an error about something that is not supported."""
        return UnsupportedModelError(f"{self.path}: {what}")
