"""The table of supported models in README.md, made from FAMILIES. To write it anew:

python -m tests.architecture.supported_models
"""

from __future__ import annotations

from pathlib import Path

from sarathi_pp.model.families import FAMILIES

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- supported models: begin -->", "<!-- supported models: end -->"


def table() -> str:
    lines = ["| `model_type` | architecture | in tensor shards |", "|---|---|---|"]
    for family in FAMILIES.values():
        lines.append(f"| {family.model_type} | {family.architecture} | {'yes' if family.widths is not None else '-'} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """README.md with the table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
