"""Folders of Hugging Face's format: stock classes of `transformers`, as JSON and safetensors."""
