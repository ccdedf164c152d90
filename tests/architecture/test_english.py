"""The texts of the repository stay plain: no construction that is hard to read, and short sentences in the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.english import Text, texts

ROOT = Path(__file__).parents[2]
FOLDERS = ("sarathi_pp", "kernels", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "examples", "tests")
MOST_WORDS_PER_SENTENCE = 15


@pytest.fixture(scope="module")
def found() -> list[Text]:
    return [text for folder in FOLDERS for text in texts(ROOT / folder)]


def test_no_construction_is_added_that_is_hard_to_read(found: list[Text]) -> None:
    assert not [hit for text in found for hit in text.hits()]


def test_no_docstring_is_added_that_begins_with_a_clause(found: list[Text]) -> None:
    assert not [f"{text.path}:{text.line}: {text.text[:60]}" for text in found if text.opens_badly]


def test_sentences_of_the_readme_are_short() -> None:
    (page,) = texts(ROOT / "README.md")
    assert page.num_words / page.num_sentences <= MOST_WORDS_PER_SENTENCE


@pytest.mark.parametrize("text", ["It goes on with\nnobody beside it.", "So many tokens a second, where there is none"])
def test_hard_constructions_are_found(text: str) -> None:
    assert len(Text(Path("page.md"), 1, text).hits()) >= 3


def test_a_hit_names_its_line() -> None:
    assert Text(Path("page.md"), 7, "One.\nTwo anew.").hits() == ["page.md:8: anew"]
