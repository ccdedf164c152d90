"""Number of examples that a property test tries: a part of the full number, unless pytest gets --full."""

full = False


def examples(number: int, part: int = 3) -> int:
    """Return the number of examples: `number` with --full, otherwise one of `part` examples, and at least five."""
    return number if full else max(5, number // part)
