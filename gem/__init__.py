"""GEM, the foundation model: its embeddings, training, metrics and inference engine."""
