"""attnlm: prepare a text, train small attention language models on it, read what they learned."""
