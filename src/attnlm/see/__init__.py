"""What a run learned, made visible: attention, heads, one forward pass step by step."""
