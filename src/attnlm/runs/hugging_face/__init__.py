"""Import folders in Hugging Face's format: JSON and safetensors of stock `transformers` classes."""
