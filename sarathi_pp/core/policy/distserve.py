"""DistServe on one pipeline: prefill and decode are separated in time, not on machines of their own.

DistServe (Zhong et al., OSDI 2024, section 4.3) runs whole prompts of up to L_m tokens together. L_m is the smallest
number of tokens with which a stage works at full speed. Longer prompts run alone. TD-Pipe (arXiv 2506.10470) alternates
the two phases on one pipeline, and so does this policy:

    prefill   lasts until max_num_seqs requests run, the KV cache is 90 % full, or no request waits (90 % is TD-Pipe's
              figure, without its predictor of output lengths)
    decode    lasts until only a share of its sequences is left. Each microbatch decodes a P-th of them (P stages)

Microbatches of one phase take similar times. Each change of phase is a bubble, and a request that arrives in a decode
phase waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sarathi_pp.core.policy.parameter import parameter
from sarathi_pp.core.policy.prompts import longest_prompt
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View

# Share of the KV cache that prompts leave free.
_KV_RESERVE = 0.1


@dataclass(slots=True)
class DistServe(Policy):
    """DistServe's scheduler. The chunk size is L_m.

    Attributes:
        low: a decode phase ends if at most this percentage of its sequences is left.
    """

    low: int = parameter(50, least=0, most=100)
    _prefilling: bool = field(default=False, init=False)
    _seats: int = field(default=0, init=False)  # prompts that this prefill phase may still start
    _begun_with: int = field(default=0, init=False)  # running sequences at the start of this decode phase

    def pick(self, view: View) -> list[Grant]:
        running = len(view.running)
        few = not self._prefilling and 100 * running <= self.low * self._begun_with
        if view.waiting and (few or running == 0):
            # The seats are counted once per phase. Requests of one token end within the phase. If others could take
            # their seats, the phase could last forever.
            self._prefilling, self._seats = True, view.limits.max_num_seqs - running
        if self._prefilling:
            grants = self._prompts(view)
            if grants:
                return grants
            self._prefilling, self._begun_with = False, running
        cohorts = view.limits.num_stages
        size = running // cohorts + (view.slot < running % cohorts)
        return [Grant(s, 1) for s in view.decodes[: max(size, 1)]]

    def _prompts(self, view: View) -> list[Grant]:
        """Return grants of whole prompts of at most L_m tokens together, or of one longer prompt."""
        limits = view.limits
        reserve = _KV_RESERVE * limits.num_pages * limits.page_size
        grants: list[Grant] = []
        num_tokens = 0
        for sequence in view.waiting:
            full = self._seats <= 0 or view.free_tokens - num_tokens < reserve
            if full or (grants and num_tokens + sequence.remaining > limits.chunk_size):
                break
            grants.append(Grant(sequence, sequence.remaining))
            num_tokens += sequence.remaining
            self._seats -= 1
        return grants

    def max_tokens(self, limits: Limits) -> int:
        return max(longest_prompt(limits), limits.chunk_size, limits.max_decodes)
