"""Complete tasks, such as training, evaluation and a ladder."""
