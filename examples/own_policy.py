"""Write an eviction policy of your own, and see on a trace whether it finds more than LRU.

In this folder, with your trace: radixcache simulate TRACE --policy lru,own_policy:KeepPopular --capacity-blocks 100
"""

from policies import Entry, OrderedPolicy
from runner.simulate.simulator import simulate
from runner.traces.synthesis import Synth, synthesize


class KeepPopular(OrderedPolicy):
    """Evict what fewer than three requests have used; among equals the least recently used, its end first."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """The smallest key is evicted first."""
        return (entry.uses > 2, entry.last_used, -entry.end)


if __name__ == "__main__":
    # Short conversations with many applications, a few of which get most of the requests.
    traffic = Synth(requests=400, applications=60, turns=1.2, agent_share=0)
    trace = synthesize(traffic, seed=1, name="made up")
    print(f"{len(trace.requests)} requests, {trace.prompt_tokens:,} prompt tokens")
    for capacity_blocks in (100, 400):
        for policy in ("lru", f"{__name__}:KeepPopular", "belady"):  # belady knows the future: no policy finds more
            row = simulate(trace, policy, capacity_blocks)
            print(f"{capacity_blocks:5} blocks  {policy:22}  {row.token_hit_ratio:.1%} of the prompt tokens found")
