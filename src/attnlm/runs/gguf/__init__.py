"""GGUF files: a model and its tokenizer in one file, for llama.cpp and what is built on it."""
