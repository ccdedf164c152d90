"""The drawing of tokens from logits, by the sampling parameters and the rules of each row's request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from sarathi_pp.core.draw_rules import Failure
from sarathi_pp.core.plan import SamplingRow, TokenLogprobs
from sarathi_pp.drawing.edits import allowed_bits, changed_scores, edited_scores, has_a_token
from sarathi_pp.drawing.history import Edit
from sarathi_pp.drawing.likeliest import NOT_FINITE, NOTHING_ALLOWED, has_pass, likeliest
from sarathi_pp.drawing.logprobs import token_logprobs
from sarathi_pp.drawing.sampling import draw_within, sample

# Rules by place in the rows that are drawn. Rows without rules have none.
Edits = Mapping[int, Edit]

_HOTTEST = 1e30


class Drawn(NamedTuple):
    """The token of one row, or the reason why there is none. Then the id has no meaning."""

    token_id: int
    failure: Failure = Failure.NONE
    logprobs: TokenLogprobs | None = None

    @classmethod
    def of(cls, token_id: int, is_bad: bool) -> Drawn:
        return cls(max(token_id, 0), Failure.NOT_FINITE if is_bad else Failure.NONE)


def draw(logits: Tensor, rows: Sequence[SamplingRow], edits: Edits) -> list[Drawn]:
    """Draw one token per row of the (n, vocab) logits.

    Rows without rules get the tokens that they would get alone.
    """
    if not edits:
        return [Drawn.of(token, is_bad) for token, is_bad in zip(*sample(logits, rows), strict=True)]
    changed = [index for index, edit in edits.items() if edit.rules.edits]
    plain = sorted(set(range(len(rows))) - set(changed))
    drawn = [Drawn(0)] * len(rows)
    if plain:
        token_ids, are_bad = sample(_rows(logits, plain), [rows[index] for index in plain])
        for index, token, is_bad in zip(plain, token_ids, are_bad, strict=True):
            drawn[index] = Drawn.of(token, is_bad)
    if has_pass(logits.device):
        greedy = [index for index in changed if rows[index].temperature == 0]
        for index, one in _draw_greedy(logits, {index: edits[index] for index in greedy}):
            drawn[index] = one
        changed = [index for index in changed if rows[index].temperature]
    if changed:
        # At a higher temperature, a banned token would have a probability again. Others have equal ones long before.
        cooled = [rows[index]._replace(temperature=min(rows[index].temperature, _HOTTEST)) for index in changed]
        found = _draw_changed(logits, cooled, {index: edits[index] for index in changed})
        for index, one in zip(changed, found, strict=True):
            drawn[index] = one
    for index, edit in edits.items():
        num_top = edit.rules.logprobs
        if num_top is not None and not drawn[index].failure:
            found_logprobs = token_logprobs(logits[index], drawn[index].token_id, num_top)
            drawn[index] = drawn[index]._replace(logprobs=found_logprobs)
    return drawn


def _rows(logits: Tensor, indexes: list[int]) -> Tensor:
    return logits if len(indexes) == len(logits) else logits[indexes]


def _draw_greedy(logits: Tensor, edits: Edits) -> Iterator[tuple[int, Drawn]]:
    """Draw the tokens of greedy rows on CPU. Logits that only get bans are not copied."""
    for changes in (False, True):
        group = {index: edit for index, edit in edits.items() if edit.changes_scores == changes}
        if not group:
            continue
        allowed = [allowed_bits(edit, logits.shape[1]) for edit in group.values()]
        if changes:
            found = likeliest(changed_scores(logits, group), allowed=allowed)
        else:
            found = likeliest(logits, list(group), allowed)
        for (index, edit), token_id in zip(group.items(), found, strict=True):
            yield index, _no_token(edit) if token_id == NOTHING_ALLOWED else Drawn.of(token_id, token_id == NOT_FINITE)


def _draw_changed(logits: Tensor, rows: Sequence[SamplingRow], edits: Edits) -> list[Drawn]:
    """Draw the tokens of rows whose rules change their scores.

    Args:
        rows: sampling parameters of the rows that `edits` names, in its order.
    """
    scores = edited_scores(logits, edits)
    drawn = []
    found = zip(edits.values(), *sample(scores, rows), has_a_token(scores), strict=True)
    for place, (edit, token, is_bad, has_one) in enumerate(found):
        rules = edit.rules
        if not is_bad and not has_one:
            drawn.append(_no_token(edit))
        elif not is_bad and rules.narrows and rows[place].temperature:
            drawn.append(Drawn(draw_within(scores[place], rows[place], rules)))
        else:
            drawn.append(Drawn.of(token, is_bad))
    return drawn


def _no_token(edit: Edit) -> Drawn:
    follows = edit.mask is None or edit.mask.value is not None
    return Drawn(0, Failure.NO_TOKEN if follows else Failure.GRAMMAR)
