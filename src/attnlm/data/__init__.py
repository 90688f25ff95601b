"""Data sets: prepared, opened, cut into batches."""
