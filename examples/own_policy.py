"""Write your own eviction policy, and compare it with LRU on a trace.

With your own trace, in this folder: radixcache simulate TRACE --policy lru,own_policy:KeepPopular --capacity-blocks 100
"""

from policies import Entry, OrderedPolicy
from runner.simulate.simulator import simulate
from runner.traces.synthesis import Synth, synthesize


class KeepPopular(OrderedPolicy):
    """Evict entries with fewer than three uses first; among equals the least recently used, its end first."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """The smallest key is evicted first."""
        return (entry.uses > 2, entry.last_used, -entry.end)


if __name__ == "__main__":
    # Short conversations with 60 applications; a few applications get most of the requests.
    traffic = Synth(requests=400, applications=60, turns=1.2, agent_share=0)
    trace = synthesize(traffic, seed=1, name="made up")
    print(f"{len(trace.requests)} requests, {trace.prompt_tokens:,} prompt tokens")
    for capacity_blocks in (100, 400):
        for policy in ("lru", f"{__name__}:KeepPopular", "belady"):  # belady knows the future: no policy finds more
            row = simulate(trace, policy, capacity_blocks)
            print(f"{capacity_blocks:5} blocks  {policy:22}  {row.token_hit_ratio:.1%} of the prompt tokens found")
