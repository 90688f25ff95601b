"""What a run learned, made visible: curves, the ladder, attention, heads, one forward pass."""
