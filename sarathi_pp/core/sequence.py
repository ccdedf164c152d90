"""The state of one request: three cursors (counts of tokens) over its prompt and output.

    tokens   [ prompt .................. | output ...... ]
              0 ....... done ........ issued ......... known
              `- KV written -' `- in flight -' `- to be computed

Pages that were found in the prefix cache count as written, although another sequence may still be writing them.

`done <= issued <= known` always. If issued == known, the next token is in flight and nothing can be issued.

With Limits.issues_ahead, a token in flight may already have its place in `tokens`, with EXPECTED as its id. It then
counts as known, so its decode can be issued. The stage knows the id, because it has drawn the token. Chunks count as
done when they are issued, since policies do not see the microbatch in flight.

After the prompt, issued == known - 1 whenever a token can be issued. The chunk of this one token is a decode, unless
the sequence starts with it. So the cursors show the phase (prefill or decode), and it is not stored.

Several chunks of a sequence may be in flight at once. Stages compute microbatches in the order in which they come.
So chunk k has written its keys and values (KV) on a stage before that stage computes chunk k+1.
"""

from __future__ import annotations

from array import array

from sarathi_pp.core.draw_rules import TOKEN_BYTES, first_bytes
from sarathi_pp.core.plan import Scored, TokenLogprobs
from sarathi_pp.core.prompt_logprobs import PromptLogprobs
from sarathi_pp.core.request import Request
from sarathi_pp.core.request_index import index_name

# Id of a token that is drawn by a microbatch in flight.
EXPECTED = -1


class Sequence:
    """The tokens of one request, its three cursors and its KV pages.

    Args:
        order: number of sequences that were submitted before. The oldest sequence goes first, and the newest one loses
            its pages first. The index is only a name: it need not grow with the arrivals.

    Attributes:
        draw: the fields of a SamplingRow, except the position.
        rules: DrawRules as bytes; empty if the request has none.
        logprobs: those of the output tokens; None if the request does not want them.
        prompt_logprobs: those of the prompt tokens so far; None if the request does not want them.
        epoch: number of times that it lost its pages so far. Its known tokens are then computed again, as far as their
            pages are not found.
        num_preemptions: number of preemptions among them.
        pages: ids of its KV pages, in the order of its tokens. Empty while it waits.
        digests: digests of its full pages, as far as they are known (pages.py). This and the following fields are the
            prefix cache's (prefix_cache.py).
        found: ids of the shared pages with which it can begin, or did begin. While it waits, `done` and `issued` are
            the number of tokens of these pages.
        entry: the entry of the last one of them, see PagePool.match.
        num_entered: number of its pages that it has entered in the index or found there, from the first one on.
        enters: it enters further pages when they are full.
        num_found: number of tokens of these pages.
        num_cached: number of prompt tokens that were found when it first began.
        slot: id of its state slot (state_slots.py); -1 while it waits, and in a model without states.
        num_expected: number of tokens at the end of `tokens` whose ids are EXPECTED.
    """

    __slots__ = (
        "request",
        "index",
        "order",
        "num_prompt",
        "draw",
        "rules",
        "tokens",
        "logprobs",
        "prompt_logprobs",
        "done",
        "issued",
        "epoch",
        "num_preemptions",
        "pages",
        "digests",
        "found",
        "entry",
        "num_entered",
        "enters",
        "num_found",
        "num_cached",
        "slot",
        "num_expected",
    )

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.index = request.index
        self.order = order
        self.num_prompt = len(request.prompt_token_ids)
        params = request.sampling
        assert params.seed is not None, "requests carry a concrete seed"
        self.draw = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
        self.rules = request.rules.to_bytes() if request.rules is not None else b""
        # An array and not a list: the garbage collector would walk all tokens of all sequences, 100 ms with 4096 of
        # them. Until `start` it is the request's own array, so that the tokens of a waiting prompt are stored once.
        assert isinstance(request.prompt_token_ids, array)
        self.tokens: array[int] = request.prompt_token_ids
        wants_logprobs = request.rules is not None and request.rules.logprobs is not None
        self.logprobs: list[TokenLogprobs] | None = [] if wants_logprobs else None
        wanted = params.prompt_logprobs
        self.prompt_logprobs = PromptLogprobs(params.logprobs_from, wanted) if wanted is not None else None
        self.done = 0
        self.issued = 0
        self.epoch = 0
        self.num_preemptions = 0
        self.pages: list[int] = []
        self.digests: list[bytes] = []
        self.found: list[int] = []
        self.entry = 0
        self.num_entered = 0
        self.enters = False
        self.num_found = 0
        self.num_cached = 0
        self.slot = -1
        self.num_expected = 0

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def num_drawn(self) -> int:
        """Number of tokens whose ids are known: those of the prompt, and those whose results are back."""
        return len(self.tokens) - self.num_expected

    @property
    def remaining(self) -> int:
        """Number of known tokens that are not yet issued."""
        return len(self.tokens) - self.issued

    @property
    def decoding(self) -> bool:
        """Return whether the next grant is a decode, if it runs."""
        return self.issued == len(self.tokens) - 1 and self.issued >= self.num_prompt

    @property
    def paragraph_ends(self) -> tuple[int, ...]:
        return self.request.paragraph_ends

    @property
    def most_rules_bytes(self) -> int:
        """Number of bytes of `first_rules` if it starts now. There are none without rules."""
        return len(self.rules) + 1 + TOKEN_BYTES * self.issued

    def first_rules(self) -> bytes:
        """Return the rules for the first chunk, with the tokens before it; empty if the request has none."""
        return first_bytes(self.rules, self.tokens[: self.done]) if self.rules else b""

    @property
    def past_prompt(self) -> bool:
        """Return whether the whole prompt is issued."""
        return self.issued >= self.num_prompt

    def scored(self, start: int, end: int) -> Scored | None:
        """Return the tokens whose log probabilities a chunk of the tokens [start, end) must give; None if none.

        Tokens that have theirs already, from before a preemption, are left out.
        """
        if self.prompt_logprobs is None:
            return None
        first, stop = max(start + 1, self.prompt_logprobs.next), min(end + 1, self.num_prompt)
        if first >= stop:
            return None
        return Scored(first, stop, self.prompt_logprobs.num_top, self.tokens[end] if end < stop else -1)

    def start(self) -> None:
        """Copy the tokens from the request, so that output can be appended to them. A second call does nothing."""
        if self.tokens is self.request.prompt_token_ids:
            self.tokens = self.tokens[:]

    def expect(self) -> None:
        """Add the token that the chunk just issued will draw."""
        self.tokens.append(EXPECTED)
        self.num_expected += 1

    def add(self, token_id: int) -> None:
        """Take in the id of the oldest token in flight."""
        if self.num_expected:
            self.tokens[-self.num_expected] = token_id
            self.num_expected -= 1
        else:
            self.tokens.append(token_id)

    def forget_expected(self) -> None:
        """Remove the tokens whose ids are not known. Their results will be dropped."""
        if self.num_expected:
            del self.tokens[-self.num_expected :]
            self.num_expected = 0

    def restart(self) -> None:
        """Forget all computed keys and values, and the pages.

        Chunks in flight carry the earlier epoch, so their results will be dropped.
        """
        self.done = self.issued = 0
        self.epoch += 1
        self.pages = []
        self.found = []
        self.entry = self.num_entered = self.num_found = 0
        self.enters = False
        self.slot = -1

    def __repr__(self) -> str:
        cursors = f"{self.done}<={self.issued}<={self.known}"
        return f"Sequence(s{index_name(self.index)}.{self.epoch} {cursors} pages={len(self.pages)})"
