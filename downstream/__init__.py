"""The hot path: lightweight rankers that read the foundation model's embeddings just in time, behind HTTP."""
