"""A transformers model: where its parts are, how it is loaded and placed, and how text streams through its layers."""
