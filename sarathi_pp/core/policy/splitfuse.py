"""Dynamic SplitFuse: every forward pass has exactly the same number of tokens (DeepSpeed-FastGen, arXiv 2401.08671).

"Long prompts are decomposed into much smaller chunks [...]. Short prompts will be composed to exactly fill a target
token budget. Even short prompts may be decomposed to ensure the budget is precisely met." The next tokens of running
requests come first, then prompts in the order of arrival (DeepSpeed-MII, mii/batching/ragged_batching.py,
`schedule_requests`). So a microbatch holds exactly the budget whenever that many tokens can be computed.

The policy looks at the number of tokens alone. The paper argues that it decides the time of a pass on a single GPU. The
price on a pipeline: a microbatch may be all decodes or all prompt, and an equal number of tokens then does not
take an equal time.

If several chunks of one prompt may be in flight, as here, these are mostly the microbatches of the policy `vllm`. A
prompt takes the whole budget until its last chunk, so no younger request can decode before. The two policies differ if
decodes exceed the budget: this one leaves out the decodes that became ready last, `vllm` the youngest requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_pp.core.policy.prompts import fill
from sarathi_pp.core.policy.view import Grant, Limits, Policy, View


@dataclass(frozen=True, slots=True)
class SplitFuse(Policy):
    def pick(self, view: View) -> list[Grant]:
        return fill((*view.decodes, *view.prefills, *view.waiting), view.limits.chunk_size)

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size
