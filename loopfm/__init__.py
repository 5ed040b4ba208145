"""LoopFM: what the foundation model knows, in a form that small models can read (arXiv 2605.29280)."""
