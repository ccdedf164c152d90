"""Log probabilities of drawn tokens, from the model's own logits: before rules, temperature and filters.

Each row is computed alone, in float64. So the numbers do not depend on the other rows of a microbatch.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sarathi_pp.core.plan import TokenLogprobs


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log probability of a token, and those of the likeliest tokens.

    Args:
        logits: (vocab,), finite.
        num_top: number of the likeliest tokens; 0 for none. Of equal logits, lower ids come first.
    """
    row = logits.double()
    total = _log_sum_exp(row)
    top: list[tuple[int, float]] = []
    if num_top > 0:
        least = row.topk(min(num_top, len(row))).values[-1]
        places = (row >= least).nonzero().squeeze(1)
        pairs = sorted(zip((-row[places]).tolist(), places.tolist(), strict=True))
        top = [(index, -negative - total) for negative, index in pairs[:num_top]]
    return TokenLogprobs(row[token_id].item() - total, tuple(top))


def _log_sum_exp(row: Tensor) -> float:
    if row.device.type != "cpu":
        return float(row.logsumexp(0))
    values = row.numpy()  # numpy's sum does not depend on the number of threads
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))
