"""Constructions that are hard to read, counted in docstrings, comments and Markdown.

python -m tests.architecture.english [PATH...]

prints where they are. The list holds what this project's own texts once had. None of it is proof of good English.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A pattern, and what to write instead.
PATTERNS = {
    r"\bwhere there (?:is|are) (?:none|no|one|any)\b": "if there is ...",
    r"\b(?:is|are|was|were|be|been) told\b": "gets, is reported",
    r"\btold of\b": "gets",
    r"\btells? (?:of|what|how|whether|where|why|which)\b": "reports, shows",
    r"\bsays? (?:what|how|whether|where|why|which|so)\b": "lists, reports",
    r"\b(?:nobody|somebody|whoever)\b": "name the actor: the user, rank 0, another process",
    r"\bwho (?:has|is|reads|asks|wants)\b": "name the actor",
    r"\bheed(?:s|ed)?\b": "handle",
    r"\b(?:gone|goes|go|going) on with\b": "continue",
    r"\bbegun\b": "started",
    r"\bmade up\b": "simulated, synthetic",
    r"\bby (?:itself|themselves)\b": "alone, separately",
    r"\bbeside (?:it|them|each|the|a|its|one|that|what)\b": "next to, with, at the same time",
    r"\bbehind (?:it|them|that|the|each)\b": "after",
    r"\b(?:lie|lies|lay) (?:in|there|on|beside|behind|next)\b": "is, are stored",
    r"\bstands? (?:there|in|for what|at the|elsewhere|still|beside)\b": "is",
    r"\banew\b": "again",
    r"\bby hand\b": "manually",
    r"\bso (?:many|much|long|often)\b(?! as to)": "up to N, for N seconds",
    r"\bas (?:many|few) (?:as|of)\b": "the same number of, up to",
    r"\bone a (?:stage|rank|line|row|token|microbatch|layer|replica)\b": "one per",
    r"\ba (?:row|token|microbatch|stage|layer|replica|request|sequence) (?:more|less)\b": "one more",
    r"\b(?:seconds|bytes|tokens|rows|layers|ranks|pages|decodes|requests) "
    r"(?:of each|a second|a stage|a microbatch|a row|a layer|a rank|a request)\b": "per",
    r"\bof (?:which|those|them) that\b": "name the thing",
    r"\bof those\b": "of these, or name the thing",
    r"\bsuch as (?:is|are|have|has|do|does)\b": "if, when",
    r"\bin (?:its|their) place\b": "instead",
    r"\bin the place of\b": "instead of",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\bsoonest\b": "first, earliest",
    r"\bno (?:more|longer|fewer) than so\b": "at most",
}
_HIT = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS), re.IGNORECASE)
_OPENING = re.compile(r"(?:What|Of|Whether|Where|How)\b")
_CODE = re.compile(r"```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Text:
    """A docstring, a comment or a page."""

    path: Path
    line: int
    text: str
    is_docstring: bool = False

    def hits(self) -> list[str]:
        """Return each construction with its place."""
        return [
            f"{self.path}:{self.line + self.text.count(chr(10), 0, hit.start())}: {hit[0]}"
            for hit in _HIT.finditer(self.text)
        ]

    @property
    def opens_badly(self) -> bool:
        return self.is_docstring and _OPENING.match(self.text.strip()) is not None

    @property
    def num_words(self) -> int:
        return len(re.findall(r"[A-Za-z']+", self.text))

    @property
    def num_sentences(self) -> int:
        return max(1, len(re.findall(r"[.!?:](?:\s|$)", self.text)))


def texts(root: Path) -> Iterator[Text]:
    """Return the texts of a file, or of all Python and Markdown files of a folder."""
    paths = [root] if root.is_file() else sorted(root.rglob("*"))
    for path in paths:
        if path.suffix == ".md":
            # Code and links are replaced, and line breaks stay.
            page = _CODE.sub(lambda match: "x" + "\n" * match[0].count("\n"), path.read_text(encoding="utf-8"))
            yield Text(path, 1, page)
        elif path.suffix == ".py":
            yield from _texts_of_source(path)


def _texts_of_source(path: Path) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text(path, node.body[0].lineno, docstring, is_docstring=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string.lstrip("# "))


if __name__ == "__main__":
    for root in map(Path, sys.argv[1:] or ["."]):
        for text in texts(root):
            for hit in text.hits():
                print(hit)
