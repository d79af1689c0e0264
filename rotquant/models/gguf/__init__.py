"""GGUF files, llama.cpp's, as checkpoints: header, network, tokenizer, and what they were dequantized from."""
