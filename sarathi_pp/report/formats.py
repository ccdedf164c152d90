"""Figures as text for people. A figure that does not exist is a dash, and no figure is "-0"."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """Return seconds in at most seven characters for times up to eleven days, so that ten columns fit."""
    if value is None:
        return "-"
    return unsigned_zero(f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}")


def milliseconds_kept(value: float | None) -> str:
    """Return seconds with three decimals, so that milliseconds can be read."""
    return "-" if value is None else unsigned_zero(f"{value:.3f}")


def microseconds(value_s: float | None) -> str:
    return "-" if value_s is None else unsigned_zero(f"{value_s * 1e6:,.0f}")


def share(value: float | None, decimals: int = 1) -> str:
    return "-" if value is None else unsigned_zero(f"{value:.{decimals}%}")


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def gib(value_bytes: float | None) -> str:
    if value_bytes is None:
        return "-"
    value = value_bytes / 2**30
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def unsigned_zero(text: str) -> str:
    """Return the text without its sign if all its digits are 0."""
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")
