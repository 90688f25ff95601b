"""Show what a run learned: loss curves, ladders, attention, heads, one forward pass."""
