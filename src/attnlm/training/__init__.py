"""Training: the loop, the optimizer and the validation loss."""
