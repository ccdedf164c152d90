"""Number of examples that a property test tries: a third of the full number, unless pytest gets --full."""

full = False


def examples(number: int) -> int:
    return number if full else max(5, number // 3)
