"""Tally: how many requests there were, and how much of their prompts was there."""

from __future__ import annotations

from radixcache.paging.resume import ResumePlan


class Tally:
    """Counters of one cache; CacheStats says what they mean."""

    def __init__(self) -> None:
        self.requests = self.hit_tokens = self.miss_tokens = self.off_grid_tokens = 0
        self.short_reasons: dict[str, int] = {}

    def count(self, plan: ResumePlan, prompt_tokens: int) -> None:
        """A request was planned."""
        self.requests += 1
        self.hit_tokens += plan.resume
        self.miss_tokens += prompt_tokens - plan.resume
        self.off_grid_tokens += plan.off_grid
        if plan.reason is not None:
            self.short_reasons[plan.reason] = self.short_reasons.get(plan.reason, 0) + 1

    def found_more(self, tokens: int) -> None:
        """Of a prompt that was counted already so many tokens more need not be evaluated."""
        self.hit_tokens += tokens
        self.miss_tokens -= tokens
