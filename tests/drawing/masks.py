"""The masks of grammars, for tests."""

from __future__ import annotations

import numpy as np

from sarathi_pp.drawing.grammar import GrammarThread, Guide, Mask


def computed(grammars: GrammarThread, guide: Guide) -> Mask:
    """Return the next mask of a grammar."""
    mask = guide.next_mask()
    assert mask is not None and mask.value is None
    grammars.compute([mask]).result(timeout=60)
    return mask.value


def allowed(grammars: GrammarThread, guide: Guide) -> list[int] | None:
    """Return the ids of the tokens that may follow; None if the grammar cannot go on."""
    mask = computed(grammars, guide)
    return None if mask is None else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
