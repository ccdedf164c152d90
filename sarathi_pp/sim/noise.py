"""Random factors for modelled times, so that simulated stages are as uneven as real ones.

jitter    a factor that is drawn again for every microbatch on every stage
drift     a factor for the speed of a stage, which changes slowly. It is an Ornstein-Uhlenbeck process: the correlation
          with an earlier value falls with time as exp(-t / seconds). More microbatches in flight do not even it out.
"""

from __future__ import annotations

import math
import random

from sarathi_pp.core.cost.profile import NO_DRIFT, Drift

# Noise never makes a microbatch faster than this share of its modelled time.
_LEAST = 0.5


class Noise:
    """The source of the factors. The same seed and the same calls give the same factors.

    Jitter and drift have random numbers of their own. So jitter is the same with and without drift.

    Args:
        jitter_cv: standard deviation of the jitter, whose mean is 1.
    """

    def __init__(self, num_stages: int, jitter_cv: float = 0.0, drift: Drift = NO_DRIFT, seed: int = 0) -> None:
        self.quiet = not jitter_cv and not drift.cv
        self._jitter_cv = jitter_cv
        self._drift = drift
        self._jitters = random.Random(seed)
        self._drifts = random.Random(f"drift {seed}")
        self._off = [self._drifts.gauss(0.0, drift.cv) for _ in range(num_stages)]
        self._seen_s = [0.0] * num_stages

    def factor(self, stage: int, at_s: float) -> float:
        """Return the factor for the time of a microbatch that starts on a stage at `at_s`.

        For each stage, `at_s` must not decrease from call to call.
        """
        factor = self._jitters.gauss(1.0, self._jitter_cv) if self._jitter_cv else 1.0
        if self._drift.cv:
            kept = math.exp(-(at_s - self._seen_s[stage]) / self._drift.seconds)
            fresh = self._drift.cv * math.sqrt(1 - kept * kept)
            self._off[stage] = kept * self._off[stage] + self._drifts.gauss(0.0, fresh)
            self._seen_s[stage] = at_s
            factor *= 1 + self._off[stage]
        return max(_LEAST, factor)
