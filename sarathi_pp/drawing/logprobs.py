"""Log probabilities of drawn tokens, from the model's own logits: before rules, temperature and filters.

Each row is computed alone, in float64. So the numbers do not depend on the other rows of a microbatch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sarathi_pp.core.plan import TokenLogprobs


def token_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log probability of a token, and those of the likeliest tokens.

    Args:
        logits: (vocab,), finite.
        num_top: number of the likeliest tokens; 0 for none. Of equal logits, lower ids come first.
    """
    total = _log_sum_exp(logits)
    top: list[tuple[int, float]] = []
    if num_top > 0:
        row = logits.float()
        least = row.topk(min(num_top, len(row))).values[-1]
        places = _places(row >= least)
        pairs = sorted(zip((-row[places]).tolist(), places.tolist(), strict=True))
        top = [(index, -negative - total) for negative, index in pairs[:num_top]]
    return TokenLogprobs(logits[token_id].item() - total, tuple(top))


def _places(found: Tensor) -> Tensor:
    """Return the indexes of the true values of a vector."""
    if found.device.type != "cpu":
        return found.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(found.numpy()))  # torch takes ten times as long


def _log_sum_exp(logits: Tensor) -> float:
    if logits.device.type != "cpu":
        return float(logits.double().logsumexp(0))
    values = logits.to(torch.float64, copy=True).numpy()  # numpy's sum does not depend on the number of threads
    largest = values.max()
    values -= largest
    return float(largest + np.log(np.exp(values, out=values).sum()))
