"""Solaris: speculate which user-ad pairs are about to be asked for, run the FM on them, publish their embeddings (arXiv 2604.12110)."""
